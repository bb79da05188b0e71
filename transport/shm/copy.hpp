#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

/// Copies lists of runs between mapped memory, as fast as one core can.
///
/// A plain `memcpy` is the best there is while the destination lies in a cache. When it does not,
/// which is the usual case of a KV pool much larger than any cache, two other ways win:
/// non-temporal stores save reading the destination's lines before overwriting them (a third of all
/// memory traffic), and runs shorter than a few pages are copied four at a time, so that their TLB
/// and row misses overlap.
namespace troupe::transport::shm {

struct copy_run {
  std::byte* to;
  const std::byte* from;
  std::size_t length;
};

/// How one group of runs was, or is to be, copied.
enum class copy_way : std::uint8_t {
  cached,     ///< memcpy
  streaming,  ///< non-temporal stores
};

class copier {
 public:
  /// What runs below this sum are never worth asking the caches about.
  static constexpr std::size_t streaming_threshold = std::size_t{64} << 10;

  /// Looks at the processor; calibrates the cache probe once per process (about 20 us).
  copier() noexcept;

  /// Copies every run; runs must not overlap each other's destinations. Chooses the way by asking
  /// whether a few lines of the destinations are in a cache. When it returns, every byte is ordered
  /// before later stores of this thread (streaming stores are fenced).
  copy_way copy(std::span<const copy_run> runs) const noexcept;
  /// The same, with the way chosen by the caller. `streaming` falls back to `cached` where the
  /// processor has no such stores.
  void copy(std::span<const copy_run> runs, copy_way way) const noexcept;

  /// Whether most of the sampled destinations were written lately by this thread, or lie in a
  /// cache. Brings the sampled lines there.
  [[nodiscard]] bool destinations_cached(std::span<const copy_run> runs) const noexcept;

 private:
  std::uint64_t cached_below_;  ///< time stamp ticks; 0: nothing is known, never stream
};

}  // namespace troupe::transport::shm
