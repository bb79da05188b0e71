#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "troupe/kvcache/ids.hpp"
#include "troupe/kvcache/result.hpp"
#include "troupe/kvcache/segment.hpp"
#include "troupe/transport/backend.hpp"

namespace troupe::transport::rdma {

/// A small batch is a write of few bytes with a notice. Its bytes travel in the message of the
/// notice, and the target's link, not its NIC, puts them in place: after checking them against its
/// own grants, and before delivering the frame.
///
/// Why: a one-sided write and its notice are two requests on two queue pairs, and the target needs
/// both before it can go on. A write with immediate data would be one request, but carries only 32
/// bits, and a frame is any bytes. One SEND carries both, and copying a kilobyte costs either
/// processor less than a second request.
///
/// A small batch has between 1 and `max_small_bytes` bytes in all, in as many runs of remote memory
/// as fit beside them in one message, from and to memory that the processors reach
/// (`grant_key::host`). Everything else goes one-sided. It needs no keys to its grants, since no
/// NIC checks them.
///
/// Its bytes are copied when it is posted, even if it is sent later.
///
/// The target answers by count (`message_header::landed`) or with a `refused` message, at the
/// latest in its first polling round that finds nothing to do. The completion waits for that
/// answer: only the target knows whether the bytes landed. A small batch that was given up
/// unanswered may land later, until its target fences the transfer; the local memory is not read
/// again after posting.
///
/// Message layout: a `head`, the bytes of all runs, the runs, the frame.
inline constexpr std::uint32_t max_small_bytes = 1024;
/// The most unanswered small batches of an initiator.
inline constexpr std::size_t max_small_unanswered = 256;

/// One run of the target's memory, as laid out in the message.
struct small_run {
  std::uint64_t grant{0};
  std::uint64_t offset{0};  ///< in the grant's region
  std::uint32_t bytes{0};
  std::uint32_t unused{0};
};

/// A received small batch; a view of its message.
class small_batch {
 public:
  /// `unauthorized`: the lengths do not match the message.
  [[nodiscard]] static result<small_batch> decode(std::span<const std::byte> payload);

  [[nodiscard]] transfer_id transfer() const noexcept { return transfer_; }
  [[nodiscard]] std::size_t runs() const noexcept { return runs_.size() / sizeof(small_run); }
  [[nodiscard]] small_run run(std::size_t index) const noexcept;
  /// The bytes of all runs, concatenated; the size is the sum of the runs'.
  [[nodiscard]] std::span<const std::byte> bytes() const noexcept { return bytes_; }
  [[nodiscard]] std::span<const std::byte> frame() const noexcept { return frame_; }

 private:
  transfer_id transfer_;
  std::span<const std::byte> bytes_, runs_, frame_;
};

/// The number of bytes of the batch if its notice and its sizes allow it to go in a message of
/// `room` bytes, otherwise 0. Checks neither the kind of memory nor the segments.
[[nodiscard]] std::uint32_t small_bytes_of(const batch& work, std::size_t room) noexcept;

/// Writes the message of a small batch.
class small_writer {
 public:
  /// `bytes` is what `small_bytes_of` returned; `into` has at least the `room` passed to it.
  small_writer(std::uint32_t bytes, std::span<std::byte> into) noexcept;
  /// Adds the next piece: bytes from `local`, its region, to the peer's memory under `grant`.
  void add(std::span<const segment> segments, const std::byte* local, std::uint64_t grant) noexcept;
  /// Completes the message after all pieces. Returns it, a part of `into`.
  [[nodiscard]] std::span<const std::byte> end(transfer_id transfer,
                                               std::span<const std::byte> frame) noexcept;

 private:
  std::byte* const begin_;
  const std::uint32_t all_;
  std::uint32_t runs_{0};
  std::byte* bytes_;
  std::byte* run_at_;
};

/// A posted small batch that the peer has not answered yet.
struct small_flight {
  batch_id id;
  transfer_id transfer;
  std::uint32_t bytes{0};
  std::uint32_t segments{0};  ///< in all its pieces
  bool given_up{false};       ///< has its outcome already; only the answer is missing

  /// `why` it did not land; empty if it landed.
  [[nodiscard]] completion outcome(std::optional<troupe::error> why) const;
};

/// The payload of a `refused` message: why a small batch was refused.
[[nodiscard]] std::vector<std::byte> encode_refusal(const troupe::error& why);
/// `unauthorized`: the payload is not a refusal.
[[nodiscard]] result<troupe::error> decode_refusal(std::span<const std::byte> payload);

}  // namespace troupe::transport::rdma
