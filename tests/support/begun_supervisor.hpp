#pragma once

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <string>
#include <utility>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/types.h>
#include <unistd.h>

#include "text_of.hpp"
#include "waiting.hpp"

/// Supervisors that processes start on demand, and that would outlive the test.
namespace troupe::testing {

/// The supervisor of one cluster, in the folder that XDG_STATE_HOME names. The destructor kills it,
/// so create this object before anything that may start a supervisor.
class begun_supervisor {
 public:
  explicit begun_supervisor(std::string cluster) : cluster_{std::move(cluster)} {}
  ~begun_supervisor() {
    // Another process may have started one just before its own end.
    for (int i = 0; i < 10 && lives(); ++i) {
      if (const auto number = pid(); number > 0) ::kill(number, SIGKILL);
      (void)comes_true([this] { return !lives() || pid() > 0; });
    }
  }
  begun_supervisor(const begun_supervisor&) = delete;
  begun_supervisor& operator=(const begun_supervisor&) = delete;

  [[nodiscard]] std::string folder() const {
    const char* state = std::getenv("XDG_STATE_HOME");  // NOLINT(concurrency-mt-unsafe)
    return std::string{state == nullptr ? "" : state} + "/troupe/" + cluster_;
  }
  [[nodiscard]] std::string notice() const { return text_of(folder() + "/supervisor"); }
  [[nodiscard]] std::string log() const { return text_of(folder() + "/supervisor.log"); }
  /// Whether a process holds the lock on the notice file.
  [[nodiscard]] bool lives() const {
    const int fd = ::open((folder() + "/supervisor").c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    const bool held = ::flock(fd, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    ::close(fd);
    return held;
  }
  /// -1 if the notice names no process.
  [[nodiscard]] pid_t pid() const {
    const auto text = notice();
    const std::string before = "\"pid\":";
    const auto at = text.find(before);
    if (at == std::string::npos) return -1;
    return static_cast<pid_t>(std::strtol(text.c_str() + at + before.size(), nullptr, 10));
  }
  /// Waits for a supervisor that listens and is not `former`. -1 if none appears.
  [[nodiscard]] pid_t wait(pid_t former = -1) const {
    const auto listens = [&] {
      return lives() && pid() > 0 && pid() != former &&
             notice().find("\"port\"") != std::string::npos;
    };
    return comes_true(listens, std::chrono::milliseconds{10}) ? pid() : -1;
  }

 private:
  std::string cluster_;
};

}  // namespace troupe::testing
