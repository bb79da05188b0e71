#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include <sys/uio.h>

namespace troupe::transport::staging {

/// One side of a segment: `count` times `length` bytes, `stride` apart.
struct memory_run {
  std::byte* at{nullptr};
  std::uint64_t length{0};
  std::uint64_t stride{0};
  std::uint32_t count{1};
  std::uint32_t gpu{on_host};  ///< whose memory it is

  static constexpr std::uint32_t on_host = 0xffff'ffff;
};

[[nodiscard]] inline std::uint64_t bytes_of(std::span<const memory_run> runs) noexcept {
  std::uint64_t sum = 0;
  for (const auto& run : runs) sum += run.length * run.count;
  return sum;
}

/// Walks the bytes of runs in order. Runs are never empty (length and count at least 1).
class run_cursor {
 public:
  void reset() noexcept { *this = run_cursor{}; }

  /// Describes the next bytes, at most `max_bytes` of them in at most `out.size()` pieces, without
  /// moving on. Returns the number of pieces.
  [[nodiscard]] std::size_t peek(std::span<const memory_run> runs, std::span<iovec> out,
                                 std::size_t max_bytes) const noexcept {
    auto here = *this;
    std::size_t pieces = 0;
    while (pieces < out.size() && max_bytes > 0 && here.run_ < runs.size()) {
      const auto& run = runs[here.run_];
      const auto bytes = std::min<std::uint64_t>(run.length - here.offset_, max_bytes);
      out[pieces++] = {run.at + here.repetition_ * run.stride + here.offset_, bytes};
      max_bytes -= bytes;
      here.advance(runs, bytes);
    }
    return pieces;
  }

  void advance(std::span<const memory_run> runs, std::uint64_t bytes) noexcept {
    while (bytes > 0 && run_ < runs.size()) {
      const auto& run = runs[run_];
      const auto step = std::min(bytes, run.length - offset_);
      offset_ += step;
      bytes -= step;
      if (offset_ < run.length) return;
      offset_ = 0;
      if (++repetition_ < run.count) continue;
      repetition_ = 0;
      ++run_;
    }
  }

  [[nodiscard]] std::size_t run() const noexcept { return run_; }
  [[nodiscard]] std::uint32_t repetition() const noexcept { return repetition_; }
  [[nodiscard]] std::uint64_t offset() const noexcept { return offset_; }

 private:
  std::size_t run_{0};
  std::uint32_t repetition_{0};
  std::uint64_t offset_{0};
};

}  // namespace troupe::transport::staging
