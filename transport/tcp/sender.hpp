#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include <sys/uio.h>

#include "troupe/transport/kept_queue.hpp"
#include "troupe/transport/tcp/outgoing.hpp"
#include "troupe/transport/tcp/wire.hpp"

namespace troupe::transport::tcp {

/// The sending half of a lane: gathers control frames and the frames of many batches into as few
/// system calls as possible, straight from registered memory. Thread-safe: any thread may push and
/// flush; of several flushing at once, one does the work for all.
///
/// Order: control frames (acknowledgements, session frames) first, then writes and read replies in
/// turn, frame by frame; writes among themselves in the order they were pushed.
class lane_sender {
 public:
  /// `max_segments`: pieces of memory per system call.
  lane_sender(int fd, std::size_t max_segments, std::function<void(bool)> want_writable);
  lane_sender(const lane_sender&) = delete;
  lane_sender& operator=(const lane_sender&) = delete;

  /// Queues whole frames. Returns the bytes of control frames now waiting.
  std::size_t push_control(std::span<const std::byte> first,
                           std::span<const std::byte> second = {});
  void push_write(std::shared_ptr<outgoing> job);
  /// Queues a read request, sent once the peer has room for another one (`max_open_reads`).
  void push_read_request(std::shared_ptr<outgoing> job);
  /// Queues a read reply. Returns the number now waiting.
  std::size_t push_reply(std::shared_ptr<outgoing> job);
  /// The peer has answered one read request completely.
  void read_request_answered();
  /// The peer has cancelled the reads of this batch.
  void give_up_replies(std::uint64_t batch);

  /// Stops sending for good. Drops the queued jobs if any of them uses chunks, so the chunks are
  /// released.
  void stop();
  /// Whether jobs wait for chunks or for GPUs to fill them. If so, flush after a copy has ended.
  [[nodiscard]] bool waits_for_gpus() const noexcept {
    return staged_jobs_.load(std::memory_order_relaxed) > 0;
  }

  enum class outcome : std::uint8_t { idle, blocked, elsewhere, failed };
  /// What one `flush` sends before it stops as if the socket were full, so that a peer that reads as
  /// fast as we send does not hold the thread, and with it all other links. At most one system call
  /// more. Less may cost throughput: who posts a batch then leaves its end to another thread.
  static constexpr std::size_t flush_budget = std::size_t{32} << 20;
  /// Sends as much as the socket accepts and the budget permits. `blocked`: go on when the socket
  /// is writable. `elsewhere`: another thread does it. `failed`: see `last_errno`.
  outcome flush();
  [[nodiscard]] int last_errno() const noexcept { return errno_.load(std::memory_order_acquire); }

  [[nodiscard]] std::size_t control_bytes() const noexcept {
    return control_bytes_.load(std::memory_order_relaxed);
  }
  /// Payload bytes waiting or being sent; chooses the lane for a small batch.
  [[nodiscard]] std::uint64_t queued_bytes() const noexcept {
    return queued_bytes_.load(std::memory_order_relaxed);
  }
  [[nodiscard]] bool blocked() const noexcept { return blocked_.load(std::memory_order_relaxed); }
  [[nodiscard]] std::uint64_t payload_sent() const noexcept {
    return payload_sent_.load(std::memory_order_relaxed);
  }

 private:
  // Memory of one job within the burst, pinned while it is sent.
  struct guarded_span {
    std::size_t first_iov;
    std::size_t last_iov;
    std::byte* trailer;
    std::shared_ptr<outgoing> job;
    bool withdrawn{false};
  };

  outcome drain(std::size_t& budget);
  bool build();
  void take_jobs();
  void stage_ahead();
  void forget_jobs();
  void drop(std::shared_ptr<outgoing>& job);
  void add_frames(std::shared_ptr<outgoing>& job);
  void add_end(outgoing& job);
  void add_withdrawn(const outgoing& job);
  void add_refusal(const outgoing& job, const troupe::error& why);
  void add_write_frame(const std::shared_ptr<outgoing>& job);
  void add_read_frame(const std::shared_ptr<outgoing>& job);
  /// Writes the header of a frame whose data begin at `first_iov`, and adds its trailer.
  void end_data_frame(const frame_header& header, std::byte* head, std::size_t first_iov,
                      const std::shared_ptr<outgoing>& job);
  bool add_request_frame(outgoing& job);
  [[nodiscard]] wire_entry next_entry(const outgoing& job, std::size_t room,
                                      std::size_t pieces) const;
  void add_payload(outgoing& job, const wire_entry& entry, std::size_t first_iov);
  void add_from_chunk(outgoing& job, std::size_t bytes, std::size_t first_iov);
  void add_staged(const std::byte* at, std::size_t size);
  [[nodiscard]] std::byte* stage(std::size_t size) noexcept;
  [[nodiscard]] bool room_for_frame() const noexcept;
  [[nodiscard]] bool finished(const outgoing& job) const noexcept;
  long send_once();
  void pin_spans();
  void unpin_spans();
  void sent(std::size_t bytes);
  void reset_burst();
  void set_blocked(bool blocked);

  static constexpr std::size_t max_iov = 1024;  ///< limit of one system call
  static constexpr std::size_t staging_size = 32 * 1024;
  static constexpr std::size_t burst_bytes = std::size_t{2} << 20;

  const int fd_;
  const std::size_t max_segments_;
  const std::function<void(bool)> want_writable_;

  std::mutex mutex_;  // guards the queues
  std::vector<std::byte> control_;
  kept_queue<std::shared_ptr<outgoing>> writes_;
  kept_queue<std::shared_ptr<outgoing>> requests_;
  kept_queue<std::shared_ptr<outgoing>> replies_;
  std::uint32_t open_reads_{0};
  std::atomic<bool> pushed_{false};  ///< a queue is not empty; written under the lock

  std::atomic<std::uint32_t> flushers_{0};
  std::atomic<int> errno_{0};
  std::atomic<std::size_t> control_bytes_{0};
  std::atomic<std::uint64_t> queued_bytes_{0};
  std::atomic<std::uint64_t> payload_sent_{0};
  std::atomic<bool> blocked_{false};
  std::atomic<std::uint32_t> staged_jobs_{0};  ///< in a queue or being sent

  // The current burst, used only by the flushing thread.
  std::vector<std::byte> burst_control_;
  std::vector<std::byte> staging_;
  std::size_t staged_{0};
  std::vector<iovec> iov_;
  std::size_t next_iov_{0};
  std::size_t segments_{0};
  std::size_t burst_size_{0};
  std::vector<guarded_span> spans_;
  std::vector<std::shared_ptr<outgoing>> kept_;  ///< jobs whose session bytes the burst refers to
  std::vector<std::shared_ptr<staging::staged_copy>> kept_copies_;  ///< copies whose chunks it uses
  std::vector<std::shared_ptr<outgoing>> ahead_;                    ///< jobs to stage, in order
  std::vector<revocable*> pinned_;
  std::shared_ptr<outgoing> current_write_;
  std::shared_ptr<outgoing> current_reply_;
  bool reply_turn_{false};
};

}  // namespace troupe::transport::tcp
