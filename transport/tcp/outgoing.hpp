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

/// Where a run of local memory goes to, or comes from, at the peer.
struct remote_run {
  std::uint64_t grant{0};
  std::uint64_t offset{0};
  std::uint64_t stride{0};
  std::uint32_t index{0};  ///< of the segment, among all pieces of the batch
};

/// A job of one lane: what it sends for one batch (`write`, `read_request`) or in answer to one
/// read request (`read_data`). Filled by its creator, then used only by the lane's sender.
struct outgoing {
  frame_type type{frame_type::write};
  std::uint64_t batch{0};
  std::uint64_t transfer{0};
  std::uint8_t parts{1};
  bool last{true};            ///< read_data: answers the batch's last request on this lane
  revocable* guard{nullptr};  ///< of `runs`' memory; set before the push, lives as long as this
  std::shared_ptr<given_grant> grant;  ///< read_data: owns the guard
  std::vector<staging::memory_run> runs;
  std::vector<remote_run> remote;         ///< parallel to `runs`; empty for read_data
  std::span<const region_use> memory;     ///< of the runs; read only under a pin of the guard
  std::unique_ptr<outgoing_stage> stage;  ///< set if runs are in GPU memory
  std::vector<std::byte> session;         ///< write: sent in the last frame
  std::uint64_t bytes{0};                 ///< of all runs
  std::atomic<bool> given_up{false};      ///< read_data: the initiator has cancelled it
  staging::run_cursor cursor;

  /// The transfer whose fence waits for copies out of GPU memory. For the answer to a read it is
  /// the grant's, whose fence revokes the grant; it differs from the reading transfer if the grant
  /// is standing.
  [[nodiscard]] transfer_id copies_for() const noexcept {
    return grant ? grant->transfer : transfer_id{transfer};
  }
  [[nodiscard]] bool withdrawn() const noexcept {
    return given_up.load(std::memory_order_relaxed) || (guard != nullptr && guard->revoked());
  }
  /// Whether only the job's end is still to be sent. If a GPU fails a write, the link withdraws it
  /// and reports why.
  [[nodiscard]] bool must_end() const {
    return withdrawn() || (type == frame_type::read_data && stage && stage->failure() != nullptr);
  }
  /// Whether the next frame can be built.
  [[nodiscard]] bool may_go() const { return !stage || stage->ready() > 0 || must_end(); }
};

}  // namespace troupe::transport::tcp
