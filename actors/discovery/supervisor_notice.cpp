#include "troupe/actors/discovery/supervisor_notice.hpp"

#include <array>
#include <cerrno>
#include <chrono>
#include <limits>
#include <string_view>
#include <thread>

#include <fcntl.h>
#include <nlohmann/json.hpp>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "troupe/actors/secrets/door_user_secret.hpp"
#include "troupe/config/automatic_host.hpp"
#include "troupe/config/hosts.hpp"
#include "troupe/transport/os_error.hpp"
#include "troupe/transport/types.hpp"

namespace troupe::actors {

namespace {

using transport::owned_fd;
using transport::what_errno;

/// Far more than a notice with a host of 253 characters needs.
constexpr std::size_t max_notice_bytes = 2048;
/// A process that only looks holds the lock for a moment.
constexpr int tries_beside_lookers = 2000;
/// A supervisor writes its identity right after it has locked the notice, which until then names
/// another.
constexpr int tries_of_a_reader = 50;
constexpr std::chrono::milliseconds between_tries{1};

unexpected bad_notice(const std::string& path, const std::string& why) {
  return fail(errc::invalid_config, path + ", which describes the supervisor: " + why);
}

unexpected notice_error(const std::string& path, int number) {
  if (number == ELOOP || number == EISDIR || number == ENXIO)
    return bad_notice(path, "it is not a regular file; move it away");
  if (number == EMFILE || number == ENFILE || number == ENOMEM) {
    return fail(errc::overloaded, path + " cannot be opened: " + what_errno(number) +
                                      "; close some files, or raise the limit (ulimit -n)");
  }
  return bad_notice(path, "it cannot be used: " + what_errno(number));
}

unexpected lock_error(const std::string& path, int number) {
  return bad_notice(path, "it cannot be locked: " + what_errno(number) +
                              "; set XDG_STATE_HOME to a folder of this machine whose file system "
                              "has locks");
}

unexpected elsewhere_error(const std::string& path) {
  return bad_notice(path,
                    "its supervisor is on another machine, or in another network namespace; set "
                    "XDG_STATE_HOME to a folder of this machine alone");
}

/// Opens a plain file of this user. `not_found`: it does not exist.
result<owned_fd> open_notice(const std::string& path, int flags) {
  // Non-blocking, so that a pipe in its place does not block us.
  owned_fd fd{::open(path.c_str(), flags | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600)};
  if (!fd && errno == ENOENT) return fail(errc::not_found, path + " is not there");
  struct stat about {};
  if (!fd || ::fstat(fd.get(), &about) != 0) return notice_error(path, errno);
  if (!S_ISREG(about.st_mode)) return bad_notice(path, "it is not a regular file; move it away");
  if (about.st_uid != ::geteuid()) return bad_notice(path, "it belongs to somebody else");
  return fd;
}

std::string notice_path(const std::string& folder) {
  return folder + "/supervisor";
}

/// Returns an empty string if the notice is empty, too large, or unreadable.
std::string read_notice(int fd) {
  std::array<char, max_notice_bytes + 1> bytes{};
  std::size_t count = 0;
  while (count < bytes.size()) {
    const auto n =
        ::pread(fd, bytes.data() + count, bytes.size() - count, static_cast<off_t>(count));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    count += static_cast<std::size_t>(n);
  }
  return count > max_notice_bytes ? std::string{} : std::string{bytes.data(), count};
}

/// Replaces the whole notice. Returns 0 or an errno.
int write_notice(int fd, const std::string& text) {
  std::string_view left = text;
  while (!left.empty()) {
    const auto at = static_cast<off_t>(text.size() - left.size());
    const auto n = ::pwrite(fd, left.data(), left.size(), at);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno;
    left.remove_prefix(static_cast<std::size_t>(n));
  }
  return ::ftruncate(fd, static_cast<off_t>(text.size())) == 0 ? 0 : errno;
}

/// Returns 0 if there is no such number.
std::uint64_t notice_number(const nlohmann::json& notice, const char* key, std::uint64_t most) {
  const auto found = notice.find(key);
  if (found == notice.end() || !found->is_number_unsigned()) return 0;
  const auto value = found->get<std::uint64_t>();
  return value <= most ? value : 0;
}

bool is_credible_host(const std::string& host, const config::deployment& of) {
  if (of.security.mode != config::security_mode::tls) return config::is_loopback(host);
  return config::is_host(host) && !config::is_wildcard(host) && !config::is_automatic(host);
}

/// The part of every notice that identifies this process and its machine.
nlohmann::json own_notice() {
  const auto here = transport::host_identity::of_this_process();
  return {{"pid", ::getpid()},
          {"boot_id", here.boot_id},
          {"network_namespace", here.network_namespace}};
}

/// Whether the notice's writer runs in another place (machine or network namespace). A value
/// unknown there or here proves nothing.
bool is_of_another_place(const nlohmann::json& notice) {
  const auto here = transport::host_identity::of_this_process();
  const auto boot = notice.find("boot_id");
  const auto boot_id =
      boot != notice.end() && boot->is_string() ? boot->get<std::string>() : std::string{};
  const auto net =
      notice_number(notice, "network_namespace", std::numeric_limits<std::uint64_t>::max());
  const bool other_machine = !boot_id.empty() && !here.boot_id.empty() && boot_id != here.boot_id;
  const bool other_net = net != 0 && here.network_namespace != 0 && net != here.network_namespace;
  return other_machine || other_net;
}

/// Returns false if a process in another place holds the notice.
bool read_into(seen_notice& seen, const std::string& text, const config::deployment& of) {
  const auto notice = nlohmann::json::parse(text, nullptr, false);
  if (!notice.is_object()) return true;
  seen.pid = static_cast<std::uint32_t>(
      notice_number(notice, "pid", std::numeric_limits<std::int32_t>::max()));
  if (seen.pid == 0) return true;
  seen.incarnation =
      notice_number(notice, "incarnation", std::numeric_limits<std::uint64_t>::max());
  if (!seen.held) return true;
  if (is_of_another_place(notice)) return false;
  found_supervisor at;
  const auto host = notice.find("host");
  if (host != notice.end() && host->is_string()) at.host = host->get<std::string>();
  at.port = static_cast<std::uint16_t>(
      notice_number(notice, "port", std::numeric_limits<std::uint16_t>::max()));
  at.pid = seen.pid;
  at.incarnation = seen.incarnation;
  if (at.port != 0 && at.incarnation != 0 && is_credible_host(at.host, of))
    seen.listens = std::move(at);
  return true;
}

/// Reads a notice that a supervisor holds. `invalid_config`: the supervisor is in another place.
result<seen_notice> read_held(const std::string& path, int fd, const config::deployment& of,
                              bool until_it_says_who) {
  for (int tries = 1;; ++tries) {
    seen_notice seen;
    seen.held = true;
    const bool is_near = read_into(seen, read_notice(fd), of);
    const bool is_told = is_near && (seen.pid != 0 || !until_it_says_who);
    if (is_told || tries == tries_of_a_reader) {
      if (!is_near) return elsewhere_error(path);
      return seen;
    }
    std::this_thread::sleep_for(between_tries);
  }
}

/// The error for claiming a notice that another supervisor holds.
unexpected held_error(const std::string& path, int fd, const config::deployment& of) {
  const auto seen = read_held(path, fd, of, true);
  if (!seen) return fail(seen.error());
  const auto who =
      seen->pid == 0 ? "another process" : "the process of pid " + std::to_string(seen->pid);
  return fail(errc::already_exists, "cluster " + of.cluster +
                                        " has a supervisor on this machine: " + who + " (see " +
                                        path + "); use that one, or stop it first");
}

}  // namespace

file_lock& file_lock::operator=(file_lock&& other) noexcept {
  if (this != &other) {
    give_up();
    held_ = std::move(other.held_);
  }
  return *this;
}

void file_lock::give_up() noexcept {
  if (held_) ::flock(held_.get(), LOCK_UN);
  held_.reset();
}

result<file_lock> lock_beginning(const std::string& folder) {
  const auto path = folder + "/supervisor.begin";
  auto fd = open_notice(path, O_RDWR | O_CREAT);
  if (!fd) return fail(fd.error());
  if (::flock(fd->get(), LOCK_EX | LOCK_NB) == 0) return file_lock{std::move(*fd)};
  if (errno == EWOULDBLOCK) return file_lock{};
  return lock_error(path, errno);
}

result<seen_notice> look_at_notice(const std::string& folder, const config::deployment& of) {
  const auto path = notice_path(folder);
  auto fd = open_notice(path, O_RDONLY);
  if (!fd && fd.error().code == errc::not_found) return seen_notice{};
  if (!fd) return fail(fd.error());
  if (::flock(fd->get(), LOCK_SH | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) return lock_error(path, errno);
    return read_held(path, fd->get(), of, false);
  }
  // Keep the shared lock until the notice is read: otherwise the content written by a supervisor
  // that claims it in between would look like that of one that has ended.
  file_lock shared{std::move(*fd)};
  const auto text = read_notice(shared.fd());
  shared.give_up();
  seen_notice seen;
  (void)read_into(seen, text, of);
  return seen;
}

result<std::unique_ptr<supervisor_notice>> supervisor_notice::claim(const config::deployment& of) {
  auto folder = make_user_folder(of.cluster);
  if (!folder) return fail(folder.error());
  const auto path = notice_path(*folder);
  const auto who = own_notice().dump() + "\n";
  auto fd = open_notice(path, O_RDWR | O_CREAT);
  if (!fd) return fail(fd.error());
  for (int i = 0; ::flock(fd->get(), LOCK_EX | LOCK_NB) != 0; ++i) {
    if (errno != EWOULDBLOCK) return lock_error(path, errno);
    // A look holds a shared lock, a supervisor an exclusive one: if a shared lock fails, a
    // supervisor holds the notice.
    if (::flock(fd->get(), LOCK_SH | LOCK_NB) != 0) return held_error(path, fd->get(), of);
    ::flock(fd->get(), LOCK_UN);
    if (i == tries_beside_lookers)
      return fail(errc::overloaded,
                  path + " is being read by other processes all the time; try again later");
    std::this_thread::sleep_for(between_tries);
  }
  file_lock held{std::move(*fd)};
  if (const int why = write_notice(held.fd(), who); why != 0)
    return bad_notice(path, "it cannot be written: " + what_errno(why));
  return std::unique_ptr<supervisor_notice>{
      new supervisor_notice{std::move(*folder), std::move(held)}};
}

result<void> supervisor_notice::publish(const std::string& host, std::uint16_t port,
                                        std::uint64_t incarnation) const {
  auto notice = own_notice();
  notice["host"] = host;
  notice["port"] = port;
  notice["incarnation"] = incarnation;
  if (const int why = write_notice(notice_.fd(), notice.dump() + "\n"); why != 0)
    return bad_notice(notice_path(folder_), "it cannot be written: " + what_errno(why));
  return {};
}

bool supervisor_notice::withdraw(const std::function<bool()>& still_idle) {
  auto ending = lock_beginning(folder_);
  if (!ending || !*ending || !still_idle()) return false;
  if (::ftruncate(notice_.fd(), 0) != 0) return false;
  ending_ = std::move(*ending);
  return true;
}

bool supervisor_notice::is_lost() const {
  struct stat ours {};
  struct stat there {};
  if (::fstat(notice_.fd(), &ours) != 0) return false;
  if (::lstat(notice_path(folder_).c_str(), &there) != 0)
    return errno == ENOENT || errno == ENOTDIR;
  return ours.st_dev != there.st_dev || ours.st_ino != there.st_ino;
}

}  // namespace troupe::actors
