#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include <infiniband/verbs.h>

#include "troupe/kvcache/result.hpp"
#include "troupe/transport/rdma/device.hpp"
#include "troupe/transport/rdma/wire.hpp"

namespace troupe::transport::rdma {

/// Whose a queue is: what its maker chose; 0: nobody's. Known as long as the queue is there, without a lock.
using queue_owner = std::uint64_t;
[[nodiscard]] queue_owner owner_of(const ibv_cq& queue) noexcept;
[[nodiscard]] queue_owner owner_of(const ibv_qp& pair) noexcept;

/// Where a device's completions arrive, and the descriptor that says so to a thread that sleeps.
class completion_queue {
 public:
  /// `overloaded`: the device has no more, or none so long.
  [[nodiscard]] static result<std::unique_ptr<completion_queue>> create(std::shared_ptr<device> on,
                                                                        std::uint32_t entries,
                                                                        queue_owner owner = 0);
  completion_queue(const completion_queue&) = delete;
  completion_queue& operator=(const completion_queue&) = delete;
  ~completion_queue();

  [[nodiscard]] ibv_cq* get() const noexcept { return queue_; }
  [[nodiscard]] int fd() const noexcept { return channel_->fd; }
  /// Makes the descriptor readable with the next completion.
  void arm() noexcept { ::ibv_req_notify_cq(queue_, 0); }
  /// After the descriptor was readable.
  void take_event() noexcept;

 private:
  explicit completion_queue(std::shared_ptr<device> on) : device_{std::move(on)} {}
  const std::shared_ptr<device> device_;
  ibv_comp_channel* channel_{nullptr};
  ibv_cq* queue_{nullptr};
};

/// How long the queues of a pair are.
struct queue_lengths {
  std::uint32_t sends{0};
  std::uint32_t receives{0};
  std::uint32_t pieces{1};        ///< of local memory in one request
  std::uint32_t inline_bytes{0};  ///< that a request may carry in itself; the device may give less
};

/// One reliable connection, of its completion queue's owner. Not thread-safe. When it is destroyed nothing of it touches memory any
/// more, and nothing of the peer's through it.
class queue_pair {
 public:
  /// `overloaded`, `internal`.
  [[nodiscard]] static result<std::unique_ptr<queue_pair>> create(std::shared_ptr<device> on,
                                                                  completion_queue& completions,
                                                                  const queue_lengths& wanted);
  queue_pair(const queue_pair&) = delete;
  queue_pair& operator=(const queue_pair&) = delete;
  ~queue_pair();

  [[nodiscard]] ibv_qp* get() const noexcept { return pair_; }
  /// How a peer names it; `rail` counts the devices of its link.
  [[nodiscard]] queue_pair_offer offer(std::uint8_t rail = 0) const noexcept;
  [[nodiscard]] std::uint32_t inline_bytes() const noexcept { return inline_bytes_; }
  /// Requests that it holds at once.
  [[nodiscard]] std::uint32_t depth() const noexcept { return depth_; }
  /// Runs of local memory in one request.
  [[nodiscard]] std::uint32_t pieces() const noexcept { return pieces_; }

  /// Ready for `post_recv`; from any state, what was posted is lost.
  [[nodiscard]] result<void> reset(const rdma_options& options);
  struct far_end {
    rail_offer rail;
    queue_pair_offer pair;
    std::uint8_t outstanding_reads{1};
  };
  /// Ready to send and to be sent to. `peer_unreachable`: the device refuses the address (the
  /// sentence names it).
  [[nodiscard]] result<void> join(const far_end& peer, const rdma_options& options);
  /// From now on it takes and sends nothing; what it had completes as flushed.
  void stop() noexcept;
  /// Makes room for one immediate of the peer. `link_broken`: the device refused.
  [[nodiscard]] result<void> expect_notice(std::uint64_t work_id);

 private:
  explicit queue_pair(std::shared_ptr<device> on) : device_{std::move(on)} {}
  const std::shared_ptr<device> device_;
  ibv_qp* pair_{nullptr};
  std::uint32_t first_packet_{0};
  std::uint32_t inline_bytes_{0};
  std::uint32_t depth_{1};
  std::uint32_t pieces_{1};
};

/// How a peer reaches a device, as it is now.
[[nodiscard]] rail_offer offer_of(const device& on);

/// Reads that one of our queue pairs may have under way at the peer.
[[nodiscard]] std::uint8_t outstanding_reads(const device& on) noexcept;

/// What a completion that is not a success means, and its usual cause.
[[nodiscard]] troupe::error meaning_of(ibv_wc_status status, const rdma_options& options);

}  // namespace troupe::transport::rdma
