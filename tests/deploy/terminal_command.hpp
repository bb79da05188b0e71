#pragma once

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include <poll.h>
#include <pty.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "waiting.hpp"

namespace troupe::testing {

/// A `troupe` process on a terminal of its own. The destructor ends it.
class terminal_command {
 public:
  terminal_command(std::vector<std::string> arguments, std::uint16_t rows, std::uint16_t columns) {
    arguments.insert(arguments.begin(), TROUPE_COMMAND);
    std::vector<char*> raw;
    for (auto& argument : arguments) raw.push_back(argument.data());
    raw.push_back(nullptr);
    winsize size{};
    size.ws_row = rows;
    size.ws_col = columns;
    pid_ = ::forkpty(&terminal_, nullptr, nullptr, &size);
    if (pid_ != 0) return;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::execv(raw.front(), raw.data());
    ::_exit(127);
  }
  ~terminal_command() {
    if (pid_ > 0) {
      ::kill(pid_, SIGKILL);
      (void)::waitpid(pid_, nullptr, 0);
    }
    if (terminal_ >= 0) ::close(terminal_);
  }
  terminal_command(const terminal_command&) = delete;
  terminal_command& operator=(const terminal_command&) = delete;

  /// Reads until it has shown `text` that often. Returns false if it never does.
  [[nodiscard]] bool shows(const std::string& text, std::size_t times = 1) {
    const auto end = end_of_wait();
    const auto seen = [&] {
      std::size_t count = 0;
      for (auto at = shown_.find(text); at != std::string::npos; at = shown_.find(text, at + 1))
        ++count;
      return count >= times;
    };
    while (!seen())
      if (clock::now() >= end || !pump()) return seen();
    return true;
  }
  void press_ctrl_z() const { (void)!::write(terminal_, "\x1a", 1); }
  void press_ctrl_c() const { (void)!::write(terminal_, "\x03", 1); }
  /// Returns the exit code, 128 + signal, or -1 if it does not end.
  int wait() {
    const auto end = end_of_wait();
    int status = 0;
    while (::waitpid(pid_, &status, WNOHANG) != pid_) {
      if (clock::now() >= end) return -1;
      if (!pump()) std::this_thread::sleep_for(std::chrono::milliseconds{5});
    }
    pid_ = -1;
    while (pump_now()) {
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  [[nodiscard]] const std::string& shown() const { return shown_; }

 private:
  using clock = std::chrono::steady_clock;

  bool pump() {
    pollfd fd{terminal_, POLLIN, 0};
    return ::poll(&fd, 1, 20) <= 0 || pump_now();
  }
  bool pump_now() {
    pollfd fd{terminal_, POLLIN, 0};
    if (::poll(&fd, 1, 0) <= 0) return false;
    std::array<char, 4096> part{};
    const auto count = ::read(terminal_, part.data(), part.size());
    if (count > 0) shown_.append(part.data(), static_cast<std::size_t>(count));
    return count > 0;
  }

  pid_t pid_{-1};
  int terminal_{-1};
  std::string shown_;
};

}  // namespace troupe::testing
