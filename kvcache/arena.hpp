#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <utility>

#include "troupe/kvcache/result.hpp"

namespace troupe::kvcache {

/// Bytes [offset, offset + size) of an arena. `serial` is never reused, so a stale range cannot
/// free memory that was given out again.
struct arena_range {
  std::uint64_t offset{0};
  std::uint64_t size{0};
  std::uint64_t serial{0};

  friend bool operator==(const arena_range&, const arena_range&) = default;
};

struct arena_counters {
  std::uint64_t total{0};         ///< bytes
  std::uint64_t used{0};          ///< bytes in ranges; total = used + free
  std::uint64_t free{0};          ///< bytes
  std::uint64_t largest_free{0};  ///< bytes of the largest gap
  std::uint64_t ranges{0};
  std::uint64_t gaps{0};
};

/// Gives out ranges of `size` bytes from the smallest gap that fits, the lowest among equal gaps;
/// neighbouring gaps are merged as ranges come back. Bookkeeping only: it touches no memory. Not
/// thread-safe. All operations are logarithmic in the number of gaps, except that a search visits
/// each gap that is large enough but for the alignment.
class arena {
 public:
  explicit arena(std::uint64_t size);

  /// `size` bytes at a multiple of `alignment` (a power of two, counted from the arena's start).
  /// `invalid_config` (size 0, alignment not a power of two), `pool_exhausted` with what is free.
  [[nodiscard]] result<arena_range> allocate(std::uint64_t size, std::uint64_t alignment = 64);
  /// Gives a range back. `not_found` for a range that is free already, was given out again since,
  /// or was never given out in this form; the sentence says which. Nothing changes then.
  [[nodiscard]] result<void> free(const arena_range& range);

  [[nodiscard]] arena_counters counters() const noexcept;
  [[nodiscard]] std::uint64_t free_bytes() const noexcept { return size_ - used_bytes_; }

 private:
  using gap_map = std::map<std::uint64_t, std::uint64_t>;              // offset -> bytes
  using size_set = std::set<std::pair<std::uint64_t, std::uint64_t>>;  // bytes, offset
  struct held {
    std::uint64_t size{0};
    std::uint64_t serial{0};
    // Nodes of the gap that the range was cut from, reused for the gap that it leaves, so that
    // freeing a range allocates nothing.
    gap_map::node_type gap;
    size_set::node_type by_size;
  };

  void drop_gap(std::uint64_t offset, std::uint64_t size);
  void give_back(std::uint64_t offset, held range);

  gap_map gaps_;                        // no two touch
  size_set by_size_;                    // the same gaps
  std::map<std::uint64_t, held> held_;  // by offset
  std::uint64_t size_;
  std::uint64_t used_bytes_{0};
  std::uint64_t next_serial_{1};
};

}  // namespace troupe::kvcache
