#pragma once

/// How an operation may end, from what the scenario says.

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "troupe/kvcache/errc.hpp"

#include "scenario.hpp"

namespace troupe::engine_fuzz {

enum class part : std::uint8_t { send, receive, receive_again, receive_late, hold, release };
[[nodiscard]] std::string_view to_string(part what) noexcept;

struct verdict {
  bool may_succeed{true};
  bool may_fail_anyhow{false};
  std::vector<errc> failures;

  [[nodiscard]] bool admits(errc code) const {
    return may_fail_anyhow || std::ranges::find(failures, code) != failures.end();
  }
  /// Whether the operation succeeds whatever else happens.
  [[nodiscard]] bool is_certain() const { return failures.empty() && !may_fail_anyhow; }
};

/// The node of the round that is killed or stopped.
[[nodiscard]] std::optional<std::uint32_t> victim_of(const round& now);
/// Whether the victim is stopped, and wakes when the others have ended.
[[nodiscard]] bool has_standing(const round& now);

[[nodiscard]] verdict verdict_on(const scenario& s, const round& now, std::uint32_t request,
                                 std::uint32_t node, part what);

}  // namespace troupe::engine_fuzz
