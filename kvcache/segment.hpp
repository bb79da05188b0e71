#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "troupe/kvcache/result.hpp"

namespace troupe {

/// A run of bytes to move between a local and a remote region, possibly repeated with a stride on
/// each side, so that a head slice of many tokens is one descriptor. All in bytes. Repetition `i`
/// (0 <= i < count) moves `length` bytes at `local_offset + i * local_stride` to or from
/// `remote_offset + i * remote_stride`. With `count == 1` the strides mean nothing and are 0.
struct segment {
  std::uint64_t local_offset{0};
  std::uint64_t remote_offset{0};
  std::uint64_t length{0};
  std::uint64_t local_stride{0};
  std::uint64_t remote_stride{0};
  std::uint32_t count{1};

  friend bool operator==(const segment&, const segment&) = default;
};

/// A range of one region that a grant permits, possibly repeated with a stride. All in bytes.
struct extent {
  std::uint64_t offset{0};
  std::uint64_t length{0};
  std::uint64_t stride{0};
  std::uint32_t count{1};

  friend bool operator==(const extent&, const extent&) = default;
};

/// Bytes that the segments move. Segments must have passed `check_segments` (else the sum may
/// wrap).
[[nodiscard]] std::uint64_t total_bytes(std::span<const segment> segments) noexcept;

/// Whether offset + length stays within `size` without wrapping, repetitions included. Else
/// `out_of_range`, with the numbers in the sentence; also for a count of 0 and for repetitions that
/// overlap (a stride shorter than the length).
[[nodiscard]] result<void> check_range(const extent& range, std::uint64_t size);
/// Checks the local side of every segment against `size`; the sentence names the segment's index.
[[nodiscard]] result<void> check_local(std::span<const segment> segments, std::uint64_t size);
/// Checks the remote side of every segment against `size`; the sentence names the segment's index.
[[nodiscard]] result<void> check_remote(std::span<const segment> segments, std::uint64_t size);

/// Whether every byte of `range` lies in one of the `permitted` extents.
[[nodiscard]] bool covered(const extent& range, std::span<const extent> permitted) noexcept;

/// Merges neighbours that are contiguous on both sides, and equally spaced segments of equal length
/// into one strided segment. Keeps the order and the covered bytes; never returns more segments
/// than it was given. Reuses the memory of its argument: a million segments are 48 MB, and fresh
/// memory costs more than the work.
[[nodiscard]] std::vector<segment> merge_segments(std::vector<segment> segments);

}  // namespace troupe
