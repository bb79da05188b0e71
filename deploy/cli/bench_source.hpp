#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "troupe/actors/engine.hpp"
#include "troupe/config/deployment.hpp"
#include "troupe/deploy/child_process.hpp"
#include "troupe/deploy/cli/bench_options.hpp"
#include "troupe/kvcache/result.hpp"

namespace troupe::deploy::cli {

/// A party that runs beside the measuring side until it is told to stop. The destructor waits for
/// its end.
class bench_companion {
 public:
  virtual ~bench_companion() = default;
  /// An error if it has ended, which it should not before `terminate`.
  [[nodiscard]] virtual result<void> check() = 0;
  /// Tells it to stop, without waiting.
  virtual void terminate() = 0;
  /// Null if it is a thread of this process.
  [[nodiscard]] virtual child_process* process() { return nullptr; }
};

/// Polled during a wait; returning true gives the wait up with `aborted`.
using bench_interruption = std::function<bool()>;

struct bench_supervisor {
  std::unique_ptr<bench_companion> process;
  std::uint16_t port{0};  ///< on which it listens
};

/// Starts the supervisor of the deployment in a process of its own and waits until it listens.
[[nodiscard]] result<bench_supervisor> start_bench_supervisor(
    const config::deployment& deployment, const std::string& log_level,
    const bench_interruption& interrupted);
/// Starts the prefill side in a process or a thread of its own, and waits until it is registered.
[[nodiscard]] result<std::unique_ptr<bench_companion>> start_bench_source(
    const config::deployment& deployment, const bench_options& options,
    const std::string& log_level, const bench_interruption& interrupted);
/// Waits until the supervisor has registered the node.
[[nodiscard]] result<void> wait_taken_in(engine& node, const bench_interruption& interrupted);

/// The main function of the process that `start_bench_source` starts: runs the prefill side of the
/// load against the deployment in `file`, until SIGTERM.
[[nodiscard]] result<void> run_bench_source(const config::deployment& deployment,
                                            const bench_options& options, int announce_fd);

inline constexpr const char* bench_prefill_node = "prefill-0";
inline constexpr const char* bench_decode_node = "decode-0";

}  // namespace troupe::deploy::cli
