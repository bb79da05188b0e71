#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "troupe/transport/grant_table.hpp"
#include "troupe/transport/region_table.hpp"
#include "troupe/transport/staging/memory_run.hpp"
#include "troupe/transport/tcp/outgoing_stage.hpp"
#include "troupe/transport/tcp/wire.hpp"

namespace troupe::transport::tcp {

/// Where a run of local memory goes to or comes from at the peer.
struct remote_run {
  std::uint64_t grant{0};
  std::uint64_t offset{0};
  std::uint64_t stride{0};
  std::uint32_t index{0};  ///< of the segment, over all pieces of the batch
};

/// What one lane has to send for one batch (`write`, `read_request`) or in answer to one read
/// request
/// (`read_data`). Filled by its maker, then only touched by the lane's sender.
struct outgoing {
  frame_type type{frame_type::write};
  std::uint64_t batch{0};
  std::uint64_t transfer{0};
  std::uint8_t parts{1};
  bool last{true};            ///< read_data: the request was the last one of its batch here
  revocable* guard{nullptr};  ///< of the memory that `runs` point into; set before it is
                              ///< pushed, lives as long as this
  std::shared_ptr<given_grant> grant;  ///< read_data: where the guard lives
  std::vector<staging::memory_run> runs;
  std::vector<remote_run> remote;         ///< beside `runs`; empty for read_data
  std::span<const region_use> memory;     ///< of the runs; to be looked at under a pin of the guard
  std::unique_ptr<outgoing_stage> stage;  ///< where runs are in memory of GPUs; else none
  std::vector<std::byte> session;         ///< write: travels in the last frame
  std::uint64_t bytes{0};                 ///< of all runs
  std::atomic<bool> given_up{false};      ///< read_data: the initiator does not want it any more
  staging::run_cursor cursor;

  /// Whose fence waits for copies out of memory of GPUs: whoever answers a read gave a grant, and takes
  /// that back. Only a grant for one transfer is of the transfer that reads.
  [[nodiscard]] transfer_id copies_for() const noexcept {
    return grant ? grant->transfer : transfer_id{transfer};
  }
  [[nodiscard]] bool withdrawn() const noexcept {
    return given_up.load(std::memory_order_relaxed) || (guard != nullptr && guard->revoked());
  }
  /// Whether nothing of it is sent any more but its end. A write that a GPU failed is withdrawn by the
  /// link, which says why.
  [[nodiscard]] bool must_end() const {
    return withdrawn() || (type == frame_type::read_data && stage && stage->failure() != nullptr);
  }
  /// Whether its next frame can be made.
  [[nodiscard]] bool may_go() const { return !stage || stage->ready() > 0 || must_end(); }
};

}  // namespace troupe::transport::tcp
