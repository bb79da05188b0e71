#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "troupe/kvcache/ids.hpp"
#include "troupe/kvcache/result.hpp"

namespace troupe::kvcache {

/// Proof of an allocation, never reused: a stale holder cannot free or pin blocks that now belong
/// to another owner.
using block_owner = strong_id<struct block_owner_tag, std::uint64_t>;
/// A place in the queue for blocks, never reused.
using waiter_id = strong_id<struct waiter_tag, std::uint64_t>;

/// Blocks that were allocated together. A plain value: dropping it frees nothing.
struct allocation {
  block_owner owner;
  std::vector<block_id> blocks;
};

/// The outcome of one `free` or `unpin` for its blocks.
struct release_count {
  std::uint32_t freed{0};        ///< back in the pool now
  std::uint32_t quarantined{0};  ///< free by protocol, still pinned
  std::uint32_t kept{0};         ///< still referenced by another holder, or (unpin) still owned
};

/// A waiter that has left the queue in `serve`: it has its blocks, or its deadline passed.
struct served_waiter {
  waiter_id waiter;
  result<allocation> outcome;  ///< or `deadline`
};

struct pool_counters {
  std::uint32_t total{0};
  std::uint32_t free{0};
  std::uint32_t allocated{0};  ///< total = free + allocated + quarantined
  std::uint32_t quarantined{0};
  std::uint32_t pinned{0};  ///< blocks with at least one pin, allocated or quarantined
  std::uint32_t waiters{0};
  std::uint64_t waited_blocks{0};  ///< wanted by all waiters together
  std::uint64_t allocations{0};    ///< since the start
  std::uint64_t refused{0};  ///< `pool_exhausted` answers and passed deadlines, since the start
};

/// Who has which block of a pool of `blocks` equal blocks. Bookkeeping only: it touches no memory.
///
/// | state       | event                        | next                                     |
/// | ----------- | ---------------------------- | ---------------------------------------- |
/// | free        | allocate, serve              | allocated, one reference, no pin         |
/// | allocated   | retain / free with more left | allocated, references +1 / -1            |
/// | allocated   | pin / unpin                  | allocated, pins +1 / -1                  |
/// | allocated   | last free, no pin            | free                                     |
/// | allocated   | last free, pinned            | quarantined                              |
/// | quarantined | pin / unpin with more left   | quarantined, pins +1 / -1                |
/// | quarantined | last unpin                   | free                                     |
///
/// Everything else (a block of another owner, a second free, an unpin without a pin) is an error
/// and changes nothing: a call either applies to all the blocks it names or to none. Costs depend
/// on the blocks named, not on the size of the pool. Not thread-safe; time comes in as an argument.
class block_pool {
 public:
  using time_point = std::chrono::steady_clock::time_point;

  explicit block_pool(std::uint32_t blocks, std::uint32_t max_waiters = 65'536);

  // -- allocation

  /// Allocates `count` blocks: one contiguous run if possible (the smallest that fits), else as few
  /// runs as the free list allows; ascending inside each run. 0 blocks is an empty allocation.
  /// `pool_exhausted` when too few are free, and also while others wait: nobody overtakes a waiter.
  [[nodiscard]] result<allocation> allocate(std::uint32_t count);
  /// Adds a holder of the same blocks (a shared prefix); each holder must `free`. `not_found` as
  /// for `free`.
  [[nodiscard]] result<void> retain(block_owner owner, std::span<const block_id> blocks);
  /// Gives up one reference to each block. A block whose last reference goes is free, or in
  /// quarantine while it is pinned. `out_of_range` (no such block), `not_found` (free, or another
  /// owner's: a double or stale free), naming the block. After this, call `serve`.
  [[nodiscard]] result<release_count> free(block_owner owner, std::span<const block_id> blocks);

  // -- pins: bytes may still move

  /// Holds blocks for a transfer: they are not reused before `unpin`, even if freed. Pins are
  /// counted. Only the owner of the blocks can pin, and no block in quarantine. Errors as for
  /// `free`.
  [[nodiscard]] result<void> pin(block_owner owner, std::span<const block_id> blocks);
  /// Call it once the transfer is quiescent. Frees the blocks that were in quarantine for it alone.
  /// `not_found` when a block has no pin left or belongs to another owner. After this, call
  /// `serve`.
  [[nodiscard]] result<release_count> unpin(block_owner owner, std::span<const block_id> blocks);

  // -- waiting

  /// Queues for `count` blocks until `deadline`. First come, first served, regardless of size. Call
  /// `serve` afterwards: the waiter may be served at once. `pool_exhausted` when the pool is
  /// smaller than that, `overloaded` when `max_waiters` wait already.
  [[nodiscard]] result<waiter_id> wait(std::uint32_t count, time_point deadline);
  /// Leaves the queue. `not_found` when it was served, expired or cancelled before. After this,
  /// call `serve`.
  [[nodiscard]] result<void> cancel(waiter_id waiter);
  /// Ends the waiters whose deadline is not after `now`, then serves from the front while blocks
  /// last.
  [[nodiscard]] std::vector<served_waiter> serve(time_point now);
  /// When `serve` has to be called next if nothing is freed before.
  [[nodiscard]] std::optional<time_point> next_deadline() const;

  // -- properties

  [[nodiscard]] pool_counters counters() const noexcept;
  /// Blocks of the longest contiguous free run.
  [[nodiscard]] std::uint32_t longest_free_run() const noexcept;

 private:
  enum class block_state : std::uint8_t { free, allocated, quarantined };
  struct block {
    block_owner owner;
    std::uint32_t references{0};
    std::uint32_t pins{0};
    block_state state{block_state::free};
  };
  struct waiter {
    std::uint32_t count{0};
    time_point deadline;
  };

  [[nodiscard]] bool is_owned(block_owner owner, block_id id) const noexcept;
  [[nodiscard]] result<void> owned(block_owner owner, block_id id, const char* verb) const;
  [[nodiscard]] allocation take(std::uint32_t count);
  void take_run(std::uint32_t start, std::uint32_t length, std::uint32_t count, allocation& into);
  void return_blocks(std::vector<std::uint32_t> ids) noexcept;
  void list_free_runs();
  void return_run(std::uint32_t start, std::uint32_t length);
  void leave_queue(std::map<waiter_id, waiter>::iterator at);
  [[nodiscard]] error exhausted(std::uint32_t count) const;

  std::vector<block> blocks_;
  std::map<std::uint32_t, std::uint32_t> free_runs_;                  // start -> length
  std::set<std::pair<std::uint32_t, std::uint32_t>> runs_by_length_;  // length, start
  bool unlisted_{false};  // the runs must be rebuilt: there was no memory to update them
  std::map<waiter_id, waiter> waiters_;  // in order of arrival
  std::set<std::pair<time_point, waiter_id>> deadlines_;
  std::uint32_t max_waiters_;
  std::uint64_t next_owner_{1};
  std::uint64_t next_waiter_{1};
  pool_counters counters_;
};

}  // namespace troupe::kvcache
