#pragma once

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
  const registered_region* registered{nullptr};  ///< `local` as registered with the devices
  std::uint64_t grant{0};
  bool remote_is_host{false};
  std::shared_ptr<const grant_keys> remote;  ///< null until the peer has sent the keys
  std::uint32_t first_segment{0};            ///< index among all segments of the batch
};

/// A posted batch that has no outcome yet. Small batches (small_batch.hpp) are kept elsewhere.
struct batch_in_flight {
  batch work;
  std::vector<placed_piece> places;
  std::size_t slot{0};   ///< index among the link's batches
  std::size_t piece{0};  ///< the piece being cut into requests
  work_cursor cursor;
  bool cut{false};                ///< no request is left to post: all posted, or given up
  std::uint64_t lanes{0};         ///< a bit for each lane that carries part of it
  std::uint64_t notices_left{0};  ///< a bit for each lane whose immediate must still be posted
  std::uint32_t sequence{0};      ///< number of its notice
  bool notified{false};           ///< its notice is counted, so immediates may be posted
  bool told{false};               ///< its frame is queued with the messages
  std::uint32_t outstanding{0};   ///< requests posted to the NIC and not completed
  std::uint64_t done{0};          ///< bytes
  std::optional<troupe::error> failure;
  std::set<std::uint32_t> bad;  ///< failed segments

  [[nodiscard]] bool has_notice() const noexcept {
    return work.dir == direction::write && !work.frame.empty();
  }
  [[nodiscard]] bool ended() const noexcept { return cut && notices_left == 0 && outstanding == 0; }
  /// Cuts the next request and sets `place` to its piece. Returns whether there was one.
  [[nodiscard]] bool next(const work_cursor::limits& within, remote_run& run,
                          const placed_piece*& place);
  /// Whether no request is left.
  [[nodiscard]] bool at_end() noexcept;
  /// Stops posting requests and marks every segment not posted yet as bad.
  void give_up(troupe::error why);
  /// Whether all segments stay within the peer's grants; fails the batch if not. Every place must
  /// have its keys.
  bool keeps_to_grants();
  [[nodiscard]] completion outcome() const;

 private:
  void enter_piece();
  bool entered_{false};
};

/// A request posted to the NIC and not completed.
struct posted_request {
  std::uint64_t number{0};
  batch_in_flight* of{nullptr};  ///< null for a window request or an empty write
  open_grant* window{nullptr};   ///< grant of a window request
  std::uint32_t bytes{0};
  std::uint32_t first_segment{0}, last_segment{0};  ///< indices in the batch
  std::optional<transfer_id> settles{};             ///< an empty write behind this transfer's reads
};

/// A queue pair for bytes and its requests in flight.
struct data_lane {
  std::unique_ptr<queue_pair> pair;
  std::vector<owned_window> windows;  ///< all of this lane's; destroyed before `pair`
  std::vector<ibv_mw*> free_windows;  ///< the unbound ones
  std::deque<window_request> window_requests;
  std::uint8_t rail{0};
  std::uint64_t last_number{0};
  std::uint64_t bytes{0};  ///< in flight
  std::uint64_t moved{0};  ///< bytes of completed requests
  /// The oldest request at the last check, and when it was first seen as the oldest.
  std::uint64_t stalled_number{0};
  std::chrono::steady_clock::time_point stalled_since;
  std::deque<posted_request> posted;
};

}  // namespace troupe::transport::rdma
