#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "troupe/kvcache/result.hpp"
#include "troupe/transport/rdma/queue_pair.hpp"
#include "troupe/transport/rdma/wire.hpp"

namespace troupe::transport::rdma {

/// How far this end is with what the peer sent; every message tells it (`message_header`).
struct message_counts {
  std::uint32_t taken{0};   ///< notices
  std::uint32_t landed{0};  ///< small batches
};

/// A message as it arrived: in one of the channel's buffers, until that is given back.
struct arrival {
  message_header header;
  std::span<const std::byte> payload;
};

/// The messages of a link: one queue pair, the buffers that they are sent from and received into, and
/// the credits that keep either side from sending what the other has no buffer for. Not thread-safe:
/// its link guards it.
class message_channel {
 public:
  static constexpr std::uint32_t buffers = 64;  ///< each way
  static constexpr std::uint32_t buffer_bytes = 4096;
  static constexpr std::uint32_t max_payload = buffer_bytes - sizeof(message_header);
  /// Messages that may wait for the peer's credits. (Of frames its link counts the bytes.)
  static constexpr std::size_t max_waiting = 65'536;

  [[nodiscard]] static result<std::unique_ptr<message_channel>> create(
      const std::shared_ptr<device>& on, completion_queue& completions);
  ~message_channel();
  message_channel(const message_channel&) = delete;
  message_channel& operator=(const message_channel&) = delete;

  [[nodiscard]] const queue_pair& pair() const noexcept { return *pair_; }
  /// (Re)starts: the queue pair joins the peer, all buffers are posted, nothing is on its way.
  [[nodiscard]] result<void> start(const queue_pair::far_end& peer, std::uint32_t credits,
                                   const rdma_options& options);

  /// Queues a message; `flush` sends it. `sequence` and `parts` are a notice's.
  void put(message_kind kind, std::span<const std::byte> payload, std::uint32_t sequence = 0,
           std::uint16_t parts = 0);
  /// Sends it at once where it is of one part and none waits; else it is queued.
  [[nodiscard]] result<void> send(message_kind kind, std::span<const std::byte> payload,
                                  const message_counts& counts);
  /// Queues the refusal of the peer's small batch number `landed`. No message that goes before it
  /// counts that one. False: so many wait that they cannot all have been sent.
  [[nodiscard]] bool put_refusal(std::span<const std::byte> why, std::uint32_t landed);
  /// Sends what credits and buffers permit; `counts` go with each. `link_broken`: more than
  /// `max_waiting` wait, or the device refused, and so does this from then on until `start`. What comes
  /// behind a message that did not go would be taken for that one.
  [[nodiscard]] result<void> flush(const message_counts& counts);
  /// A request of no bytes that completes only if the peer's NIC answers. False: no room, later.
  [[nodiscard]] result<bool> probe();
  /// The same, whether or not one is on its way: `probing` ends when the last is answered.
  [[nodiscard]] result<bool> probe_again() {
    probing_ = false;
    return probe();
  }
  /// How far the peer's count of what was taken here is behind `taken`.
  [[nodiscard]] std::uint32_t untold(std::uint32_t taken) const noexcept {
    return taken - told_.taken;
  }
  /// The peer's small batches that it has not heard of, when `landed` have their answer.
  [[nodiscard]] std::uint32_t unanswered(std::uint32_t landed) const noexcept {
    return landed - told_.landed;
  }
  [[nodiscard]] std::uint64_t waiting_bytes() const noexcept { return waiting_bytes_; }
  [[nodiscard]] bool any_waits() const noexcept { return !waiting_.empty(); }
  [[nodiscard]] bool idle() const noexcept { return waiting_.empty() && sent_ == completed_; }
  [[nodiscard]] bool probing() const noexcept { return probing_; }

  /// The send that `number` (of its `wr_id`) stands for and all before it are done.
  void sent_until(std::uint64_t number) noexcept;
  /// What lies in buffer `index`. `unauthorized`: not a message.
  [[nodiscard]] result<arrival> received(std::uint32_t index, std::uint32_t bytes) const;
  /// Takes the credits that a message brought. False: there cannot be so many.
  [[nodiscard]] bool take_credits(std::uint16_t credits, std::uint32_t most) noexcept {
    credits_ += credits;
    return credits_ <= most;
  }
  /// Posts buffers again, in one call; at most `buffers`.
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
  std::size_t waiting_words_{0};          ///< those that are neither frames nor notices
  std::uint64_t sent_{0}, completed_{0};  ///< requests
  std::uint32_t credits_{0};              ///< of ours at the peer
  std::uint32_t owed_{0};                 ///< of the peer's, not given back yet
  message_counts told_;                   ///< by the last message
  std::deque<std::uint32_t> refusals_;    ///< small batches whose refusals wait
  std::optional<troupe::error> refused_;  ///< by the device
  bool probing_{false};
  std::uint64_t probe_number_{0};
};

/// In a `wr_id`: whose completion it is.
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
