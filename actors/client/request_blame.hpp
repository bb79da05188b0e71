#pragma once

/// What became of an attempt of a carried request: whether nodes were lost to it, so that it goes on
/// elsewhere, or it failed by itself. Pure, for `request_carrier`.

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
  error why;                      ///< the one that explains the others
  std::vector<std::string> lost;  ///< nodes to go on without; empty: it is over
  bool guessed{false};            ///< `lost` is who another one misses; nobody else knows of it
};

/// May follow from the loss of a node, and may have been asked for: the cluster knows, once it has heard.
[[nodiscard]] bool may_follow_from_a_loss(errc code);

/// Whether the cluster has given a node of a placement up since: it is down, and not by its own report,
/// lives another life, or was out of the cluster. The list was asked for after the placement came: an
/// older one of another supervisor is not to be told from a newer one.
[[nodiscard]] bool is_lost(const membership& seen, const placement& where, const node_info& node);

/// `failed` is not empty. Whoever could not be asked any more was lost himself; of who answers that it
/// lost its peer, or was refused by it, the other side was, unless the membership knows better. What
/// both sides can answer for themselves (`pool_exhausted`, say) would be no better elsewhere.
[[nodiscard]] attempt_verdict judge(const membership& seen, const placement& where,
                                    const std::vector<failed_call>& failed);

}  // namespace troupe::actors
