#include "troupe/transport/shm/copy.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace troupe::transport::shm {

namespace {

void copy_cached(std::span<const copy_run> runs) noexcept {
  for (const auto& run : runs) std::memcpy(run.to, run.from, run.length);
}

#if defined(__x86_64__)

constexpr std::size_t vector_bytes = 32;
/// One step of a streaming loop: what is loaded before it is stored.
constexpr std::size_t step = 4 * vector_bytes;
/// How far ahead of a long run the source is prefetched. Measured: 0 is 10% slower, 2 KiB no
/// faster.
constexpr std::size_t prefetch_ahead = 1024;
/// Runs below this are copied four at a time; above it the hardware prefetcher alone keeps up.
constexpr std::size_t short_run = std::size_t{16} << 10;
constexpr std::size_t interleaved = 4;
constexpr std::size_t line = 64;

__attribute__((target("avx2"), always_inline)) inline void stream_step(
    std::byte* to, const std::byte* from) noexcept {
  const auto* source = reinterpret_cast<const __m256i*>(from);
  auto* target = reinterpret_cast<__m256i*>(to);
  const __m256i a = _mm256_loadu_si256(source);
  const __m256i b = _mm256_loadu_si256(source + 1);
  const __m256i c = _mm256_loadu_si256(source + 2);
  const __m256i d = _mm256_loadu_si256(source + 3);
  _mm256_stream_si256(target, a);
  _mm256_stream_si256(target + 1, b);
  _mm256_stream_si256(target + 2, c);
  _mm256_stream_si256(target + 3, d);
}

/// Copies the bytes before the first line of the destination and returns the rest of the run.
copy_run align(copy_run run) noexcept {
  const auto misaligned = reinterpret_cast<std::uintptr_t>(run.to) % line;
  const std::size_t head = misaligned == 0 ? 0 : std::min(line - misaligned, run.length);
  if (head != 0) std::memcpy(run.to, run.from, head);
  return {run.to + head, run.from + head, run.length - head};
}

/// Streams an aligned run from `done` on; the tail that is no whole step is stored normally.
__attribute__((target("avx2"))) void stream_long(const copy_run& run, std::size_t done) noexcept {
  const std::size_t whole = run.length - run.length % step;
  std::size_t i = done;
  for (; i + prefetch_ahead + step <= whole; i += step) {
    _mm_prefetch(reinterpret_cast<const char*>(run.from) + i + prefetch_ahead, _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(run.from) + i + prefetch_ahead + line, _MM_HINT_T0);
    stream_step(run.to + i, run.from + i);
  }
  for (; i < whole; i += step) stream_step(run.to + i, run.from + i);
  if (i < run.length) std::memcpy(run.to + i, run.from + i, run.length - i);
}

/// Streams aligned short runs side by side as far as the shortest goes, then the rest of each.
__attribute__((target("avx2"))) void stream_short(
    const std::array<copy_run, interleaved>& runs) noexcept {
  std::size_t common = runs[0].length;
  for (const auto& run : runs) common = std::min(common, run.length);
  common -= common % (2 * step);
  for (std::size_t i = 0; i < common; i += 2 * step) {
    for (const auto& run : runs) {
      stream_step(run.to + i, run.from + i);
      stream_step(run.to + i + step, run.from + i + step);
    }
  }
  for (const auto& run : runs) stream_long(run, common);
}

void copy_streaming(std::span<const copy_run> runs) noexcept {
  std::array<copy_run, interleaved> group{};
  std::size_t grouped = 0;
  for (const auto& run : runs) {
    if (run.length < 2 * line) {
      std::memcpy(run.to, run.from, run.length);
      continue;
    }
    const copy_run aligned = align(run);
    if (aligned.length >= short_run) {
      stream_long(aligned, 0);
      continue;
    }
    group[grouped++] = aligned;
    if (grouped == interleaved) {
      stream_short(group);
      grouped = 0;
    }
  }
  for (std::size_t i = 0; i < grouped; ++i) stream_long(group[i], 0);
  _mm_sfence();
}

/// Reads one byte where neither the compiler nor a sanitizer has a say: the peer may write there
/// meanwhile.
inline void touch(const std::byte* at) noexcept {
  asm volatile("movb (%0), %%al" : : "r"(at) : "rax", "memory");
}

std::uint64_t time_load(const std::byte* at) noexcept {
  unsigned aux = 0;
  _mm_lfence();
  const std::uint64_t begin = __rdtsc();
  _mm_lfence();
  touch(at);
  const std::uint64_t end = __rdtscp(&aux);
  _mm_lfence();
  return end - begin;
}

/// Half way between a load that hits the nearest cache and one that goes to memory: above the
/// last-level cache's time and below memory's on every machine where the difference matters.
std::uint64_t calibrate() noexcept {
  constexpr std::size_t samples = 31;
  alignas(4096) static std::array<std::byte, samples * 4 * line> buffer{};
  std::array<std::uint64_t, samples> near{};
  std::array<std::uint64_t, samples> far{};
  for (std::size_t i = 0; i < samples; ++i) {
    const std::byte* at = &buffer[i * 4 * line];
    touch(at);
    near[i] = time_load(at);
    _mm_clflush(at);
    _mm_mfence();
    far[i] = time_load(at);
  }
  std::ranges::nth_element(near, near.begin() + samples / 2);
  std::ranges::nth_element(far, far.begin() + samples / 2);
  const std::uint64_t hit = near[samples / 2];
  const std::uint64_t miss = far[samples / 2];
  return miss > hit + 20 ? hit + (miss - hit) / 2 : 0;
}

bool streams() noexcept {
  static const bool has = __builtin_cpu_supports("avx2") != 0;
  return has;
}

#else

bool streams() noexcept {
  return false;
}
std::uint64_t calibrate() noexcept {
  return 0;
}
void copy_streaming(std::span<const copy_run> runs) noexcept {
  copy_cached(runs);
}

#endif

}  // namespace

copier::copier() noexcept {
  static const std::uint64_t threshold = streams() ? calibrate() : 0;
  cached_below_ = threshold;
}

bool copier::destinations_cached(std::span<const copy_run> runs) const noexcept {
#if defined(__x86_64__)
  if (cached_below_ == 0 || runs.empty()) return true;
  constexpr std::size_t samples = 5;
  std::size_t hits = 0;
  for (std::size_t i = 0; i < samples; ++i) {
    const auto& run = runs[i * runs.size() / samples];
    if (run.length == 0) {
      ++hits;
      continue;
    }
    // The first touch pays for the page walk; the second, of a line of the same page that no
    // adjacent-line prefetch of the first brings, tells where the data lies.
    const std::size_t at = (run.length - 1) / (samples + 1) * (i + 1);
    const auto page = reinterpret_cast<std::uintptr_t>(run.to + at) & ~std::uintptr_t{4095};
    const auto begin = std::max(page, reinterpret_cast<std::uintptr_t>(run.to));
    const auto end = std::min(page + 4096, reinterpret_cast<std::uintptr_t>(run.to + run.length));
    touch(reinterpret_cast<const std::byte*>(begin));
    const auto* probed = reinterpret_cast<const std::byte*>(begin + (end - begin) * 5 / 8);
    if (time_load(probed) < cached_below_) ++hits;
  }
  return hits > samples / 2;
#else
  (void)runs;
  return true;
#endif
}

copy_way copier::copy(std::span<const copy_run> runs) const noexcept {
  std::size_t total = 0;
  for (const auto& run : runs) total += run.length;
  const auto way = total < streaming_threshold || destinations_cached(runs) ? copy_way::cached
                                                                            : copy_way::streaming;
  copy(runs, way);
  return way;
}

void copier::copy(std::span<const copy_run> runs, copy_way way) const noexcept {
  if (way == copy_way::streaming && streams()) {
    copy_streaming(runs);
  } else {
    copy_cached(runs);
  }
}

std::string_view copier::streaming_kernel() const noexcept {
  return streams() ? "avx2" : "memcpy";
}

}  // namespace troupe::transport::shm
