#include "troupe/actors/membership/membership_store.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "troupe/actors/base/phrases.hpp"
#include "troupe/actors/membership/membership.hpp"
#include "troupe/actors/secrets/door_files.hpp"
#include "troupe/actors/secrets/door_user_secret.hpp"
#include "troupe/kvcache/or_error.hpp"
#include "troupe/transport/os_error.hpp"

namespace troupe::actors {

namespace {

using transport::owned_fd;
using transport::what_errno;

constexpr auto retry_interval = std::chrono::seconds{1};
constexpr std::size_t read_at_once = std::size_t{1} << 16;

owned_fd open_file(const std::string& path, int flags) {
  return owned_fd{::open(path.c_str(), flags | O_CLOEXEC, 0600)};
}

unexpected cannot_write(const std::string& path, const std::string& what) {
  return fail(errc::invalid_config,
              std::string{"the state file "} + path + " cannot be written (" + what +
                  "); make its folder, give this user the right to write it, or name another "
                  "path, or none, as supervisor.state_file");
}

unexpected not_ours(const std::string& path, const std::string& why) {
  return fail(errc::invalid_config,
              std::string{"the state file "} + path + " cannot be used: " + why +
                  "; it is left as it is: move it away, or name another path, or none, as "
                  "supervisor.state_file");
}

/// Why a file could not be read. A cause that may pass (`overloaded`) says nothing about the file.
unexpected cannot_read(int number) {
  constexpr std::array passing{EMFILE, ENFILE, ENOMEM, EINTR, EAGAIN, EIO, ESTALE, ETIMEDOUT};
  const bool passes = std::ranges::find(passing, number) != passing.end();
  return fail(passes ? errc::overloaded : errc::invalid_config, what_errno(number));
}

/// Reads the whole text. Fails with a sentence if it is not a plain file, or too long.
result<std::string> read_all(int fd) {
  struct stat about {};
  if (::fstat(fd, &about) != 0) return cannot_read(errno);
  if (!S_ISREG(about.st_mode)) return fail(errc::invalid_config, "it is not a file");
  std::string text;
  for (;;) {
    const auto before = text.size();
    if (before > max_record_text) return fail(errc::invalid_config, "it is too long");
    text.resize(before + read_at_once);
    const auto count = ::read(fd, text.data() + before, read_at_once);
    text.resize(before + (count > 0 ? static_cast<std::size_t>(count) : 0));
    if (count < 0 && errno != EINTR) return cannot_read(errno);
    if (count == 0) return text;
  }
}

/// The other process that holds the lock, according to the lock file.
std::string holder_of(int lock_fd) {
  std::string text(32, '\0');
  const auto count = ::pread(lock_fd, text.data(), text.size(), 0);
  text.resize(count > 0 ? static_cast<std::size_t>(count) : 0);
  text.resize(std::min(text.size(), text.find_first_not_of("0123456789")));
  return text.empty() ? "" : std::string{" (pid "} + text + ")";
}

/// Opens the file without changing it, and only if it is a plain file: a file beside the state may
/// belong to somebody else.
result<owned_fd> open_beside(const std::string& path, int flags) {
  auto fd = open_file(path, flags | O_CREAT | O_NONBLOCK | O_NOFOLLOW);
  if (!fd) return fail(errc::invalid_config, path + ": " + what_errno(errno));
  struct stat about {};
  if (::fstat(fd.get(), &about) != 0 || !S_ISREG(about.st_mode))
    return fail(errc::invalid_config, path + ": it is not a file");
  return fd;
}

/// The lock is held until the descriptor is closed; the kernel closes it if this process is killed.
result<owned_fd> lock_beside(const std::string& path) {
  const auto lock = path + ".lock";
  auto held = open_beside(lock, O_RDWR);
  if (!held) return cannot_write(path, held.error().message);
  if (::flock(held->get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) return cannot_write(path, lock + ": " + what_errno(errno));
    return fail(errc::already_exists, std::string{"the state file "} + path +
                                          " is used by another supervisor" +
                                          holder_of(held->get()) +
                                          "; stop that process, or name another file as "
                                          "supervisor.state_file");
  }
  return held;
}

/// Writes the process id for a process that finds the file locked.
void say_who_holds(int lock_fd) {
  if (::ftruncate(lock_fd, 0) == 0) (void)write_private(lock_fd, std::to_string(::getpid()));
}

/// Resolves symbolic links, since renaming over a link would replace the link, not its target.
std::string behind_links(std::filesystem::path path) {
  constexpr int most = 40;  // the kernel's own limit
  std::error_code failed;
  for (int i = 0; i < most && std::filesystem::is_symlink(path, failed); ++i) {
    const auto target = std::filesystem::read_symlink(path, failed);
    if (failed) break;
    path = target.is_absolute() ? target : path.parent_path() / target;
  }
  return path.string();
}

std::string folder_of(const std::string& path) {
  const auto folder = std::filesystem::path{path}.parent_path();
  return folder.empty() ? "." : folder.string();
}

}  // namespace

// -- opening

membership_store::membership_store(std::string path, transport::owned_fd lock)
    : path_{std::move(path)}, lock_{std::move(lock)} {}

result<std::unique_ptr<membership_store>> membership_store::open(std::string path,
                                                                 const std::string& cluster) {
  std::error_code ignored;
  path = behind_links(path);
  if (std::filesystem::is_directory(path, ignored)) return cannot_write(path, "it is a folder");
  // Checked first, since merely opening a device or a pipe has effects.
  const bool is_there = std::filesystem::exists(path, ignored);
  if (is_there && !std::filesystem::is_regular_file(path, ignored)) {
    return not_ours(path, "it is not a file");
  }
  auto lock = lock_beside(path);
  if (!lock) return fail(lock.error());
  std::unique_ptr<membership_store> store{new membership_store{std::move(path), std::move(*lock)}};
  auto found = store->read(cluster);
  if (!found) return fail(found.error());
  say_who_holds(store->lock_.get());
  store->found_ = std::move(*found);
  auto reservation = store->found_.value_or(membership_record{cluster, 0, {}});
  reservation.epoch_limit += epoch_reserve;
  if (auto written = store->write(reservation); !written) return fail(written.error());
  store->thread_ = std::thread{[raw = store.get()] { raw->run(); }};
  return store;
}

result<std::optional<membership_record>> membership_store::read(const std::string& cluster) const {
  auto text = read_text();
  if (!text && text.error().code == errc::not_found) return std::nullopt;
  if (!text && text.error().code == errc::overloaded) {
    return fail(errc::overloaded, std::string{"the state file "} + path_ + " cannot be read now (" +
                                      text.error().message +
                                      "); it is left as it is: mend that and start the "
                                      "supervisor again");
  }
  if (!text) return not_ours(path_, text.error().message);
  if (text->empty()) return std::nullopt;
  if (!is_of_record(*text)) return not_ours(path_, "it holds no state of Troupe's");
  auto record = parse_record(*text);
  if (!record) {
    if (auto aside = set_aside(record.error().message); !aside) return fail(aside.error());
    return std::nullopt;
  }
  if (record->cluster != cluster) {
    return not_ours(path_,
                    std::string{"it is of cluster '"} + printable(record->cluster, 64) + "'");
  }
  return std::optional{std::move(*record)};
}

/// `not_found` if there is no file; `overloaded` if reading it may succeed later.
result<std::string> membership_store::read_text() const {
  const auto there = open_file(path_, O_RDONLY | O_NONBLOCK);
  if (!there && errno == ENOENT) return fail(errc::not_found, what_errno(ENOENT));
  if (!there) return cannot_read(errno);
  return read_all(there.get());
}

/// Renames the file to the first of `.bad`, `.bad.1`, ... that is not taken; fails if it cannot.
result<void> membership_store::set_aside(const std::string& why) const {
  constexpr int most = 1000;
  auto bad = path_ + ".bad";
  for (int i = 1; i <= most; ++i) {
    // Making a link never replaces a file; not every file system can rename that way.
    if (::link(path_.c_str(), bad.c_str()) == 0) {
      if (::unlink(path_.c_str()) != 0) break;
      logger("supervisor")
          ->error(
              "the state file {} cannot be used: {}; it is renamed to {}, and the supervisor "
              "starts "
              "afresh",
              path_, why, bad);
      return {};
    }
    if (errno != EEXIST) break;
    bad = path_ + ".bad." + std::to_string(i);
  }
  return not_ours(path_,
                  why + ", and it cannot be renamed to " + bad + " (" + what_errno(errno) + ")");
}

// -- writing

result<void> membership_store::write(const membership_record& record) const {
  const auto beside = path_ + ".tmp";
  {
    const auto fresh = open_beside(beside, O_WRONLY);
    if (!fresh) return cannot_write(path_, fresh.error().message);
    int why = ::ftruncate(fresh->get(), 0) == 0 ? 0 : errno;
    if (why == 0) why = write_private(fresh->get(), to_text(record));
    if (why != 0) return cannot_write(path_, beside + ": " + what_errno(why));
  }
  if (::rename(beside.c_str(), path_.c_str()) != 0) return cannot_write(path_, what_errno(errno));
  if (const int why = flush_folder(folder_of(path_)); why != 0)
    return cannot_write(path_, "its folder: " + what_errno(why));
  return {};
}

void membership_store::save(membership_record record) {
  {
    const std::lock_guard lock{mutex_};
    if (closing_) return;
    pending_ = std::move(record);
  }
  changed_.notify_one();
}

void membership_store::close() {
  {
    const std::lock_guard lock{mutex_};
    closing_ = true;
  }
  changed_.notify_one();
  if (thread_.joinable()) thread_.join();
  lock_.reset();
}

membership_store::~membership_store() {
  close();
}

void membership_store::run() {
  std::unique_lock lock{mutex_};
  while (!closing_) {
    changed_.wait(lock, [this] { return closing_ || pending_.has_value(); });
    if (pending_) write_pending(lock);
  }
  if (pending_) write_pending(lock);
}

void membership_store::write_pending(std::unique_lock<std::mutex>& lock) {
  auto record = std::move(*pending_);
  pending_.reset();
  lock.unlock();
  const auto written =
      or_error("the state file " + path_ + " cannot be written", [&] { return write(record); });
  const auto held_back = written ? std::nullopt : failures_.pass();
  if (held_back) {
    logger("supervisor")
        ->error(
            "{}; until that is fixed, a restarted supervisor knows only the last state that was "
            "written ({} more since the last such line)",
            written.error().message, *held_back);
  } else if (written && failing_) {
    logger("supervisor")->info("the state file {} is written again", path_);
  }
  failing_ = !written;
  lock.lock();
  if (written || closing_) return;
  if (!pending_) pending_ = std::move(record);
  changed_.wait_for(lock, retry_interval, [this] { return closing_; });
}

// -- which file

namespace {

/// The folder that `auto` means; empty if there is none.
std::string automatic_folder() {
  // NOLINTNEXTLINE(concurrency-mt-unsafe): nobody sets any
  if (const char* set = std::getenv("STATE_DIRECTORY"); set != nullptr && *set != '\0') {
    const std::string_view service{set};
    return std::string{service.substr(0, service.find(':'))};
  }
  const auto user = user_state_folder();
  return user.empty() ? user : user + "/troupe";
}

result<std::unique_ptr<membership_store>> open_automatic(const config::deployment& deployment) {
  const auto folder = automatic_folder();
  if (folder.empty()) return fail(errc::invalid_config, "this user has no home");
  std::error_code failed;
  std::filesystem::create_directories(folder, failed);
  if (failed)
    return fail(errc::invalid_config,
                std::string{"cannot make "} + folder + ": " + failed.message());
  return membership_store::open(folder + "/" + deployment.cluster + "-" +
                                    std::to_string(deployment.supervisor.port) + ".state",
                                deployment.cluster);
}

}  // namespace

result<std::unique_ptr<membership_store>> open_membership_store(
    const config::deployment& deployment) {
  const auto& wanted = deployment.supervisor.state_file;
  const auto without = [](spdlog::level::level_enum level, const std::string& why) {
    logger("supervisor")
        ->log(level, "keeps no state file ({}): epochs and replaced lives end with this process",
              why);
    return std::unique_ptr<membership_store>{};
  };
  constexpr auto chosen = spdlog::level::info;
  if (wanted == "none") return without(chosen, "supervisor.state_file is none");
  if (wanted == "auto" && deployment.supervisor.port == 0) {
    return without(chosen, "supervisor.port is 0");
  }
  auto store = wanted == "auto" ? open_automatic(deployment)
                                : membership_store::open(wanted, deployment.cluster);
  if (!store && wanted == "auto" && store.error().code == errc::invalid_config) {
    return without(spdlog::level::warn, store.error().message);
  }
  return store;
}

}  // namespace troupe::actors
