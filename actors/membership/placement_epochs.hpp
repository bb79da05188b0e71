#pragma once

/// Decides which placements are void. A placement on a node is void if the node was out of the
/// cluster after it was made: a node that was cut off or stood still, and comes back, holds
/// placements that were carried on elsewhere meanwhile. Pure: the node's knowledge comes in as an
/// argument.
///
/// Placements of another supervisor (which has other epochs) and those that are newer than the
/// given membership are not judged. A node that is down by its own report was not lost.

#include <cstdint>
#include <optional>
#include <string_view>

#include "troupe/actors/cluster_messages.hpp"
#include "troupe/kvcache/result.hpp"

namespace troupe::actors {

/// The supervisor (0: none) that placed a request or took a node in, and the epoch at which it did.
struct membership_mark {
  std::uint64_t by{0};
  std::uint64_t at{0};
};

/// Why a placement no longer binds that life of a node (0: whichever is shown): `stale_incarnation`
/// with the epochs. Empty if it does.
[[nodiscard]] std::optional<error> check_placement(const membership& seen, std::string_view node,
                                                   std::uint64_t incarnation,
                                                   membership_mark placed);

/// Like `check_placement`, for a node that asks about itself. It was last taken in at `taken_in`, which may
/// be newer than the membership that it has seen.
[[nodiscard]] std::optional<error> check_own_placement(const membership& seen,
                                                       const node_info& self,
                                                       membership_mark taken_in,
                                                       membership_mark placed);

/// Why no link is made with the node that asks: the cluster took that very life for dead, and it
/// has not registered since. Empty if a link may be made.
[[nodiscard]] std::optional<error> check_dialler(const membership& seen,
                                                 const link_request& request);

}  // namespace troupe::actors
