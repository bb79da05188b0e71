#pragma once

#include <atomic>
#include <cstdint>

#include "troupe/transport/backend.hpp"
#include "troupe/transport/recent_transfers.hpp"

namespace troupe::transport {

/// The books of one end of a link, the same for every backend: which transfers were fenced, whether
/// another batch may start, and the counters for `link::stats`. Calls about batches and fences need
/// the lock that guards the link's batches; any thread may count frames.
class link_ledger {
 public:
  explicit link_ledger(std::uint32_t max_batches) : max_batches_{max_batches} {}

  /// Admits a batch. `grant_revoked`: its transfer was fenced here; `overloaded`: too many are in
  /// flight.
  [[nodiscard]] result<void> admit(transfer_id transfer);
  /// Records the outcome of an admitted batch.
  void ended(bool good) noexcept;
  /// Refuses batches of the transfer from now on.
  void fence(transfer_id transfer);
  [[nodiscard]] std::uint64_t in_flight() const noexcept { return posted_ - completed_ - failed_; }

  void frame_sent() noexcept { frames_out_.fetch_add(1, std::memory_order_relaxed); }
  void frame_received() noexcept { frames_in_.fetch_add(1, std::memory_order_relaxed); }

  /// The part of `link::stats` that is counted here; the rest is 0.
  [[nodiscard]] link_stats stats() const noexcept;

 private:
  const std::uint32_t max_batches_;
  recent_transfers fenced_;
  std::uint64_t posted_{0}, completed_{0}, failed_{0};
  std::atomic<std::uint64_t> frames_out_{0}, frames_in_{0};
};

}  // namespace troupe::transport
