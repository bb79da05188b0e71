#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "troupe/kvcache/result.hpp"
#include "troupe/transport/shm/thread_order.hpp"

/// A ring of session frames in memory that two processes share: one producer, one consumer.
///
/// The ring is an array of cells of one cache line each. A record (a frame, or a part of a long
/// one) fills one cell or more. The first cell's header holds its length and is stored last, so a
/// consumer that polls it sees the header and a short payload in one cache miss. The header's place
/// in a cell never holds payload, and the header carries the lap number, so a leftover can never be
/// taken for a new record.
///
/// The peer may write anything here at any time. Our own positions are kept in private memory; a
/// value read from the shared page is copied once, then checked, then used. A value that fails its
/// check ends the link.
namespace troupe::transport::shm {

/// Bytes of a cell that carry payload.
inline constexpr std::size_t cell_payload = 56;

struct alignas(64) ring_cell {
  /// Bits 63..32: lap (position / cells + 1). Bits 31..1: payload bytes of the record. Bit 0: more
  /// parts follow.
  std::atomic<std::uint64_t> header;
  std::byte payload[cell_payload];
};
static_assert(sizeof(ring_cell) == 64);

/// The control words of a ring, each on a cache line of its own.
struct ring_words {
  /// Cells taken out by the consumer so far; written by the consumer only.
  alignas(64) std::atomic<std::uint64_t> taken;
  /// Non-zero if the consumer sleeps, or is about to, and wants its eventfd rung; written by both.
  alignas(64) std::atomic<std::uint32_t> consumer_sleeps;
  /// Non-zero if the producer has frames queued that did not fit, and wants to be rung when there
  /// is room.
  alignas(64) std::atomic<std::uint32_t> producer_waits;
};

inline constexpr std::size_t ring_cells = 4096;
/// Parts of a frame are at most this long, so that a long frame never needs the whole ring at once.
inline constexpr std::size_t max_record = 16 * 1024;
/// A frame longer than this ends the link; the same number as `link::max_frame`.
inline constexpr std::size_t max_ring_frame = std::size_t{1} << 20;

struct ring_memory {
  ring_words words;
  ring_cell cells[ring_cells];
};

/// The sending end. Not thread-safe.
class ring_producer {
 public:
  explicit ring_producer(ring_memory& shared, thread_order order = {0, 0}) noexcept
      : shared_{&shared}, order_{order} {}

  /// Puts a whole frame into the ring, or nothing. Returns false if there is no room now.
  /// `link_broken`: the peer wrote nonsense. A frame needs at most `cells_of(frame.size())` cells;
  /// use `push_part` if that is more than the ring has.
  [[nodiscard]] result<bool> push(std::span<const std::byte> frame);
  /// Puts in as many whole parts of `frame`, from byte `done` on, as fit. Returns the new `done`;
  /// the frame is complete when that is `frame.size()` (an empty frame: use `push`).
  [[nodiscard]] result<std::size_t> push_part(std::span<const std::byte> frame, std::size_t done);

  /// Announces that frames wait for room, and looks once more. Returns true if there is room now:
  /// try again.
  [[nodiscard]] bool wait_for_room() noexcept;
  /// Whether the consumer must be rung after a push. A full fence: call once per batch of pushes.
  [[nodiscard]] bool must_wake_consumer() noexcept;

 private:
  [[nodiscard]] result<bool> have_room(std::size_t cells);
  void put_record(std::span<const std::byte> payload, bool more) noexcept;

  ring_memory* shared_;
  thread_order order_;
  std::uint64_t put_{0};          ///< cells filled so far
  std::uint64_t known_taken_{0};  ///< the last valid value of the consumer's word
};

/// The receiving end. Not thread-safe, except `ready`, which any thread may call beside the one
/// that takes frames; its answer is then only a hint.
class ring_consumer {
 public:
  explicit ring_consumer(ring_memory& shared, thread_order order = {0, 0}) noexcept
      : shared_{&shared}, order_{order} {}

  /// Whether a record is there. One load.
  [[nodiscard]] bool ready() const noexcept;
  /// Moves the next whole frame into `frame`, replacing its contents. Returns false if no frame is
  /// complete. `link_broken`: the peer wrote nonsense.
  [[nodiscard]] result<bool> pop(std::vector<std::byte>& frame);

  /// Announces that this end is about to sleep, and looks once more. Returns false if a record
  /// came: do not sleep.
  [[nodiscard]] bool prepare_sleep() noexcept;
  /// Whether the producer asked to be rung when there is room; clears the request.
  [[nodiscard]] bool must_wake_producer() noexcept;

 private:
  ring_memory* shared_;
  thread_order order_;
  std::atomic<std::uint64_t> taken_{0};
  std::vector<std::byte> partial_;  ///< parts of a frame whose last part has not arrived yet
};

/// Cells that a record of this size takes.
[[nodiscard]] constexpr std::size_t record_cells(std::size_t bytes) noexcept {
  return bytes == 0 ? 1 : (bytes + cell_payload - 1) / cell_payload;
}
/// Cells that a frame of this size takes, each part rounded up by itself.
[[nodiscard]] constexpr std::size_t cells_of(std::size_t bytes) noexcept {
  const std::size_t whole = bytes / max_record;
  const std::size_t rest = bytes % max_record;
  return whole * record_cells(max_record) + (rest != 0 || whole == 0 ? record_cells(rest) : 0);
}

}  // namespace troupe::transport::shm
