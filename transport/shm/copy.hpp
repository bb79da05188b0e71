#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

/// Copies lists of runs between mapped memory, as fast as one core can.
///
/// A plain `memcpy` is fastest while the destination lies in a cache. When it does not, the usual
/// case for a KV pool much larger than any cache, two measures win: non-temporal stores save reading
/// the destination's lines before overwriting them (a third of all memory traffic), and runs are cut
/// into strips of a page that are copied eight at a time, so that their TLB and row misses overlap.
namespace troupe::transport::shm {

struct copy_run {
  std::byte* to;
  const std::byte* from;
  std::size_t length;
};

/// How a group of runs was copied, or is to be copied.
enum class copy_way : std::uint8_t {
  cached,     ///< memcpy
  streaming,  ///< non-temporal stores
};

class copier {
 public:
  /// Runs with fewer bytes in total are not worth probing the caches.
  static constexpr std::size_t streaming_threshold = std::size_t{64} << 10;

  /// Detects the CPU's features; calibrates the cache probe once per process (about 20 us).
  copier() noexcept;

  /// Copies every run; runs must not overlap each other's destinations. Chooses the way by probing
  /// whether a few lines of the destinations are in a cache. When it returns, every byte is ordered
  /// before later stores of this thread (streaming stores are fenced).
  copy_way copy(std::span<const copy_run> runs) const noexcept;
  /// Copies in the given way. `streaming` falls back to `cached` if the CPU has no such stores.
  void copy(std::span<const copy_run> runs, copy_way way) const noexcept;

  /// Whether most of the sampled destinations were recently written by this thread, or lie in a
  /// cache. Loads the sampled lines into the cache.
  [[nodiscard]] bool destinations_cached(std::span<const copy_run> runs) const noexcept;

 private:
  std::uint64_t cached_below_;  ///< time stamp ticks; 0: unknown, never stream
};

}  // namespace troupe::transport::shm
