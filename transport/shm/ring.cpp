#include "troupe/transport/shm/ring.hpp"

#include <algorithm>
#include <cstring>
#include <string>

namespace troupe::transport::shm {

namespace {

constexpr std::uint64_t lap_of(std::uint64_t position) noexcept {
  return (position / ring_cells + 1) & 0xffff'ffffu;
}

constexpr std::uint64_t header_of(std::uint64_t position, std::size_t bytes, bool more) noexcept {
  return lap_of(position) << 32 | static_cast<std::uint64_t>(bytes) << 1 | (more ? 1u : 0u);
}

}  // namespace

// -- producer

result<bool> ring_producer::have_room(std::size_t cells) {
  if (put_ + cells - known_taken_ <= ring_cells) return true;
  const std::uint64_t taken = shared_->words.taken.load(std::memory_order_acquire);
  if (taken < known_taken_ || taken > put_) {
    return fail(errc::link_broken, "the peer's read position in the frame ring is " +
                                       std::to_string(taken) + ", expected " +
                                       std::to_string(known_taken_) + " to " +
                                       std::to_string(put_) + "; the shared page was overwritten");
  }
  known_taken_ = taken;
  return put_ + cells - known_taken_ <= ring_cells;
}

void ring_producer::put_record(std::span<const std::byte> payload, bool more) noexcept {
  const std::size_t cells = record_cells(payload.size());
  for (std::size_t i = 0; i < cells; ++i) {
    const auto part = payload.subspan(std::min(i * cell_payload, payload.size()));
    const std::size_t bytes = std::min(part.size(), cell_payload);
    if (bytes != 0) {
      std::memcpy(shared_->cells[(put_ + i) % ring_cells].payload, part.data(), bytes);
    }
  }
  order_.before_store();
  shared_->cells[put_ % ring_cells].header.store(header_of(put_, payload.size(), more),
                                                 std::memory_order_release);
  put_ += cells;
}

result<bool> ring_producer::push(std::span<const std::byte> frame) {
  const std::size_t cells = cells_of(frame.size());
  if (cells > ring_cells) return false;
  auto room = have_room(cells);
  if (!room || !*room) return room;
  while (frame.size() > max_record) {
    put_record(frame.first(max_record), true);
    frame = frame.subspan(max_record);
  }
  put_record(frame, false);
  return true;
}

result<std::size_t> ring_producer::push_part(std::span<const std::byte> frame, std::size_t done) {
  while (done < frame.size()) {
    const std::size_t bytes = std::min(max_record, frame.size() - done);
    auto room = have_room(record_cells(bytes));
    if (!room) return fail(std::move(room).error());
    if (!*room) break;
    put_record(frame.subspan(done, bytes), done + bytes < frame.size());
    done += bytes;
  }
  return done;
}

bool ring_producer::wait_for_room() noexcept {
  auto& words = shared_->words;
  words.producer_waits.store(1, std::memory_order_seq_cst);
  return words.taken.load(std::memory_order_seq_cst) != known_taken_;
}

bool ring_producer::must_wake_consumer() noexcept {
  auto& sleeps = shared_->words.consumer_sleeps;
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return sleeps.load(std::memory_order_relaxed) != 0 &&
         sleeps.exchange(0, std::memory_order_relaxed) != 0;
}

// -- consumer

bool ring_consumer::ready() const noexcept {
  const auto taken = taken_.load(std::memory_order_relaxed);
  return shared_->cells[taken % ring_cells].header.load(std::memory_order_acquire) >> 32 ==
         lap_of(taken);
}

result<bool> ring_consumer::pop(std::vector<std::byte>& frame) {
  while (true) {
    const auto taken = taken_.load(std::memory_order_relaxed);
    const std::uint64_t header =
        shared_->cells[taken % ring_cells].header.load(std::memory_order_acquire);
    if (header >> 32 != lap_of(taken)) return false;
    order_.after_load();
    const std::size_t bytes = (header & 0xffff'ffffu) >> 1;
    const bool more = (header & 1u) != 0;
    if (bytes > max_record || (more && bytes == 0) || partial_.size() + bytes > max_ring_frame) {
      return fail(errc::link_broken, "the peer announced " + std::to_string(bytes) +
                                         " bytes after " + std::to_string(partial_.size()) +
                                         " in one frame, at most " + std::to_string(max_record) +
                                         " a part and " + std::to_string(max_ring_frame) +
                                         " a frame are possible; the shared page was overwritten");
    }
    const std::size_t before = partial_.size();
    partial_.resize(before + bytes);
    const std::size_t cells = record_cells(bytes);
    for (std::size_t i = 0; i * cell_payload < bytes; ++i) {
      std::memcpy(partial_.data() + before + i * cell_payload,
                  shared_->cells[(taken + i) % ring_cells].payload,
                  std::min(cell_payload, bytes - i * cell_payload));
    }
    taken_.store(taken + cells, std::memory_order_relaxed);
    shared_->words.taken.store(taken + cells, std::memory_order_release);
    if (!more) {
      frame.swap(partial_);
      partial_.clear();
      return true;
    }
  }
}

bool ring_consumer::prepare_sleep() noexcept {
  shared_->words.consumer_sleeps.store(1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (!ready()) return true;
  shared_->words.consumer_sleeps.store(0, std::memory_order_relaxed);
  return false;
}

bool ring_consumer::must_wake_producer() noexcept {
  auto& waits = shared_->words.producer_waits;
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return waits.load(std::memory_order_relaxed) != 0 &&
         waits.exchange(0, std::memory_order_relaxed) != 0;
}

}  // namespace troupe::transport::shm
