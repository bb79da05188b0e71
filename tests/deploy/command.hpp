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

/// A `troupe` process with its output. It never outlives the object.
class command {
 public:
  /// `prepare` is called in the new process before it becomes the command: nothing but system calls there.
  explicit command(std::vector<std::string> arguments, const std::function<void()>& prepare = {});
  /// The same, of another program than the command.
  command(const std::string& program, std::vector<std::string> arguments,
          const std::function<void()>& prepare);
  ~command();
  command(const command&) = delete;
  command& operator=(const command&) = delete;

  /// Reads until standard output or error holds `text`. False: it never did, or they ended.
  [[nodiscard]] bool says(const std::string& text);
  /// The same, of what must not come so soon.
  [[nodiscard]] bool says_within(std::chrono::milliseconds time, const std::string& text);
  /// Reads until that is so of what it wrote. False: it never was, or it ended.
  [[nodiscard]] bool reads_until(const std::function<bool()>& holds);
  /// Waits for its end. The exit code; 128 + signal; -1 when it does not end.
  int wait();
  /// The same, of one that must not end so soon.
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

/// What a node says once it is taken in.
inline constexpr const char* registered = "registered with the supervisor as replica";

struct ended {
  int code{-1};
  std::string out, err;
};
/// Runs it to its end.
[[nodiscard]] ended run(std::vector<std::string> arguments);
/// The same, again and again until it ends with 0: on a busy machine a node may be suspect for a moment.
[[nodiscard]] ended run_until_good(const std::vector<std::string>& arguments);

/// A deployment of a prefill, a decode and a store on this machine, written to a file that goes
/// with the object.
class deployment_on_disk {
 public:
  /// Port 0: the OS chooses, and nobody but `up` knows. A node is `down` for being silent only after so long
  /// that no test waits for it, unless it says otherwise.
  explicit deployment_on_disk(std::uint16_t supervisor_port,
                              const std::string& decode_engine = "reference",
                              const std::string& heartbeat_timeout = "10min");
  /// That text.
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
/// Waits until nobody listens there: what was just closed may be another test's for a while.
[[nodiscard]] bool falls_silent(std::uint16_t port);
/// Waits until there is no process of that number, not even one that nobody has waited for.
[[nodiscard]] bool vanishes(pid_t pid);

/// What `troupe up` says of each node it started.
struct started_node {
  std::string name;
  pid_t pid{-1};
  std::uint16_t port{0};
};
[[nodiscard]] std::vector<started_node> nodes_in(const std::string& output);
/// The last one of that name; pid -1 when there is none.
[[nodiscard]] started_node node_in(const std::string& output, const std::string& name);

}  // namespace troupe::testing
