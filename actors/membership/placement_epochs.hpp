#pragma once

/// Whether what was placed before a node was out of the cluster still counts. It does not: a node that
/// was cut off or stood still, and comes back, holds placements that were carried on elsewhere
/// meanwhile. Pure: what a node knows comes in as an argument.
///
/// Nothing is said of placements of another supervisor (its epochs are others), nor of those that are
/// newer than the membership that is looked at. A node that is down by its own report was not lost.

#include <cstdint>
#include <optional>
#include <string_view>

#include "troupe/actors/cluster_messages.hpp"
#include "troupe/kvcache/result.hpp"

namespace troupe::actors {

/// By which supervisor something was placed or taken in, and at which of its epochs. `by` 0: by none.
struct epoch_mark {
  std::uint64_t by{0};
  std::uint64_t at{0};
};

/// Why that life of a node (0: whichever is shown) cannot be held to a placement: `stale_incarnation`
/// with the epochs. Empty: it can.
[[nodiscard]] std::optional<error> voided(const membership& seen, std::string_view node,
                                          std::uint64_t incarnation, epoch_mark placed);

/// The same of the node that asks this of itself; it was taken in last at `taken_in`, which may be
/// newer than what it has seen.
[[nodiscard]] std::optional<error> voided_here(const membership& seen, const node_info& self,
                                               epoch_mark taken_in, epoch_mark placed);

/// Why no link is made with who asks: the cluster took that very life for dead, and it has not
/// registered since.
[[nodiscard]] std::optional<error> taken_for_dead(const membership& seen,
                                                  const link_request& request);

}  // namespace troupe::actors
