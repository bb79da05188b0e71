#pragma once

/// Judges a failed attempt of a carried request: whether it lost nodes and can continue elsewhere,
/// or failed on its own account. Pure, for `request_carrier`.

#include <cstdint>
#include <string>
#include <vector>

#include "troupe/actors/cluster_client.hpp"
#include "troupe/actors/cluster_messages.hpp"
#include "troupe/kvcache/result.hpp"

namespace troupe::actors {

enum class carried_side : std::uint8_t { prefill, decode };

/// A call of an attempt that failed.
struct failed_call {
  carried_side side{carried_side::prefill};
  std::string node;
  call_reach reach{call_reach::answered};
  error why;
};

struct attempt_verdict {
  error why;                      ///< the failure that explains the others
  std::vector<std::string> lost;  ///< nodes to continue without; empty: the request is over
  bool guessed{false};            ///< `lost` rests only on the word of their peers
};

/// Whether the error may follow from the loss of a node, but may also have been requested. The
/// membership tells once the cluster has heard of a loss.
[[nodiscard]] bool may_follow_from_a_loss(errc code);

/// Whether the cluster has given up a node since its placement: the node is down, and not by its
/// own report, has another incarnation, or has been out of the cluster. `seen` must have been asked
/// for after the placement came: lists of different supervisors cannot be ordered.
[[nodiscard]] bool is_lost(const membership& seen, const placement& where, const node_info& node);

/// `failed` is not empty. A node that could not be asked any more is lost. If a node answers that
/// it lost its peer or was refused by it, the other side is lost, unless the membership knows
/// better. A failure of the request itself (`pool_exhausted`, for example) would recur elsewhere,
/// so no node is lost.
[[nodiscard]] attempt_verdict judge(const membership& seen, const placement& where,
                                    const std::vector<failed_call>& failed);

}  // namespace troupe::actors
