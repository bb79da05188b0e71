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

/// The current environment of this process, "NAME=value" each. No other thread may change it
/// meanwhile.
[[nodiscard]] std::vector<std::string> environment_of_this_process();

/// The path of the `troupe` command: $TROUPE_COMMAND, which must be a command if set; else the
/// program that this process runs, if it is `troupe`; else the one beside the library or program
/// that contains this code, or in ../bin from there; else the first in $PATH. The variables are
/// those of `environment`. `not_found` naming the places searched.
[[nodiscard]] result<std::string> troupe_command(const std::vector<std::string>& environment);

/// `troupe node FILE --name supervisor --detach`: our child ends as soon as the supervisor, no
/// longer a child of any process of ours, runs on its own.
class begun_supervisor {
 public:
  /// Output of the supervisor before it opens its log goes to the log's file, too. `invalid_config`
  /// naming that file: it is not a plain file or cannot be written. `not_found`, `overloaded`: the
  /// command cannot be run.
  [[nodiscard]] static result<begun_supervisor> start(const std::string& command,
                                                      const std::vector<std::string>& environment,
                                                      const std::string& deployment_file,
                                                      const std::string& log);
  /// Waits a moment for our child to end, then kills and reaps it: no child is left behind.
  ~begun_supervisor();
  begun_supervisor(begun_supervisor&& other) noexcept;
  begun_supervisor& operator=(begun_supervisor&&) = delete;

  /// How our child failed, in words ("exit code 2"). Empty if it runs, ended well, or its status is
  /// unknown because other code of this process, or the kernel, reaps the children.
  [[nodiscard]] std::optional<std::string> failure();
  /// When our child was found to have ended, well or not. Empty if it runs.
  [[nodiscard]] std::optional<std::chrono::steady_clock::time_point> ended();
  /// Kills our child if it still runs.
  void kill() noexcept;

 private:
  explicit begun_supervisor(pid_t child) noexcept : child_{child} {}
  [[nodiscard]] bool has_ended() noexcept;
  [[nodiscard]] bool ends_soon() noexcept;

  pid_t child_{-1};  ///< -1: it has ended
  int status_{0};
  std::chrono::steady_clock::time_point ended_at_{};
};

/// The end of a log in one line, without the log's first `from` bytes. Empty if nothing follows
/// them.
[[nodiscard]] std::string end_of_log(const std::string& path, std::uint64_t from);
/// The current length of a log; 0 if it does not exist.
[[nodiscard]] std::uint64_t length_of_log(const std::string& path);

}  // namespace troupe::actors
