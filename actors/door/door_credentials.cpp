#include "troupe/actors/door/door_credentials.hpp"

#include <string_view>
#include <thread>
#include <utility>

#include <sys/stat.h>
#include <unistd.h>

#include "troupe/actors/door/certificates.hpp"
#include "troupe/actors/secrets/door_files.hpp"

namespace troupe::actors {

namespace {

constexpr std::size_t least_secret = 32;
constexpr std::size_t max_secrets = 4;
constexpr std::chrono::seconds look_every{1};
/// How long files that do not fit together go unreported.
constexpr std::chrono::seconds silent_time{2};
constexpr std::chrono::hours warning_time{7 * 24};
/// The usual time between the first and the last of several files being replaced.
constexpr std::chrono::milliseconds replacing_time{20};
/// The same if `troupe certs renew` is held up between the two renames, on a busy machine for
/// example.
constexpr std::chrono::seconds longest_replacing{2};

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view blanks = " \t\r\n\v\f";
  const auto from = text.find_first_not_of(blanks);
  if (from == std::string_view::npos) return {};
  return text.substr(from, text.find_last_not_of(blanks) - from + 1);
}

result<std::vector<door_key>> load_keys(const std::string& path) {
  const auto text = read_private_file("secret", path);
  if (!text) return fail(text.error());
  std::vector<door_key> keys;
  std::string_view rest{*text};
  while (!rest.empty()) {
    const auto end = rest.find('\n');
    const auto line = trimmed(rest.substr(0, end));
    rest.remove_prefix(end == std::string_view::npos ? rest.size() : end + 1);
    if (line.empty()) continue;
    if (line.size() < least_secret) {
      return bad_file(
          "secret", path,
          "a secret in it has " + std::to_string(line.size()) +
              " characters, at least 32 are needed that nobody can guess; `troupe certs "
              "init DIR` draws one");
    }
    if (keys.size() == max_secrets)
      return bad_file("secret", path, "it has more than four lines; take the oldest secrets out");
    keys.push_back(door_key_of(line));
  }
  if (keys.empty())
    return bad_file("secret", path, "it is empty; `troupe certs init DIR` draws one");
  return keys;
}

/// Whether a renewal is in progress: the new key may be in place, the certificate is not yet.
bool is_being_renewed(const door_security& security) {
  return security.how == door_security::mode::tls &&
         ::access(file_beside(security.certificate).c_str(), F_OK) == 0;
}

/// `when` is like " expires in 3 hours".
std::string what_ends(door_tls_context::part whose, const door_security& security,
                      const std::string& when) {
  switch (whose) {
    case door_tls_context::part::node:
      return "the certificate " + security.certificate + when +
             "; `troupe certs renew DIR` makes a new one";
    case door_tls_context::part::intermediate:
      return "an authority between the certificate " + security.certificate + " and those of " +
             security.ca + when + "; put a chain there that lasts longer";
    case door_tls_context::part::authority:
      return "an authority of " + security.ca + when +
             "; append a new one to security.ca on every host (`troupe certs init` in another "
             "folder makes it), then give every host a certificate of the new one";
  }
  return {};
}

}  // namespace

result<std::shared_ptr<const door_credentials>> load_door_credentials(
    const door_security& security) {
  auto made = std::make_shared<door_credentials>();
  made->mode = security.how;
  if (security.how == door_security::mode::open) {
    made->keys = {open_door_key()};
    return std::shared_ptr<const door_credentials>{made};
  }
  auto keys = load_keys(security.secret);
  if (!keys) return fail(keys.error());
  made->keys = std::move(*keys);
  if (security.how == door_security::mode::tls) {
    auto tls = door_tls_context::load(security);
    if (!tls) return fail(tls.error());
    made->tls = std::move(*tls);
  }
  return std::shared_ptr<const door_credentials>{made};
}

result<door_credential_watch> door_credential_watch::open(door_security security) {
  door_credential_watch made{std::move(security)};
  const auto until = clock::now() + longest_replacing;
  while (true) {
    made.seen_ = made.look();
    auto loaded = load_door_credentials(made.security_);
    if (loaded) {
      made.in_force_ = std::move(*loaded);
      return made;
    }
    // The files may be in the middle of being replaced: fail only if they stay as they are.
    const bool renewed = is_being_renewed(made.security_) && clock::now() < until;
    std::this_thread::sleep_for(replacing_time);
    if (made.look() == made.seen_ && !renewed) return fail(loaded.error());
  }
}

const std::shared_ptr<const door_credentials>& door_credential_watch::current(
    clock::time_point now, const listeners& tell) {
  if (now < next_look_ || security_.how == door_security::mode::open) return in_force_;
  next_look_ = now + look_every;
  read_again(now, tell);
  warn_of_the_end(now, tell);
  return in_force_;
}

void door_credential_watch::read_again(clock::time_point now, const listeners& tell) {
  const auto before_reading = look();  // the next check sees files written during this one
  const bool changed = before_reading != seen_;
  if (!changed && !misfit_) return;
  seen_ = before_reading;
  auto loaded = load_door_credentials(security_);
  if (loaded) {
    misfit_.reset();
    next_warning_ = {};
    in_force_ = std::move(*loaded);
    if (tell.renewed) tell.renewed("the credentials of the cluster port were read again");
    return;
  }
  if (changed) {
    misfit_ = now;
    told_ = false;
  }
  if (told_ || now - *misfit_ < silent_time) return;
  told_ = true;
  if (tell.failed) {
    tell.failed("the changed credentials cannot be used, the old ones stay in force: " +
                loaded.error().message);
  }
}

void door_credential_watch::warn_of_the_end(clock::time_point now, const listeners& tell) {
  if (!in_force_->tls || now < next_warning_ || !tell.ends) return;
  const auto left = in_force_->tls->time_left();
  if (left > warning_time) return;
  next_warning_ = now + std::chrono::hours{24};
  const auto hours = std::chrono::duration_cast<std::chrono::hours>(left).count();
  const auto when = left.count() <= 0 ? std::string{" has expired: no node is admitted with it"}
                                      : " expires in " + std::to_string(hours) + " hours";
  tell.ends(what_ends(in_force_->tls->first_to_end(), security_, when));
}

door_credential_watch::stamp door_credential_watch::stamp_of(const std::string& path) {
  struct stat about {};
  if (path.empty() || ::stat(path.c_str(), &about) != 0) return {};
  return {about.st_dev,         about.st_ino,          static_cast<std::uint64_t>(about.st_size),
          about.st_mtim.tv_sec, about.st_mtim.tv_nsec, about.st_ctim.tv_sec,
          about.st_ctim.tv_nsec};
}

door_credential_watch::stamps door_credential_watch::look() const {
  return {stamp_of(security_.secret), stamp_of(security_.certificate), stamp_of(security_.key),
          stamp_of(security_.ca)};
}

}  // namespace troupe::actors
