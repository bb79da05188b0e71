#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "troupe/kvcache/result.hpp"
#include "troupe/transport/rdma/queue_pair.hpp"
#include "troupe/transport/rdma/wire.hpp"

namespace troupe::transport::rdma {

/// How much of the peer's traffic this end has handled; sent in every `message_header`.
struct message_counts {
  std::uint32_t taken{0};   ///< notices
  std::uint32_t landed{0};  ///< small batches
};

/// A received message. It lies in one of the channel's buffers until that is released.
struct arrival {
  message_header header;
  std::span<const std::byte> payload;
};

/// The message channel of a link: one queue pair, its send and receive buffers, and the credits
/// that keep either side from sending what the other has no buffer for. Not thread-safe: its link
/// guards it.
class message_channel {
 public:
  static constexpr std::uint32_t buffers = 64;  ///< each way
  static constexpr std::uint32_t buffer_bytes = 4096;
  static constexpr std::uint32_t max_payload = buffer_bytes - sizeof(message_header);
  /// The most messages that may wait for the peer's credits, besides frames and notices, whose
  /// bytes the link limits.
  static constexpr std::size_t max_waiting = 65'536;

  [[nodiscard]] static result<std::unique_ptr<message_channel>> create(
      const std::shared_ptr<device>& on, completion_queue& completions);
  ~message_channel();
  message_channel(const message_channel&) = delete;
  message_channel& operator=(const message_channel&) = delete;

  [[nodiscard]] const queue_pair& pair() const noexcept { return *pair_; }
  /// Starts or restarts: connects the queue pair to the peer, posts all buffers and forgets all
  /// messages queued or in flight.
  [[nodiscard]] result<void> start(const queue_pair::far_end& peer, std::uint32_t credits,
                                   const rdma_options& options);

  /// Queues a message; `flush` sends it. Only a notice has `sequence` and `parts`.
  void put(message_kind kind, std::span<const std::byte> payload, std::uint32_t sequence = 0,
           std::uint16_t parts = 0);
  /// Sends the message at once if it fits into one part and no other waits; otherwise queues it.
  [[nodiscard]] result<void> send(message_kind kind, std::span<const std::byte> payload,
                                  const message_counts& counts);
  /// Queues the refusal of the peer's small batch number `landed`. Messages sent before the refusal
  /// do not count that batch. Returns false if as many refusals wait as a peer may have batches
  /// unanswered.
  [[nodiscard]] bool put_refusal(std::span<const std::byte> why, std::uint32_t landed);
  /// Sends what credits and buffers permit; each message carries `counts`. `link_broken`: more than
  /// `max_waiting` wait, or the device refused a message. After a refusal every send fails until
  /// `start`: the peer would take the next message for the one that was not sent.
  [[nodiscard]] result<void> flush(const message_counts& counts);
  /// Posts an empty request that completes only if the peer's NIC answers. Returns false if there
  /// is no room for it yet.
  [[nodiscard]] result<bool> probe();
  /// Probes even if a probe is in flight; `probing` then ends when the last one is answered.
  [[nodiscard]] result<bool> probe_again() {
    probing_ = false;
    return probe();
  }
  /// How many of the `taken` notices the peer has not been told about.
  [[nodiscard]] std::uint32_t untold(std::uint32_t taken) const noexcept {
    return taken - told_.taken;
  }
  /// How many of the `landed` small batches the peer has not been told about.
  [[nodiscard]] std::uint32_t unanswered(std::uint32_t landed) const noexcept {
    return landed - told_.landed;
  }
  [[nodiscard]] std::uint64_t waiting_bytes() const noexcept { return waiting_bytes_; }
  [[nodiscard]] bool any_waits() const noexcept { return !waiting_.empty(); }
  [[nodiscard]] bool idle() const noexcept { return waiting_.empty() && sent_ == completed_; }
  [[nodiscard]] bool probing() const noexcept { return probing_; }

  /// Marks send `number` (from its `wr_id`) and all earlier sends as completed.
  void sent_until(std::uint64_t number) noexcept;
  /// The message in buffer `index`. `unauthorized`: it is not a message.
  [[nodiscard]] result<arrival> received(std::uint32_t index, std::uint32_t bytes) const;
  /// Adds the credits that a message brought. Returns false if they now exceed `most`.
  [[nodiscard]] bool take_credits(std::uint16_t credits, std::uint32_t most) noexcept {
    credits_ += credits;
    return credits_ <= most;
  }
  /// Posts receive buffers again in one call; at most `buffers`.
  [[nodiscard]] result<void> release(std::span<const std::uint32_t> indices);

 private:
  struct outgoing {
    message_header header;
    std::vector<std::byte> payload;
    std::size_t done{0};
  };
  struct unregister {
    void operator()(ibv_mr* registered) const noexcept { ::ibv_dereg_mr(registered); }
  };

  message_channel() = default;
  [[nodiscard]] std::byte* send_buffer(std::uint64_t number) const noexcept;
  [[nodiscard]] std::byte* receive_buffer(std::uint32_t index) const noexcept;
  [[nodiscard]] bool room() const noexcept { return sent_ - completed_ < buffers; }
  [[nodiscard]] result<void> send_part(message_header header, std::span<const std::byte> payload,
                                       const message_counts& counts, bool signalled);

  std::shared_ptr<device> device_;
  void* memory_{nullptr};
  std::unique_ptr<ibv_mr, unregister> registered_;
  std::unique_ptr<queue_pair> pair_;
  std::deque<outgoing> waiting_;
  std::uint64_t waiting_bytes_{0};
  std::size_t waiting_words_{0};          ///< messages that are neither frames nor notices
  std::uint64_t sent_{0}, completed_{0};  ///< requests
  std::uint32_t credits_{0};              ///< that this end may still use
  std::uint32_t owed_{0};                 ///< credits to give back to the peer
  message_counts told_;                   ///< the counts in the last message sent
  std::deque<std::uint32_t> refusals_;    ///< numbers of small batches whose refusals wait
  std::optional<troupe::error> refused_;  ///< set once the device refused a message
  bool probing_{false};
  std::uint64_t probe_number_{0};
};

/// What a completion is about, encoded in its `wr_id`.
enum class work_kind : std::uint8_t { data = 1, notice_receive, message_send, message_receive };
[[nodiscard]] constexpr std::uint64_t work_id(work_kind kind, std::uint8_t lane,
                                              std::uint64_t number) noexcept {
  return (static_cast<std::uint64_t>(kind) << 56) | (static_cast<std::uint64_t>(lane) << 48) |
         (number & 0xffff'ffff'ffffULL);
}
[[nodiscard]] constexpr work_kind kind_of(std::uint64_t id) noexcept {
  return static_cast<work_kind>(id >> 56);
}
[[nodiscard]] constexpr std::uint8_t lane_of(std::uint64_t id) noexcept {
  return static_cast<std::uint8_t>(id >> 48);
}
[[nodiscard]] constexpr std::uint64_t number_of(std::uint64_t id) noexcept {
  return id & 0xffff'ffff'ffffULL;
}

}  // namespace troupe::transport::rdma
