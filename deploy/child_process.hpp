#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <sys/types.h>

#include "troupe/kvcache/result.hpp"

namespace troupe::deploy {

/// The program that runs now, whatever became of its file.
inline constexpr const char* own_program = "/proc/self/exe";

/// What this process is called in `ps -e`, `top` and `pgrep`, and with it the threads that it makes
/// from now on. Cut to 15 characters, what the kernel keeps. Call it on the main thread.
void name_this_process(const std::string& name) noexcept;

/// What becomes of a process when the one that started it dies without a word.
enum class orphan : std::uint8_t {
  stops,  ///< in good order (SIGTERM); one that stands still hears it where it has an `orphan_wake`
  dies,   ///< at once (SIGKILL), also one that stands still
};

/// A process of ours: `orphan` says what becomes of it when we die, and it is stopped when this object
/// goes. Movable. Start it from a thread that lives as long as it shall: the kernel watches the thread,
/// not the process.
class child_process {
 public:
  /// Runs `program` with `arguments` (its name is put in front, `troupe` for `own_program`, so that
  /// `ps -f` shows a command that can be typed). Standard output and
  /// error go to `log`, appended; empty: they stay ours. Its process group is its own, so that
  /// Ctrl-C at a terminal reaches it through us only. `internal` when the system refuses, or the process is stopped
  /// before it becomes the program (10 s), `not_found` when there is no such program.
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
  /// Its exit code; empty while it runs, and when a signal ended it.
  [[nodiscard]] std::optional<int> code();
  /// Waits until it has ended. False: it still runs.
  [[nodiscard]] bool wait(std::chrono::milliseconds timeout);
  /// Asks it to stop in good order. Safe from any thread while the object lives; may be repeated.
  void terminate() const noexcept;
  /// SIGKILL. The same.
  void kill() const noexcept;
  /// `terminate`, and SIGKILL when it has not ended after `patience`. True: it ended by itself.
  bool stop(std::chrono::milliseconds patience);

 private:
  child_process(pid_t pid, int handle) noexcept : pid_{pid}, handle_{handle} {}
  pid_t pid_{-1};   ///< -1: moved from
  int handle_{-1};  ///< of the process: unlike its number it is never another's
  std::optional<int> status_;
};

}  // namespace troupe::deploy
