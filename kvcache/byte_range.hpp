#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace troupe {

/// The bytes [begin, end).
struct byte_range {
  std::uint64_t begin{0}, end{0};

  friend bool operator==(const byte_range&, const byte_range&) = default;
};

/// Sorts the ranges and merges those that touch or overlap.
inline void sort_and_join(std::vector<byte_range>& ranges) {
  if (ranges.empty()) return;
  std::ranges::sort(ranges, {}, &byte_range::begin);
  std::size_t kept = 0;
  for (std::size_t i = 1; i < ranges.size(); ++i) {
    if (ranges[i].begin <= ranges[kept].end) {
      ranges[kept].end = std::max(ranges[kept].end, ranges[i].end);
    } else {
      ranges[++kept] = ranges[i];
    }
  }
  ranges.resize(kept + 1);
}

}  // namespace troupe
