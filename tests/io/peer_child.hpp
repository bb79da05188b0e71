#pragma once

#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "hexadecimal.hpp"
#include "waiting.hpp"

namespace troupe::io {

/// An agent in a process of its own (`peer_process.cpp`), which never outlives this object.
class peer_child {
 public:
  peer_child(const std::string& name, std::string_view backend, std::uint16_t port,
             const std::string& what) {
    std::vector<std::string> command{std::getenv("TROUPE_IO_PEER"), name, std::string{backend},
                                     std::to_string(port), what};
    std::vector<char*> argv;
    for (auto& word : command) argv.push_back(word.data());
    argv.push_back(nullptr);
    int in[2]{};
    int out[2]{};
    if (::pipe2(in, O_CLOEXEC) != 0 || ::pipe2(out, O_CLOEXEC) != 0) return;
    pid_ = ::fork();
    if (pid_ == 0) {
      ::dup2(in[0], STDIN_FILENO);
      ::dup2(out[1], STDOUT_FILENO);
      ::execv(argv[0], argv.data());
      ::_exit(127);
    }
    ::close(in[0]);
    ::close(out[1]);
    in_ = in[1];
    out_ = out[0];
  }
  ~peer_child() {
    kill();
    ::close(in_);
    ::close(out_);
  }
  peer_child(const peer_child&) = delete;
  peer_child& operator=(const peer_child&) = delete;

  /// The next line that it prints; empty if none comes in time.
  std::string line() {
    const auto end = testing::end_of_wait();
    while (text_.find('\n') == std::string::npos) {
      pollfd readable{out_, POLLIN, 0};
      char buffer[4096];
      if (std::chrono::steady_clock::now() > end || ::poll(&readable, 1, 1000) < 0) return {};
      if (readable.revents == 0) continue;
      const auto got = ::read(out_, buffer, sizeof buffer);
      if (got <= 0) return {};
      text_.append(buffer, static_cast<std::size_t>(got));
    }
    auto found = text_.substr(0, text_.find('\n'));
    text_.erase(0, found.size() + 1);
    return found;
  }
  [[nodiscard]] std::vector<std::byte> descriptor() { return from_hexadecimal(line()); }
  void tell(std::span<const std::byte> descriptor) const {
    const auto text = hexadecimal(descriptor) + "\n";
    [[maybe_unused]] const auto sent = ::write(in_, text.data(), text.size());
  }
  /// Stops the process; returns once it is stopped.
  void stop() const {
    ::kill(pid_, SIGSTOP);
    int status = 0;
    ::waitpid(pid_, &status, WUNTRACED);
  }
  void go_on() const { ::kill(pid_, SIGCONT); }
  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    int status = 0;
    ::waitpid(pid_, &status, 0);
    pid_ = -1;
  }

 private:
  pid_t pid_{-1};
  int in_{-1}, out_{-1};
  std::string text_;
};

}  // namespace troupe::io
