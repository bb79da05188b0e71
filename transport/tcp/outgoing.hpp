#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "troupe/transport/grant_table.hpp"
#include "troupe/transport/tcp/memory_run.hpp"
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
  std::vector<memory_run> runs;
  std::vector<remote_run> remote;     ///< beside `runs`; empty for read_data
  std::vector<std::byte> session;     ///< write: travels in the last frame
  std::uint64_t bytes{0};             ///< of all runs
  std::atomic<bool> given_up{false};  ///< read_data: the initiator does not want it any more
  run_cursor cursor;

  [[nodiscard]] bool withdrawn() const noexcept {
    return given_up.load(std::memory_order_relaxed) || (guard != nullptr && guard->revoked());
  }
};

}  // namespace troupe::transport::tcp
