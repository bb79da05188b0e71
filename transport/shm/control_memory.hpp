#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "troupe/kvcache/result.hpp"
#include "troupe/transport/owned_fd.hpp"
#include "troupe/transport/shm/ring.hpp"

/// The page (a sealed memfd, mapped by both ends) through which the two ends of a link communicate
/// without the kernel: session frames, grant slots, counters.
///
/// Trust. A peer's process runs under our uid and was given our memory on purpose: it can write
/// into granted regions whenever it wants, and the slots below make it *stop in time* only if it
/// follows their protocol. That covers every way in which an honest peer ends (killed, stopped,
/// slow, closed). A broken peer's writes into this page can at worst end its own link or misplace
/// its own transfers; they never make us read or write out of bounds. Use `tcp` for a peer that
/// must not be trusted that far.
namespace troupe::transport::shm {

/// One grant, as both ends see it.
///
/// The initiator enters before each chunk of a copy and leaves after it; the owner revokes by
/// clearing `id`. Both sides store their own word first and then read the other's, with sequential
/// consistency: either the owner sees the initiator inside, or the initiator sees that the grant is
/// gone.
struct alignas(64) grant_slot {
  std::atomic<std::uint64_t> id;    ///< of the grant; 0: none, or revoked. Written by the owner.
  std::atomic<std::uint32_t> busy;  ///< copies now inside. Written by the initiator.
};
static_assert(sizeof(grant_slot) == 64);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

inline constexpr std::uint32_t slots_per_direction = 8192;

/// Counters that the initiator of one direction keeps for the target's statistics.
struct alignas(64) direction_counters {
  std::atomic<std::uint64_t> bytes_written;
  std::atomic<std::uint64_t> bytes_read;
  std::atomic<std::uint64_t> refused;
};

/// The state of the direction in which one end is the initiator: its frames, the grants that it
/// uses, its counters.
struct direction_memory {
  ring_memory ring;
  direction_counters counters;
  grant_slot slots[slots_per_direction];
};

struct control_memory {
  direction_memory of_dialer;
  direction_memory of_acceptor;
};

/// A mapping of the control page. Unmapped with its owner. Not inherited by forked children.
class control_mapping {
 public:
  /// `pool_exhausted`.
  [[nodiscard]] static result<control_mapping> create();
  /// Maps the page that the peer created, after checking its size and seals. `unauthorized`,
  /// `pool_exhausted`.
  [[nodiscard]] static result<control_mapping> map(owned_fd fd);

  explicit operator bool() const noexcept { return memory_ != nullptr; }
  [[nodiscard]] control_memory* operator->() const noexcept { return memory_.get(); }
  [[nodiscard]] int fd() const noexcept { return fd_.get(); }
  /// Identifies the page at both ends while its descriptor is open; 0 afterwards.
  [[nodiscard]] std::uint64_t file_number() const noexcept;
  /// Closes the descriptor, which is not needed once the peer has it.
  void close_fd() noexcept { fd_.reset(); }

 private:
  struct unmap {
    void operator()(control_memory* mapped) const noexcept;
  };

  owned_fd fd_;
  std::unique_ptr<control_memory, unmap> memory_;
};

}  // namespace troupe::transport::shm
