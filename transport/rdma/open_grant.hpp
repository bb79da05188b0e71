#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <infiniband/verbs.h>

#include "troupe/transport/grant_table.hpp"
#include "troupe/transport/rdma/wire.hpp"

namespace troupe::transport::rdma {

struct release_window {
  void operator()(ibv_mw* window) const noexcept { ::ibv_dealloc_mw(window); }
};
/// A type 2 memory window. It must be gone before the queue pair that it is bound to.
using owned_window = std::unique_ptr<ibv_mw, release_window>;

/// A window of a grant, on the queue pair of one lane: only what comes over that lane may use it.
struct lane_window {
  ibv_mw* window{nullptr};  ///< the lane's
  std::uint8_t lane{0};
  std::uint32_t key{0};  ///< by which the peer uses it
};

/// A grant that this end has given, until nothing can use it any more.
///
/// | state   | on                              | becomes          |
/// | ------- | ------------------------------- | ---------------- |
/// | binding | the NIC has bound every window  | open: peer told  |
/// | open    | its transfer's fence needs it   | closing          |
/// | closing | the NIC has shut every window   | gone             |
struct open_grant {
  enum class phase : std::uint8_t { binding, open, closing };

  given_grant given;                 ///< what this end itself holds small batches to
  grant_keys said;                   ///< to the peer
  std::vector<lane_window> windows;  ///< none where the device has no windows, or nothing is open
  phase state{phase::binding};
  std::uint32_t unanswered{0};  ///< windows of which the NIC has not said that it is done
  bool fenced{false};           ///< the peer is not to hear of it any more
};

/// A request about a window that waits for room in its lane's queue.
struct window_request {
  open_grant* of{nullptr};
  ibv_mw* window{nullptr};
  std::uint32_t key{0};     ///< to be bound with, or to be invalidated
  ibv_mr* memory{nullptr};  ///< to be bound to; null: to be invalidated
  std::uint64_t address{0};
  std::uint64_t bytes{0};
};

}  // namespace troupe::transport::rdma
