#pragma once

/// Where log lines go: the only global state of Troupe. A line says who (node and component), what,
/// how much, how long, with ids that can be searched for across nodes:
///
///     2026-03-01T12:00:00.123 info  decode-0 link: link to prefill-0 (59c1a2f0c1d2e3f4) ended
///
/// Levels: trace, debug, info, warn, error, off.

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include <spdlog/logger.h>

#include "troupe/kvcache/result.hpp"

namespace troupe::actors {

struct log_options {
  std::string level{"info"};
  std::string node;                   ///< printed in every line; empty: the process id
  std::string file;                   ///< empty: standard error
  std::size_t file_bytes{64u << 20};  ///< a file is rotated at this size
  std::size_t files{3};               ///< at most this many rotated files are kept
};

/// Sets the level, form and destination of all loggers, including existing ones. `invalid_config`
/// if there is no such level or the file cannot be written; nothing changes then. Before the first
/// call, lines of level `info` go to standard error. Thread-safe.
[[nodiscard]] result<void> init_logging(const log_options& options);

/// The logger of a component (supervisor, node, link, pool, transfer, engine), made on first use.
/// Thread-safe.
[[nodiscard]] std::shared_ptr<spdlog::logger> logger(std::string_view component);

/// Lets one line pass per interval, for events that a stranger can trigger at will. Thread-safe.
class log_limiter {
 public:
  explicit log_limiter(std::chrono::milliseconds interval = std::chrono::seconds{1})
      : interval_{interval} {}
  /// The number of lines held back since the last one that passed. Empty if this line is held back
  /// too.
  [[nodiscard]] std::optional<std::uint64_t> pass(
      std::chrono::steady_clock::time_point now = std::chrono::steady_clock::now());

 private:
  std::chrono::milliseconds interval_;
  std::mutex mutex_;
  std::optional<std::chrono::steady_clock::time_point> last_;
  std::uint64_t held_back_{0};
};

}  // namespace troupe::actors
