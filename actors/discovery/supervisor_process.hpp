#pragma once

/// The process of a supervisor that is begun (supervisor_begin.hpp).

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <sys/types.h>

#include "troupe/kvcache/result.hpp"

namespace troupe::actors {

/// The environment of this process as it is now, "NAME=value" each. Not beside a thread that changes it.
[[nodiscard]] std::vector<std::string> environment_of_this_process();

/// The `troupe` command: $TROUPE_COMMAND, which has to be one where it is set; else the program that
/// this process runs, if it is that; else the one beside the library or the program that this code is in,
/// or in ../bin of it; else the first of $PATH. The variables are those of `environment`. `not_found`
/// saying where it was looked for.
[[nodiscard]] result<std::string> troupe_command(const std::vector<std::string>& environment);

/// `troupe node FILE --name supervisor --detach`: a child of ours that ends as soon as the supervisor,
/// which is nobody's child then, goes on by itself.
class begun_supervisor {
 public:
  /// What it says before it has a log goes to the log's file, too. `invalid_config` naming that file: it is
  /// no plain one, or cannot be written. `not_found`, `overloaded`: the command cannot be run.
  [[nodiscard]] static result<begun_supervisor> start(const std::string& command,
                                                      const std::vector<std::string>& environment,
                                                      const std::string& deployment_file,
                                                      const std::string& log);
  /// Waits a moment for the end of our child, and ends it where that does not come: it is nobody's burden.
  ~begun_supervisor();
  begun_supervisor(begun_supervisor&& other) noexcept;
  begun_supervisor& operator=(begun_supervisor&&) = delete;

  /// How our child ended, in words, if not as it should ("exit code 2"). Empty: it did, or it runs, or
  /// nobody can say: this process has another reap its children, or the kernel.
  [[nodiscard]] std::optional<std::string> failure();
  /// Since when our child is known to have ended, however it did. Empty: it runs.
  [[nodiscard]] std::optional<std::chrono::steady_clock::time_point> ended();
  /// It is not waited for any more, whatever it does.
  void kill() noexcept;

 private:
  explicit begun_supervisor(pid_t child) noexcept : child_{child} {}
  [[nodiscard]] bool has_ended() noexcept;
  [[nodiscard]] bool ends_soon() noexcept;

  pid_t child_{-1};  ///< -1: it has ended
  int status_{0};
  std::chrono::steady_clock::time_point ended_at_{};
};

/// The end of what stands in a log behind its first `from` bytes, in one line; empty: nothing does.
[[nodiscard]] std::string end_of_log(const std::string& path, std::uint64_t from);
/// Its length now; 0: it is not there.
[[nodiscard]] std::uint64_t length_of_log(const std::string& path);

}  // namespace troupe::actors
