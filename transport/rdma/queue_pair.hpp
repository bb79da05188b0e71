#pragma once

#include <cstdint>
#include <memory>

#include <infiniband/verbs.h>

#include "troupe/kvcache/result.hpp"
#include "troupe/transport/rdma/device.hpp"
#include "troupe/transport/rdma/wire.hpp"

namespace troupe::transport::rdma {

/// The owner of a queue, as chosen by its creator; 0 for none. Readable without a lock while the
/// queue exists.
using queue_owner = std::uint64_t;
[[nodiscard]] queue_owner owner_of(const ibv_cq& queue) noexcept;
[[nodiscard]] queue_owner owner_of(const ibv_qp& pair) noexcept;

/// A completion queue of a device, with a descriptor that wakes a sleeping thread.
class completion_queue {
 public:
  /// `overloaded`: the device has no more queues, or none of this length.
  [[nodiscard]] static result<std::unique_ptr<completion_queue>> create(std::shared_ptr<device> on,
                                                                        std::uint32_t entries,
                                                                        queue_owner owner = 0);
  completion_queue(const completion_queue&) = delete;
  completion_queue& operator=(const completion_queue&) = delete;
  ~completion_queue();

  [[nodiscard]] ibv_cq* get() const noexcept { return queue_; }
  [[nodiscard]] int fd() const noexcept { return channel_->fd; }
  /// Makes the descriptor readable on the next completion.
  void arm() noexcept { ::ibv_req_notify_cq(queue_, 0); }
  /// Consumes the event after the descriptor became readable.
  void take_event() noexcept;

 private:
  explicit completion_queue(std::shared_ptr<device> on) : device_{std::move(on)} {}
  const std::shared_ptr<device> device_;
  ibv_comp_channel* channel_{nullptr};
  ibv_cq* queue_{nullptr};
};

/// Lengths of a pair's queues and limits of its requests.
struct queue_lengths {
  std::uint32_t sends{0};
  std::uint32_t receives{0};
  std::uint32_t pieces{1};        ///< runs of local memory in one request
  std::uint32_t inline_bytes{0};  ///< carried in a request itself; the device may allow fewer
};

/// One reliable connection, with the same owner as its completion queue. Not thread-safe. Once it
/// is destroyed, neither its own requests nor the peer's requests on it touch memory.
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
  /// The offer by which a peer names it; `rail` is the index of its device in the link.
  [[nodiscard]] queue_pair_offer offer(std::uint8_t rail = 0) const noexcept;
  [[nodiscard]] std::uint32_t inline_bytes() const noexcept { return inline_bytes_; }
  /// The most requests in its send queue.
  [[nodiscard]] std::uint32_t depth() const noexcept { return depth_; }
  /// The most runs of local memory in one request.
  [[nodiscard]] std::uint32_t pieces() const noexcept { return pieces_; }

  /// Makes it ready for `post_recv`, from any state. Everything posted before is lost.
  [[nodiscard]] result<void> reset(const rdma_options& options);
  struct far_end {
    rail_offer rail;
    queue_pair_offer pair;
    std::uint8_t outstanding_reads{1};
  };
  /// Connects it to the peer, ready to send and receive. `peer_unreachable`: the device refuses the
  /// address (the sentence names it).
  [[nodiscard]] result<void> join(const far_end& peer, const rdma_options& options);
  /// Stops sending and receiving; pending requests complete as flushed.
  void stop() noexcept;
  /// Posts a receive for one immediate of the peer. `link_broken`: the device refused.
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

/// How a peer currently reaches a device.
[[nodiscard]] rail_offer offer_of(const device& on);

/// The most reads that one of our queue pairs may have outstanding at the peer.
[[nodiscard]] std::uint8_t outstanding_reads(const device& on) noexcept;

/// The error that a failed completion stands for, and its usual cause.
[[nodiscard]] troupe::error meaning_of(ibv_wc_status status, const rdma_options& options);

}  // namespace troupe::transport::rdma
