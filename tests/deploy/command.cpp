#include "command.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <regex>
#include <thread>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

namespace troupe::testing {

namespace {

using clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

/// Appends the available bytes. Returns false if the other end is closed.
bool read_some(int fd, std::string& text) {
  std::array<char, 4096> part{};
  const auto count = ::read(fd, part.data(), part.size());
  if (count > 0) text.append(part.data(), static_cast<std::size_t>(count));
  return count > 0 || (count < 0 && errno == EINTR);
}

}  // namespace

// -- processes

command::command(std::vector<std::string> arguments, const std::function<void()>& prepare)
    : command{TROUPE_COMMAND, std::move(arguments), prepare} {}

command::command(const std::string& program, std::vector<std::string> arguments,
                 const std::function<void()>& prepare) {
  // A supervisor's state lives only as long as the tests, and is not shared with others.
  static const scratch_folder state;
  ::setenv("XDG_STATE_HOME", state.path().c_str(), 1);  // NOLINT(concurrency-mt-unsafe)
  arguments.insert(arguments.begin(), program);
  std::vector<char*> raw;
  for (auto& argument : arguments) raw.push_back(argument.data());
  raw.push_back(nullptr);
  // By descriptor: `prepare` may switch to a user who cannot reach the build folder.
  const int file = ::open(program.c_str(), O_PATH | O_CLOEXEC);
  int out[2];
  int err[2];
  if (::pipe2(out, O_CLOEXEC) != 0 || ::pipe2(err, O_CLOEXEC) != 0) return;
  pid_ = ::fork();
  if (pid_ == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::dup2(out[1], STDOUT_FILENO);
    ::dup2(err[1], STDERR_FILENO);
    if (prepare) prepare();
    ::fexecve(file, raw.data(), environ);
    ::_exit(127);
  }
  ::close(file);
  ::close(out[1]);
  ::close(err[1]);
  out_fd_ = out[0];
  err_fd_ = err[0];
}

command::~command() {
  if (pid_ > 0) {
    // End it in good order, so that a failed test leaves no nodes behind.
    signal(SIGTERM);
    if (wait() == -1 && pid_ > 0) {
      signal(SIGKILL);
      (void)::waitpid(pid_, nullptr, 0);
    }
  }
  for (const int fd : {out_fd_, err_fd_})
    if (fd >= 0) ::close(fd);
}

bool command::pump(milliseconds timeout) {
  std::array<pollfd, 2> fds{pollfd{out_fd_, POLLIN, 0}, pollfd{err_fd_, POLLIN, 0}};
  if (out_fd_ < 0 && err_fd_ < 0) return false;
  if (::poll(fds.data(), fds.size(), static_cast<int>(timeout.count())) <= 0) return true;
  const auto take = [](pollfd& ready, int& fd, std::string& text) {
    if (ready.revents == 0 || read_some(fd, text)) return;
    ::close(fd);
    fd = -1;
  };
  take(fds[0], out_fd_, out_);
  take(fds[1], err_fd_, err_);
  return true;
}

bool command::holds(const std::string& text) const {
  return out_.find(text) != std::string::npos || err_.find(text) != std::string::npos;
}

bool command::says(const std::string& text) {
  return reads_until([&] { return holds(text); });
}

bool command::says_within(milliseconds time, const std::string& text) {
  return reads_until([&] { return holds(text); }, clock::now() + time);
}

bool command::reads_until(const std::function<bool()>& holds) {
  return reads_until(holds, end_of_wait());
}

bool command::reads_until(const std::function<bool()>& holds, time_point end) {
  while (!holds() && clock::now() < end)
    if (!pump(milliseconds{50})) break;
  return holds();
}

int command::wait() {
  return wait_until(end_of_wait());
}

int command::wait_for(milliseconds time) {
  return wait_until(clock::now() + time);
}

int command::wait_until(time_point end) {
  while (pid_ > 0 && clock::now() < end) {
    int status = 0;
    if (::waitpid(pid_, &status, WNOHANG) == pid_) {
      pid_ = -1;
      code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
      break;
    }
    if (!pump(milliseconds{20})) std::this_thread::sleep_for(milliseconds{5});
  }
  // Read the last output; nodes that outlive the command may hold the pipes open.
  for (int i = 0; i < 10 && pid_ < 0 && (out_fd_ >= 0 || err_fd_ >= 0); ++i)
    (void)pump(milliseconds{20});
  return pid_ > 0 ? -1 : code_;
}

void command::signal(int number) const {
  if (pid_ > 0) ::kill(pid_, number);
}

ended run(std::vector<std::string> arguments) {
  command troupe{std::move(arguments)};
  const int code = troupe.wait();
  return {code, troupe.out(), troupe.err()};
}

ended run_until_good(const std::vector<std::string>& arguments) {
  ended outcome;
  const auto is_good = [&] {
    outcome = run(arguments);
    return outcome.code == 0;
  };
  (void)comes_true(is_good, milliseconds{200});
  return outcome;
}

bool vanishes(pid_t pid) {
  return comes_true([pid] { return pid <= 0 || ::kill(pid, 0) != 0; }, milliseconds{10});
}

// -- files and ports

std::string deployment_on_disk::new_file() {
  const char* base = std::getenv("TMPDIR");
  auto path = std::string{base != nullptr ? base : "/tmp"} + "/troupe-test-XXXXXX";
  const int fd = ::mkstemp(path.data());
  if (fd >= 0) ::close(fd);
  return path;
}

deployment_on_disk::deployment_on_disk(const std::string& yaml) : path_{new_file()} {
  std::ofstream{path_} << yaml;
}

deployment_on_disk::deployment_on_disk(std::uint16_t supervisor_port,
                                       const std::string& decode_engine,
                                       const std::string& heartbeat_timeout)
    : path_{new_file()} {
  std::ofstream{path_} << "cluster: cli-test\n"
                          "supervisor: {host: 127.0.0.1, port: "
                       << supervisor_port
                       << ", heartbeat_interval: 200ms, heartbeat_timeout: " << heartbeat_timeout
                       << "}\n"
                          "security: {mode: none}\n"
                          "model: {layers: 2, kv_heads: 2, head_dim: 16, dtype: bf16, "
                          "block_tokens: 16}\n"
                          "stages:\n"
                          "  - {name: prefill, role: prefill, pool: {size: 1MiB}}\n"
                          "  - {name: decode, role: decode, pool: {size: 1MiB}, engine: "
                       << decode_engine
                       << "}\n"
                          "  - {name: cache, role: store, pool: {size: 1MiB}}\n"
                          "edges:\n"
                          "  - {from: prefill, to: decode, mode: write}\n";
}

deployment_on_disk::~deployment_on_disk() {
  ::unlink(path_.c_str());
}

bool listens(std::uint16_t port) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const auto at = loopback(port);
  const bool answered = ::connect(fd, reinterpret_cast<const sockaddr*>(&at), sizeof at) == 0;
  ::close(fd);
  return answered;
}

bool falls_silent(std::uint16_t port) {
  return comes_true([=] { return !listens(port); });
}

// -- the output of `up`

std::vector<started_node> nodes_in(const std::string& output) {
  static const std::regex line{R"((\S+) \(pid (\d+)\) listens at \S+:(\d+))"};
  std::vector<started_node> all;
  for (std::sregex_iterator it{output.begin(), output.end(), line}, end; it != end; ++it)
    all.push_back({(*it)[1], static_cast<pid_t>(std::stol((*it)[2])),
                   static_cast<std::uint16_t>(std::stoul((*it)[3]))});
  return all;
}

started_node node_in(const std::string& output, const std::string& name) {
  const auto all = nodes_in(output);
  const auto found = std::find_if(all.rbegin(), all.rend(),
                                  [&](const started_node& node) { return node.name == name; });
  return found == all.rend() ? started_node{} : *found;
}

}  // namespace troupe::testing
