#include "troupe/actors/discovery/supervisor_process.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <dlfcn.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "troupe/actors/base/phrases.hpp"
#include "troupe/transport/os_error.hpp"
#include "troupe/transport/owned_fd.hpp"

namespace troupe::actors {

namespace {

constexpr const char* program_of_this_process = "/proc/self/exe";
constexpr const char* command_name = "troupe";
/// Enough for our child, which only reads a file before it ends, and ends at once when killed.
constexpr std::chrono::milliseconds reaping_patience{1000};
constexpr std::chrono::milliseconds reaping_pause{2};
constexpr std::size_t most_of_log = 2000;
constexpr std::size_t most_log_lines = 3;
constexpr std::size_t longest_log_line = 400;

bool is_command(const std::filesystem::path& path) {
  std::error_code ignored;
  return std::filesystem::is_regular_file(path, ignored) && ::access(path.c_str(), X_OK) == 0;
}

/// Returns an empty string if the variable is not set.
std::string variable_in(const std::vector<std::string>& environment, std::string_view name) {
  for (const auto& entry : environment) {
    if (entry.size() > name.size() && entry[name.size()] == '=' && entry.starts_with(name))
      return entry.substr(name.size() + 1);
  }
  return {};
}

/// The file of this program; empty if unknown. The link's target ends in " (deleted)" if the file
/// was replaced meanwhile.
std::filesystem::path own_file() {
  constexpr std::string_view replaced = " (deleted)";
  std::error_code failed;
  auto name = std::filesystem::read_symlink(program_of_this_process, failed).string();
  if (failed) return {};
  if (name.ends_with(replaced)) name.resize(name.size() - replaced.size());
  return name;
}

/// The file of the library that contains this code, or else of the program.
std::filesystem::path file_of_this_code() {
  static const char here = 0;
  Dl_info about{};
  if (::dladdr(&here, &about) == 0 || about.dli_fname == nullptr) return {};
  const std::filesystem::path file{about.dli_fname};
  return file.is_absolute() ? file : std::filesystem::path{};
}

/// The absolute folders of $PATH.
std::vector<std::filesystem::path> folders_in_path(const std::string& all) {
  std::vector<std::filesystem::path> folders;
  for (std::size_t at = 0; at < all.size();) {
    const auto end = std::min(all.find(':', at), all.size());
    if (all[at] == '/') folders.emplace_back(all.substr(at, end - at));
    at = end + 1;
  }
  return folders;
}

/// Owns the attributes and file actions for `posix_spawn`.
class spawn_terms {
 public:
  spawn_terms() {
    ::posix_spawnattr_init(&attributes_);
    ::posix_spawn_file_actions_init(&files_);
  }
  ~spawn_terms() {
    ::posix_spawn_file_actions_destroy(&files_);
    ::posix_spawnattr_destroy(&attributes_);
  }
  spawn_terms(const spawn_terms&) = delete;
  spawn_terms& operator=(const spawn_terms&) = delete;

  /// Isolates the child from this process's signal settings and terminal. Returns 0 or an errno.
  int set(int log) {
    sigset_t none;
    sigset_t all;
    ::sigemptyset(&none);
    ::sigfillset(&all);
    constexpr auto flags = POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETPGROUP;
    const std::array steps{
        ::posix_spawnattr_setflags(&attributes_, static_cast<short>(flags)),
        ::posix_spawnattr_setsigmask(&attributes_, &none),
        ::posix_spawnattr_setsigdefault(&attributes_, &all),
        ::posix_spawnattr_setpgroup(&attributes_, 0),
        ::posix_spawn_file_actions_adddup2(&files_, log, STDOUT_FILENO),
        ::posix_spawn_file_actions_adddup2(&files_, log, STDERR_FILENO),
        // Last: in a process that has closed its standard input, the log may have that number.
        ::posix_spawn_file_actions_addopen(&files_, STDIN_FILENO, "/dev/null", O_RDONLY, 0)};
    const auto* failed = std::ranges::find_if(steps, [](int number) { return number != 0; });
    return failed == steps.end() ? 0 : *failed;
  }
  [[nodiscard]] const posix_spawnattr_t* attributes() const { return &attributes_; }
  [[nodiscard]] const posix_spawn_file_actions_t* files() const { return &files_; }

 private:
  posix_spawnattr_t attributes_{};
  posix_spawn_file_actions_t files_{};
};

unexpected cannot_run(const std::string& command, int number) {
  const bool is_missing = number == ENOENT || number == EACCES || number == ENOEXEC;
  return fail(is_missing ? errc::not_found : errc::overloaded,
              "no supervisor can be begun: " + command +
                  " cannot be run: " + transport::what_errno(number));
}

unexpected bad_log(const std::string& path, errc code, const std::string& why) {
  return fail(code, "no supervisor can be begun: its log, " + path + ": " + why);
}

/// Opened here rather than in the child, so that errors can be reported. Non-blocking, because the
/// path may be a pipe.
result<transport::owned_fd> open_first_log(const std::string& path) {
  constexpr const char* no_plain_file = "it is not a regular file; move it away";
  transport::owned_fd fd{
      ::open(path.c_str(),
             O_WRONLY | O_CREAT | O_APPEND | O_NOCTTY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600)};
  struct stat about {};
  if (!fd || ::fstat(fd.get(), &about) != 0) {
    const int why = errno;
    if (why == ELOOP || why == EISDIR || why == ENXIO)
      return bad_log(path, errc::invalid_config, no_plain_file);
    const bool is_short = why == EMFILE || why == ENFILE || why == ENOMEM;
    return bad_log(path, is_short ? errc::overloaded : errc::invalid_config,
                   "it cannot be written: " + transport::what_errno(why));
  }
  if (!S_ISREG(about.st_mode)) return bad_log(path, errc::invalid_config, no_plain_file);
  return fd;
}

}  // namespace

std::vector<std::string> environment_of_this_process() {
  std::vector<std::string> all;
  for (char** entry = ::environ; entry != nullptr && *entry != nullptr; ++entry)
    all.emplace_back(*entry);
  return all;
}

result<std::string> troupe_command(const std::vector<std::string>& environment) {
  constexpr const char* what_to_do =
      "; install the `troupe` command, or name its file as TROUPE_COMMAND";
  if (auto named = variable_in(environment, "TROUPE_COMMAND"); !named.empty()) {
    if (is_command(named)) return named;
    return fail(errc::not_found, "no supervisor can be begun: TROUPE_COMMAND is " + named +
                                     ", which is not a program" + what_to_do);
  }
  const auto own = own_file();
  if (own.filename() == command_name) return std::string{program_of_this_process};
  std::string looked_at;
  for (const auto& file : {file_of_this_code(), own}) {
    if (file.empty()) continue;
    const auto folder = file.parent_path();
    for (const auto& there : {folder / command_name, folder / ".." / "bin" / command_name}) {
      if (is_command(there)) return there.string();
      looked_at += there.string() + ", ";
    }
  }
  for (const auto& folder : folders_in_path(variable_in(environment, "PATH"))) {
    if (const auto there = folder / command_name; is_command(there)) return there.string();
  }
  return fail(errc::not_found, "no supervisor can be begun: there is no `troupe` command at " +
                                   looked_at + "nor in PATH" + what_to_do);
}

// -- the child

namespace {

/// The null-terminated form for system calls. The pointers refer to `all`.
std::vector<char*> raw_pointers(std::vector<std::string>& all) {
  std::vector<char*> raw;
  for (auto& one : all) raw.push_back(one.data());
  raw.push_back(nullptr);
  return raw;
}

}  // namespace

result<begun_supervisor> begun_supervisor::start(const std::string& command,
                                                 const std::vector<std::string>& environment,
                                                 const std::string& deployment_file,
                                                 const std::string& log) {
  const auto file = open_first_log(log);
  if (!file) return fail(file.error());
  spawn_terms terms;
  if (const int why = terms.set(file->get()); why != 0) return cannot_run(command, why);
  std::vector<std::string> words{command_name, "node",     deployment_file, "--name",
                                 "supervisor", "--detach", "--log-file",    log};
  auto variables = environment;
  const auto arguments = raw_pointers(words);
  const auto surroundings = raw_pointers(variables);
  pid_t child = -1;
  const int why = ::posix_spawn(&child, command.c_str(), terms.files(), terms.attributes(),
                                arguments.data(), surroundings.data());
  if (why != 0) return cannot_run(command, why);
  return begun_supervisor{child};
}

begun_supervisor::begun_supervisor(begun_supervisor&& other) noexcept
    : child_{std::exchange(other.child_, -1)}, status_{other.status_}, ended_at_{other.ended_at_} {}

begun_supervisor::~begun_supervisor() {
  if (ends_soon()) return;
  kill();
  (void)ends_soon();
}

bool begun_supervisor::ends_soon() noexcept {
  const auto until = std::chrono::steady_clock::now() + reaping_patience;
  while (!has_ended()) {
    if (std::chrono::steady_clock::now() >= until) return false;
    std::this_thread::sleep_for(reaping_pause);
  }
  return true;
}

bool begun_supervisor::has_ended() noexcept {
  if (child_ < 0) return true;
  int status = 0;
  const auto reaped = ::waitpid(child_, &status, WNOHANG);
  if (reaped == 0 || (reaped < 0 && errno == EINTR)) return false;
  // ECHILD: other code of this process has reaped the child, or the kernel has (SIGCHLD is
  // ignored). The exit status is unknown then.
  if (reaped == child_) status_ = status;
  child_ = -1;
  ended_at_ = std::chrono::steady_clock::now();
  return true;
}

std::optional<std::chrono::steady_clock::time_point> begun_supervisor::ended() {
  if (!has_ended()) return std::nullopt;
  return ended_at_;
}

std::optional<std::string> begun_supervisor::failure() {
  if (!has_ended() || status_ == 0) return std::nullopt;
  if (WIFSIGNALED(status_)) return "signal " + std::to_string(WTERMSIG(status_));
  return "exit code " + std::to_string(WEXITSTATUS(status_));
}

void begun_supervisor::kill() noexcept {
  // The pid cannot be reused before the child is reaped.
  if (!has_ended()) ::kill(child_, SIGKILL);
}

// -- its log

std::uint64_t length_of_log(const std::string& path) {
  std::error_code missing;
  const auto length = std::filesystem::file_size(path, missing);
  return missing ? 0 : length;
}

std::string end_of_log(const std::string& path, std::uint64_t from) {
  const transport::owned_fd fd{::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC)};
  struct stat about {};
  if (!fd || ::fstat(fd.get(), &about) != 0 || !S_ISREG(about.st_mode)) return {};
  const auto length = static_cast<std::uint64_t>(about.st_size);
  if (length < from) from = 0;  // the log was rotated
  if (length - from > most_of_log) from = length - most_of_log;
  std::string text(static_cast<std::size_t>(length - from), '\0');
  const auto count = ::pread(fd.get(), text.data(), text.size(), static_cast<off_t>(from));
  text.resize(count > 0 ? static_cast<std::size_t>(count) : 0);
  std::vector<std::string> lines;
  for (std::size_t at = 0; at < text.size();) {
    const auto end = std::min(text.find('\n', at), text.size());
    if (end > at) lines.push_back(printable(text.substr(at, end - at), longest_log_line));
    at = end + 1;
  }
  std::string shown;
  const auto first = lines.size() - std::min(lines.size(), most_log_lines);
  for (std::size_t i = first; i < lines.size(); ++i) shown += (i == first ? "" : " / ") + lines[i];
  return shown;
}

}  // namespace troupe::actors
