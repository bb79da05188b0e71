#include "troupe/deploy/child_process.hpp"

#include <cerrno>
#include <csignal>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "troupe/transport/owned_fd.hpp"

namespace troupe::deploy {

namespace {

using transport::owned_fd;

// By number: glibc has functions for these two only since 2.36, and the command must start with
// 2.35.
int open_process(pid_t pid) noexcept {
  return static_cast<int>(::syscall(SYS_pidfd_open, pid, 0U));
}
void signal_process(int handle, int signal) noexcept {
  ::syscall(SYS_pidfd_send_signal, handle, signal, nullptr, 0U);
}

/// Runs between fork and exec: makes only calls that are safe in a process copied from a threaded
/// one.
[[noreturn]] void become(const char* program, char* const* arguments, int log, int report,
                         pid_t parent, int death_signal) {
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, death_signal);
  // The parent may have died before the line above.
  if (::getppid() != parent) ::_exit(127);
  if (log >= 0) {
    ::dup2(log, STDOUT_FILENO);
    ::dup2(log, STDERR_FILENO);
  }
  ::execv(program, arguments);
  const int why = errno;
  [[maybe_unused]] const auto told = ::write(report, &why, sizeof why);
  ::_exit(127);
}

/// Empty if the program runs. Else the errno of exec, or ETIMEDOUT if the child did not reach exec:
/// it was stopped by a signal, and no signal to this process would end a wait for it.
std::optional<int> read_report(int fd) {
  using namespace std::chrono;
  constexpr seconds patience{10};
  pollfd told{fd, POLLIN, 0};
  const auto limit = steady_clock::now() + patience;
  for (auto left = duration_cast<milliseconds>(patience); left.count() > 0;
       left = duration_cast<milliseconds>(limit - steady_clock::now())) {
    const int ready = ::poll(&told, 1, static_cast<int>(left.count()));
    if (ready > 0 || (ready < 0 && errno != EINTR)) break;
  }
  if (told.revents == 0) return ETIMEDOUT;
  int why = 0;
  ssize_t count = 0;
  do {
    count = ::read(fd, &why, sizeof why);
  } while (count < 0 && errno == EINTR);
  if (count == sizeof why) return why;
  return std::nullopt;
}

}  // namespace

void name_this_process(const std::string& name) noexcept {
  ::prctl(PR_SET_NAME, name.c_str());
}

result<child_process> child_process::start(const std::string& program,
                                           std::vector<std::string> arguments,
                                           const std::string& log, orphan fate) {
  const auto refused = [](const char* what) {
    return fail(errc::internal, std::string{what} + ": " + std::strerror(errno));
  };
  owned_fd log_file;
  if (!log.empty()) {
    log_file = owned_fd{::open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600)};
    if (!log_file) return refused(("cannot write " + log).c_str());
  }
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return refused("cannot make a pipe");
  const owned_fd reader{ends[0]};
  owned_fd writer{ends[1]};
  arguments.insert(arguments.begin(), program == own_program ? "troupe" : program);
  std::vector<char*> raw;
  for (auto& argument : arguments) raw.push_back(argument.data());
  raw.push_back(nullptr);
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) return refused("cannot start a process");
  if (pid == 0) {
    become(program.c_str(), raw.data(), log_file.get(), writer.get(), parent,
           fate == orphan::dies ? SIGKILL : SIGTERM);
  }
  child_process child{pid, open_process(pid)};
  if (child.handle_ < 0) {
    const auto why = refused("cannot watch a process");
    ::kill(pid, SIGKILL);
    return why;
  }
  writer.reset();
  if (const auto why = read_report(reader.get())) {
    if (*why == ETIMEDOUT) {
      child.kill();  // it is stopped and reacts to nothing else
      return fail(errc::internal, "cannot run " + program + ": its process does not start");
    }
    return fail(errc::not_found, "cannot run " + program + ": " + std::strerror(*why));
  }
  return child;
}

child_process::~child_process() {
  if (pid_ <= 0) return;
  stop(std::chrono::seconds{5});
  if (handle_ >= 0) ::close(handle_);
}

child_process::child_process(child_process&& other) noexcept
    : pid_{std::exchange(other.pid_, -1)},
      handle_{std::exchange(other.handle_, -1)},
      status_{std::exchange(other.status_, std::nullopt)} {}

child_process& child_process::operator=(child_process&& other) noexcept {
  std::swap(pid_, other.pid_);
  std::swap(handle_, other.handle_);
  std::swap(status_, other.status_);
  return *this;
}

std::optional<std::string> child_process::ended() {
  if (!status_) {
    int status = 0;
    if (pid_ > 0 && ::waitpid(pid_, &status, WNOHANG) == pid_) status_ = status;
  }
  if (!status_) return std::nullopt;
  if (WIFSIGNALED(*status_)) return "signal " + std::to_string(WTERMSIG(*status_));
  return "exit code " + std::to_string(WEXITSTATUS(*status_));
}

std::optional<int> child_process::code() {
  if (!ended() || !WIFEXITED(*status_)) return std::nullopt;
  return WEXITSTATUS(*status_);
}

bool child_process::wait(std::chrono::milliseconds timeout) {
  if (ended()) return true;
  pollfd fd{handle_, POLLIN, 0};
  while (::poll(&fd, 1, static_cast<int>(timeout.count())) < 0 && errno == EINTR) {
  }
  return ended().has_value();
}

void child_process::terminate() const noexcept {
  if (handle_ >= 0) signal_process(handle_, SIGTERM);
}

void child_process::kill() const noexcept {
  if (handle_ >= 0) signal_process(handle_, SIGKILL);
}

bool child_process::stop(std::chrono::milliseconds patience) {
  if (ended()) return true;
  terminate();
  // In slices: time during which the whole machine was suspended does not count.
  constexpr std::chrono::milliseconds slice{50};
  for (; patience.count() > 0; patience -= slice) {
    if (wait(slice)) return true;
  }
  kill();
  while (!wait(std::chrono::seconds{1})) {
  }
  return false;
}

}  // namespace troupe::deploy
