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
/// A type 2 memory window. Destroy it before the queue pair that it is bound to.
using owned_window = std::unique_ptr<ibv_mw, release_window>;

/// A grant's window on the queue pair of one lane; only requests on that lane can use it.
struct lane_window {
  ibv_mw* window{nullptr};  ///< owned by the lane
  std::uint8_t lane{0};
  std::uint32_t key{0};  ///< with which the peer uses the window
};

/// A grant that this end has given, kept until nobody can use it.
///
/// | state   | on                              | becomes          |
/// | ------- | ------------------------------- | ---------------- |
/// | binding | the NIC has bound every window  | open: peer told  |
/// | open    | its transfer's fence needs it   | closing          |
/// | closing | the NIC has shut every window   | gone             |
struct open_grant {
  enum class phase : std::uint8_t { binding, open, closing };

  given_grant given;                 ///< against which this end checks small batches
  grant_keys said;                   ///< keys sent to the peer
  std::vector<lane_window> windows;  ///< empty if the device has no windows or the grant is empty
  phase state{phase::binding};
  std::uint32_t unanswered{0};  ///< window requests that the NIC has not completed
  bool fenced{false};           ///< its keys must no longer be sent to the peer
};

/// A request about a window that waits for room in its lane's queue.
struct window_request {
  open_grant* of{nullptr};
  ibv_mw* window{nullptr};
  std::uint32_t key{0};     ///< key to bind with or to invalidate
  ibv_mr* memory{nullptr};  ///< memory to bind to; null to invalidate
  std::uint64_t address{0};
  std::uint64_t bytes{0};
};

}  // namespace troupe::transport::rdma
