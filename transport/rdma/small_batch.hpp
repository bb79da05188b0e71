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

/// A write of few bytes whose target is to be told goes whole in the message of its notice, and the
/// target's link, not its NIC, puts the bytes where they belong: after it has checked them against its
/// own grants, and before it delivers the frame.
///
/// Why. A one-sided write and its notice are two requests on two queue pairs, and the target needs both
/// before it can go on. A write with immediate data would be one, but carries 32 bits, and a frame is
/// any bytes: it fits only frames that the target knows already. One SEND carries both, and a copy of
/// a kilobyte costs either processor less than a second request.
///
/// What it may be: between 1 and `max_small_bytes` bytes in all, in as many runs of remote memory as fit
/// beside them in one message, from and to memory that the processors reach (`grant_key::host`).
/// Everything else goes one-sided. It needs no keys to its grants: no NIC asks for them.
///
/// Its bytes are read when it is posted, also if it must wait until it is sent.
///
/// It is answered by count (`message_header::landed`), or by a `refused` message. Its completion waits
/// for that answer, which goes out in the target's first round that finds nothing to do: only the
/// target knows whether the bytes landed. One that was given up unanswered may land later, until its
/// target fences the transfer: the local memory was left when it was posted.
///
/// In a message: a `head`, the bytes of all runs, the runs, the frame.
inline constexpr std::uint32_t max_small_bytes = 1024;
/// Small batches that an initiator has under way unanswered, at most.
inline constexpr std::size_t max_small_unanswered = 256;

/// Bytes of one run of memory of the target, as they lie in the message.
struct small_run {
  std::uint64_t grant{0};
  std::uint64_t offset{0};  ///< of the grant's region
  std::uint32_t bytes{0};
  std::uint32_t unused{0};
};

/// A small batch as it arrived; a view of the message.
class small_batch {
 public:
  /// `unauthorized`: lengths that are not those of the message.
  [[nodiscard]] static result<small_batch> decode(std::span<const std::byte> payload);

  [[nodiscard]] transfer_id transfer() const noexcept { return transfer_; }
  [[nodiscard]] std::size_t runs() const noexcept { return runs_.size() / sizeof(small_run); }
  [[nodiscard]] small_run run(std::size_t index) const noexcept;
  /// Those of all runs, one after the other: as many as the runs say together.
  [[nodiscard]] std::span<const std::byte> bytes() const noexcept { return bytes_; }
  [[nodiscard]] std::span<const std::byte> frame() const noexcept { return frame_; }

 private:
  transfer_id transfer_;
  std::span<const std::byte> bytes_, runs_, frame_;
};

/// How many bytes the batch moves, if by its notice and its sizes it may go in a message of `room` bytes;
/// else 0. Of whose memory they are it does not ask, nor whether its segments are right.
[[nodiscard]] std::uint32_t small_bytes_of(const batch& work, std::size_t room) noexcept;

/// Writes the message of a batch of so many `small_bytes_of`.
class small_writer {
 public:
  /// `into`: at least the room that was asked for.
  small_writer(std::uint32_t bytes, std::span<std::byte> into) noexcept;
  /// The next piece's bytes from `local`, its region, to the peer's memory under `grant`.
  void add(std::span<const segment> segments, const std::byte* local, std::uint64_t grant) noexcept;
  /// After all pieces: the whole message, a part of `into`.
  [[nodiscard]] std::span<const std::byte> end(transfer_id transfer,
                                               std::span<const std::byte> frame) noexcept;

 private:
  std::byte* const begin_;
  const std::uint32_t all_;
  std::uint32_t runs_{0};
  std::byte* bytes_;
  std::byte* run_at_;
};

/// One that was posted and has no outcome yet.
struct small_flight {
  batch_id id;
  transfer_id transfer;
  std::uint32_t bytes{0};
  std::uint32_t segments{0};  ///< of all its pieces
  bool given_up{false};       ///< it has its outcome, and only its answer is still to come

  /// `why` it did not land, if it did not.
  [[nodiscard]] completion outcome(std::optional<troupe::error> why) const;
};

/// Why a small batch was refused, as `refused` carries it.
[[nodiscard]] std::vector<std::byte> encode_refusal(const troupe::error& why);
/// `unauthorized`: not a refusal.
[[nodiscard]] result<troupe::error> decode_refusal(std::span<const std::byte> payload);

}  // namespace troupe::transport::rdma
