#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "troupe/deploy/cli/cluster_address.hpp"
#include "troupe/deploy/cli/exit_codes.hpp"
#include "troupe/deploy/cli/status_report.hpp"

namespace troupe::deploy::cli {

inline constexpr std::chrono::milliseconds min_watch_interval{100};
inline constexpr std::chrono::milliseconds max_watch_interval{3'600'000};

enum class watch_form : std::uint8_t { tables, json };

struct watch_options {
  watch_form form{watch_form::tables};
  std::chrono::milliseconds interval{1000};
  std::chrono::milliseconds timeout{3000};  ///< of each node's answer
};

/// `troupe status --watch`: looks repeatedly until a signal comes. Continues through the
/// supervisor's absence and restarts, and reports them.
[[nodiscard]] exit_code watch_status(const cluster_address& at, const watch_options& how);

// -- parts of it

/// Each node's work per second between two looks, by the node's own clock.
class rate_meter {
 public:
  /// Sets `rates` of every node that was seen before in the same life.
  void measure(cluster_status& status);

 private:
  struct reading {
    std::uint64_t incarnation{0};
    std::uint64_t uptime_ms{0};
    std::uint64_t transfers{0};
    std::uint64_t bytes{0};
  };
  std::map<std::string, reading> last_;
};

struct window {
  std::size_t rows{24};
  std::size_t columns{80};
};

/// Text that fits a window: longer lines are cut, and if there are too many, the last one says how
/// many rows were left out. No newline at the end.
[[nodiscard]] std::string fitted(std::string_view text, window size);

/// The bytes that draw such text over the previous one: no row is cleared before it is written, so
/// nothing flickers.
[[nodiscard]] std::string redrawn(std::string_view text);

}  // namespace troupe::deploy::cli
