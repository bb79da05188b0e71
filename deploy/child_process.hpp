#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <sys/types.h>

#include "troupe/kvcache/result.hpp"

namespace troupe::deploy {

/// The running program, even if its file was replaced or removed.
inline constexpr const char* own_program = "/proc/self/exe";

/// Sets the name of this process, and of the threads that it makes from now on, in `ps -e`, `top`
/// and `pgrep`. Cut to 15 characters, the kernel's limit. Call it on the main thread.
void name_this_process(const std::string& name) noexcept;

/// What happens to a child process when its parent dies without stopping it.
enum class orphan : std::uint8_t {
  stops,  ///< SIGTERM; a stopped process hears it if it has an `orphan_wake`
  dies,   ///< SIGKILL, even to a stopped process
};

/// A child process. It is stopped when this object is destroyed; `orphan` says what happens to it
/// when we die. Movable. Start it from a thread that lives at least as long: the kernel watches the
/// thread, not the process.
class child_process {
 public:
  /// Runs `program` with `arguments` (its name is put in front, `troupe` for `own_program`, so that
  /// `ps -f` shows a command that can be typed). Standard output and error are appended to `log`;
  /// if `log` is empty, they stay ours. The process gets a process group of its own, so that Ctrl-C
  /// at a terminal reaches it only through us. `internal` if the system refuses, or the process is
  /// stopped before it becomes the program (10 s); `not_found` if there is no such program.
  [[nodiscard]] static result<child_process> start(const std::string& program,
                                                   std::vector<std::string> arguments,
                                                   const std::string& log = {},
                                                   orphan fate = orphan::stops);
  /// `stop` with five seconds of patience.
  ~child_process();
  child_process(child_process&& other) noexcept;
  child_process& operator=(child_process&& other) noexcept;
  child_process(const child_process&) = delete;
  child_process& operator=(const child_process&) = delete;

  [[nodiscard]] pid_t pid() const noexcept { return pid_; }
  /// How it ended, in words ("exit code 2", "signal 9"); empty while it runs.
  [[nodiscard]] std::optional<std::string> ended();
  /// Its exit code; empty while it runs, and if a signal ended it.
  [[nodiscard]] std::optional<int> code();
  /// Waits until it has ended. Returns false if it still runs.
  [[nodiscard]] bool wait(std::chrono::milliseconds timeout);
  /// Sends SIGTERM. Safe from any thread while the object lives; may be repeated.
  void terminate() const noexcept;
  /// Sends SIGKILL. As safe as `terminate`.
  void kill() const noexcept;
  /// `terminate`, and SIGKILL if it has not ended after `patience`. Returns whether it ended by
  /// itself.
  bool stop(std::chrono::milliseconds patience);

 private:
  child_process(pid_t pid, int handle) noexcept : pid_{pid}, handle_{handle} {}
  pid_t pid_{-1};   ///< -1: moved from
  int handle_{-1};  ///< a pidfd: unlike the pid, it is never another process's
  std::optional<int> status_;
};

}  // namespace troupe::deploy
