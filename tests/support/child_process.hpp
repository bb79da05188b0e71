#pragma once

/// A process that a test starts, speaks with in lines, and may kill or stop. The destructor kills it.

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "waiting.hpp"

namespace troupe::testing {

class child_process {
 public:
  explicit child_process(std::vector<std::string> command) {
    int in[2];
    int out[2];
    if (pipe2(in, O_CLOEXEC) != 0 || pipe2(out, O_CLOEXEC) != 0) return;
    std::vector<char*> argv;
    for (std::string& word : command) argv.push_back(word.data());
    argv.push_back(nullptr);
    pid_ = fork();
    if (pid_ == 0) {
      dup2(in[0], STDIN_FILENO);
      dup2(out[1], STDOUT_FILENO);
      execv(argv[0], argv.data());
      _exit(127);
    }
    close(in[0]);
    close(out[1]);
    in_ = in[1];
    out_ = out[0];
  }
  ~child_process() {
    kill();
    if (out_ >= 0) close(out_);
  }
  child_process(const child_process&) = delete;
  child_process& operator=(const child_process&) = delete;

  [[nodiscard]] pid_t pid() const { return pid_; }
  void signal(int number) const {
    if (pid_ > 0) ::kill(pid_, number);
  }
  /// Sends SIGSTOP. When this returns, the process is stopped.
  void stop() const {
    signal(SIGSTOP);
    int status = 0;
    waitpid(pid_, &status, WUNTRACED);
    EXPECT_TRUE(WIFSTOPPED(status));
  }
  void go_on() const { signal(SIGCONT); }
  /// Kills it if it still runs, and waits for its end.
  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = -1;
    close(in_);
  }
  /// Closes its standard input and waits for its end. Returns its exit status, or -1 if a signal
  /// ended it.
  int finish() {
    close(in_);
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  /// Writes to its standard input.
  void say(const std::string& text) const {
    EXPECT_EQ(::write(in_, text.data(), text.size()), static_cast<ssize_t>(text.size()));
  }
  /// The next line of its standard output. Empty if none comes in time.
  std::string line() {
    const auto deadline = end_of_wait();
    for (;;) {
      if (const auto end = text_.find('\n'); end != std::string::npos) {
        std::string found = text_.substr(0, end);
        text_.erase(0, end + 1);
        return found;
      }
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
          deadline - std::chrono::steady_clock::now());
      pollfd p{out_, POLLIN, 0};
      if (left.count() <= 0 || poll(&p, 1, static_cast<int>(left.count())) <= 0) return {};
      char buffer[512];
      const auto n = read(out_, buffer, sizeof(buffer));
      if (n <= 0) return {};
      text_.append(buffer, static_cast<std::size_t>(n));
    }
  }

 private:
  pid_t pid_{-1};
  int in_{-1};
  int out_{-1};
  std::string text_;
};

}  // namespace troupe::testing
