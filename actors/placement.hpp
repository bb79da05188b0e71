#pragma once

/// Where a request goes. Used in cluster messages and by engines.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "troupe/actors/node_info.hpp"
#include "troupe/config/transfer_mode.hpp"
#include "troupe/kvcache/errc.hpp"
#include "troupe/kvcache/layout_fingerprint.hpp"

namespace troupe::actors {

using troupe::transfer_mode;

/// Bytes of `placement_request::affinity`.
inline constexpr std::size_t max_affinity = 256;

struct placement_request {
  std::string request;  ///< id of the request, for logs and affinity
  std::string from;     ///< stage; empty: the deployment's only edge
  std::string to;
  std::uint32_t timeout_ms{0};  ///< how long to wait while no replica is up; 0: fail at once
  /// Requests with the same affinity (a session, a conversation) go to the same replicas while
  /// those are up; at most 256 bytes. Empty: the policy alone decides.
  std::string affinity{};
  /// Not empty: places the same request again because it lost these nodes of its former placement.
  /// Counts against `limits.retry_budget`.
  std::vector<std::string> failed{};
  /// With `failed`: 1 if the prefill replica holds the sealed cache; that replica is chosen again
  /// while it is up in the same life.
  std::uint8_t keep_source{0};
};

struct placement {
  std::uint8_t failed{0};
  std::string sentence;
  std::string request;
  std::uint64_t supervisor_incarnation{0};
  std::uint64_t epoch{0};
  std::uint32_t attempt{1};     ///< of this request, from 1
  std::uint8_t same_source{0};  ///< 1: same prefill replica as the former attempt, in the same life
  /// The edge's mode. Unspecified for an edge over which no layers move: no `receive` uses it.
  transfer_mode mode{transfer_mode::write};
  std::vector<node_info> prefill;  ///< every rank of the chosen replica, in rank order
  std::vector<node_info> decode;
  /// Of the layout that both replicas share if a stage is open; else all zero.
  kvcache::layout_fingerprint fingerprint{};
};
/// What is wrong with the mode in the supervisor's answer. Empty if nothing is.
[[nodiscard]] std::optional<troupe::error> wrong_mode(const placement& where);

// -- inspection

template <class I>
auto inspect(I& f, placement_request& x) {
  return f(x.request, x.from, x.to, x.timeout_ms, x.affinity, x.failed, x.keep_source);
}
template <class I>
auto inspect(I& f, placement& x) {
  return f(x.failed, x.sentence, x.request, x.supervisor_incarnation, x.epoch, x.attempt,
           x.same_source, x.mode, x.prefill, x.decode, x.fingerprint);
}

}  // namespace troupe::actors
