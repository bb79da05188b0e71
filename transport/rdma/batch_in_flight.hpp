#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "troupe/transport/backend.hpp"
#include "troupe/transport/rdma/memory_keys.hpp"
#include "troupe/transport/rdma/open_grant.hpp"
#include "troupe/transport/rdma/queue_pair.hpp"
#include "troupe/transport/rdma/work_cursor.hpp"
#include "troupe/transport/region_table.hpp"

namespace troupe::transport::rdma {

/// One piece of a batch with the addresses and keys that its requests need.
struct placed_piece {
  region_use local;
  const registered_region* registered{nullptr};  ///< of `local`
  std::uint64_t grant{0};
  bool remote_is_host{false};
  std::shared_ptr<const grant_keys> remote;  ///< null until the peer has told them
  std::uint32_t first_segment{0};            ///< its number among all segments of the batch
};

/// A batch that was posted and has no outcome yet; what is no small one (small_batch.hpp).
struct batch_in_flight {
  batch work;
  std::vector<placed_piece> places;
  std::size_t slot{0};   ///< its place among the link's batches
  std::size_t piece{0};  ///< that is being cut into requests
  work_cursor cursor;
  bool cut{false};                ///< every request was posted, or none shall be any more
  std::uint64_t lanes{0};         ///< a bit for each lane that carries part of it
  std::uint64_t notices_left{0};  ///< a bit for each lane whose immediate must still be posted
  std::uint32_t sequence{0};      ///< of its notice
  bool notified{false};           ///< an immediate of it was posted, or may be
  bool told{false};               ///< its frame is with the messages
  std::uint32_t outstanding{0};   ///< requests that the NIC has
  std::uint64_t done{0};          ///< bytes
  std::optional<troupe::error> failure;
  std::set<std::uint32_t> bad;  ///< segments, once it failed

  [[nodiscard]] bool has_notice() const noexcept {
    return work.dir == direction::write && !work.frame.empty();
  }
  [[nodiscard]] bool ended() const noexcept { return cut && notices_left == 0 && outstanding == 0; }
  /// The next request, if there is one. `place` is its piece's.
  [[nodiscard]] bool next(const work_cursor::limits& within, remote_run& run,
                          const placed_piece*& place);
  /// Whether there is no further request.
  [[nodiscard]] bool at_end() noexcept;
  /// No further request is posted; what was not is bad.
  void give_up(troupe::error why);
  /// Whether its segments keep to what the peer said of its grants. If not it has failed; all
  /// `places` have their keys.
  bool keeps_to_grants();
  [[nodiscard]] completion outcome() const;

 private:
  void enter_piece();
  bool entered_{false};
};

/// A request that the NIC has.
struct posted_request {
  std::uint64_t number{0};
  batch_in_flight* of{nullptr};  ///< null: it is about a window, or about reads
  open_grant* window{nullptr};   ///< whose it is
  std::uint32_t bytes{0};
  std::uint32_t first_segment{0}, last_segment{0};  ///< of the batch
  std::optional<transfer_id> settles{};             ///< no byte; behind the reads of this one
};

/// One queue pair for bytes, and what it has under way.
struct data_lane {
  std::unique_ptr<queue_pair> pair;
  std::vector<owned_window> windows;  ///< all that were made for it; gone before `pair`
  std::vector<ibv_mw*> free_windows;  ///< those that are not bound
  std::deque<window_request> window_requests;
  std::uint8_t rail{0};
  std::uint64_t last_number{0};
  std::uint64_t bytes{0};  ///< on the way
  std::uint64_t moved{0};  ///< bytes of what has completed
  /// The oldest request when it was last looked at, and when that was first seen.
  std::uint64_t stalled_number{0};
  std::chrono::steady_clock::time_point stalled_since;
  std::deque<posted_request> posted;
};

}  // namespace troupe::transport::rdma
