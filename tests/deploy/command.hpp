#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <sys/types.h>

#include "free_port.hpp"
#include "scratch_folder.hpp"
#include "waiting.hpp"

/// The `troupe` command, run by tests as a user runs it.
namespace troupe::testing {

/// A `troupe` process and its output. The destructor ends it.
class command {
 public:
  /// `prepare` runs in the new process before it becomes the command, and may only make system
  /// calls.
  explicit command(std::vector<std::string> arguments, const std::function<void()>& prepare = {});
  /// The same for another program.
  command(const std::string& program, std::vector<std::string> arguments,
          const std::function<void()>& prepare);
  ~command();
  command(const command&) = delete;
  command& operator=(const command&) = delete;

  /// Reads until standard output or error holds `text`. Returns whether it does, at the latest when
  /// both have ended.
  [[nodiscard]] bool says(const std::string& text);
  /// Like `says`, with a limit of its own, for text that must not come so soon.
  [[nodiscard]] bool says_within(std::chrono::milliseconds time, const std::string& text);
  /// Reads until `holds` returns true. Returns false if it never does, or the process ends before.
  [[nodiscard]] bool reads_until(const std::function<bool()>& holds);
  /// Waits for the end. Returns the exit code, 128 + signal, or -1 if it does not end.
  int wait();
  /// Like `wait`, with a limit of its own, for a process that must not end so soon.
  int wait_for(std::chrono::milliseconds time);
  void signal(int number) const;

  [[nodiscard]] const std::string& out() const { return out_; }
  [[nodiscard]] const std::string& err() const { return err_; }
  [[nodiscard]] pid_t pid() const { return pid_; }

 private:
  using time_point = std::chrono::steady_clock::time_point;
  bool holds(const std::string& text) const;
  bool reads_until(const std::function<bool()>& holds, time_point end);
  int wait_until(time_point end);
  bool pump(std::chrono::milliseconds timeout);
  pid_t pid_{-1};
  int out_fd_{-1};
  int err_fd_{-1};
  int code_{-1};
  std::string out_, err_;
};

/// The output of a node once it is registered.
inline constexpr const char* registered = "registered with the supervisor as replica";

struct ended {
  int code{-1};
  std::string out, err;
};
/// Runs the command to its end.
[[nodiscard]] ended run(std::vector<std::string> arguments);
/// Repeats that until it ends with 0: on a busy machine a node may be suspect for a moment.
[[nodiscard]] ended run_until_good(const std::vector<std::string>& arguments);

/// A deployment of a prefill, a decode and a store on this machine, in a file that is deleted with
/// this object.
class deployment_on_disk {
 public:
  /// With port 0 the OS chooses, and only `up` knows the port. By default a silent node is `down`
  /// only after longer than any test waits.
  explicit deployment_on_disk(std::uint16_t supervisor_port,
                              const std::string& decode_engine = "reference",
                              const std::string& heartbeat_timeout = "10min");
  /// With that text.
  explicit deployment_on_disk(const std::string& yaml);
  ~deployment_on_disk();
  deployment_on_disk(const deployment_on_disk&) = delete;
  deployment_on_disk& operator=(const deployment_on_disk&) = delete;
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  static std::string new_file();
  std::string path_;
};

[[nodiscard]] bool listens(std::uint16_t port);
/// Waits until nothing listens at the port: another test may use a port that was just closed.
[[nodiscard]] bool falls_silent(std::uint16_t port);
/// Waits until there is no process of that number, not even a zombie.
[[nodiscard]] bool vanishes(pid_t pid);

/// A node that `troupe up` reports as started.
struct started_node {
  std::string name;
  pid_t pid{-1};
  std::uint16_t port{0};
};
[[nodiscard]] std::vector<started_node> nodes_in(const std::string& output);
/// The last node of that name, with pid -1 if there is none.
[[nodiscard]] started_node node_in(const std::string& output, const std::string& name);

}  // namespace troupe::testing
