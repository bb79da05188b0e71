#include "troupe/kvcache/segment.hpp"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <string>

namespace troupe {
namespace {

constexpr std::uint64_t no_end = std::numeric_limits<std::uint64_t>::max();

std::string describe(const extent& range) {
  std::string text =
      std::to_string(range.length) + " bytes at offset " + std::to_string(range.offset);
  if (range.count != 1) {
    text += ", " + std::to_string(range.count) + " times every " + std::to_string(range.stride);
  }
  return text;
}

extent local_side(const segment& s) noexcept {
  return {s.local_offset, s.length, s.local_stride, s.count};
}

extent remote_side(const segment& s) noexcept {
  return {s.remote_offset, s.length, s.remote_stride, s.count};
}

template <class Side>
result<void> check_all(std::span<const segment> segments, std::uint64_t size, Side side) {
  for (std::size_t i = 0; i < segments.size(); ++i) {
    if (auto checked = check_range(side(segments[i]), size); !checked) {
      return fail(checked.error().code,
                  "segment " + std::to_string(i) + ": " + checked.error().message);
    }
  }
  return {};
}

/// How many repetitions of `range`, from the first on, lie wholly inside `permitted`.
std::uint64_t covered_repetitions(const extent& range, const extent& permitted) noexcept {
  if (range.offset < permitted.offset || permitted.count == 0) return 0;
  const bool dense = permitted.count == 1 || permitted.stride <= permitted.length;
  std::uint64_t distance = range.offset - permitted.offset;
  std::uint64_t element = 0;
  std::uint64_t element_length = permitted.length;
  if (dense) {
    element_length += (permitted.count - 1) * permitted.stride;
  } else {
    element = distance / permitted.stride;
    if (element >= permitted.count) return 0;
    distance -= element * permitted.stride;
  }
  if (distance > element_length || range.length > element_length - distance) return 0;
  if (range.count == 1 || range.stride == 0) return range.count;
  if (!dense && range.stride % permitted.stride == 0) {
    const std::uint64_t step = range.stride / permitted.stride;
    return std::min<std::uint64_t>(range.count, (permitted.count - 1 - element) / step + 1);
  }
  const std::uint64_t room = element_length - distance - range.length;
  return std::min<std::uint64_t>(range.count, room / range.stride + 1);
}

/// Length of the run of bytes from `offset` on within the element of `permitted` that holds
/// `offset`.
std::uint64_t covered_from(std::uint64_t offset, const extent& permitted) noexcept {
  if (offset < permitted.offset || permitted.count == 0) return 0;
  std::uint64_t distance = offset - permitted.offset;
  if (permitted.count > 1 && permitted.stride > permitted.length) {
    const std::uint64_t element = distance / permitted.stride;
    if (element >= permitted.count) return 0;
    distance -= element * permitted.stride;
    return distance < permitted.length ? permitted.length - distance : 0;
  }
  const std::uint64_t whole = permitted.length + (permitted.count - 1) * permitted.stride;
  return distance < whole ? whole - distance : 0;
}

/// Whether one contiguous range is covered by several extents that touch each other.
bool covered_piecewise(extent range, std::span<const extent> permitted) noexcept {
  while (range.length > 0) {
    std::uint64_t best = 0;
    for (const auto& p : permitted) best = std::max(best, covered_from(range.offset, p));
    if (best == 0) return false;
    const std::uint64_t step = std::min(best, range.length);
    range.offset += step;
    range.length -= step;
  }
  return true;
}

/// The likely index of the extent that holds `offset`: extents are sorted by offset, and those of
/// one grant often repeat with one stride. A right guess saves the scan; a wrong guess costs
/// nothing else.
std::size_t likely_index(std::uint64_t offset, std::span<const extent> permitted) noexcept {
  const extent& first = permitted.front();
  if (first.count > 1 && first.stride > 0 && offset >= first.offset) {
    offset = first.offset + (offset - first.offset) % first.stride;
  }
  const auto after =
      std::upper_bound(permitted.begin(), permitted.end(), offset,
                       [](std::uint64_t value, const extent& e) { return value < e.offset; });
  return after == permitted.begin() ? 0 : static_cast<std::size_t>(after - permitted.begin() - 1);
}

bool joins(const segment& a, const segment& b) noexcept {
  return a.count == 1 && b.count == 1 && a.local_offset + a.length == b.local_offset &&
         a.remote_offset + a.length == b.remote_offset && a.length <= no_end - b.length;
}

/// Extends `a` by `b` if `b` continues where `a`'s repetitions end. Positive strides only, so that
/// no two repetitions overlap.
bool continues(segment& a, const segment& b) noexcept {
  if (a.length != b.length || b.local_offset <= a.local_offset ||
      b.remote_offset <= a.remote_offset) {
    return false;
  }
  if (std::uint64_t{a.count} + b.count > std::numeric_limits<std::uint32_t>::max()) return false;
  std::uint64_t local_stride = a.local_stride;
  std::uint64_t remote_stride = a.remote_stride;
  if (a.count == 1) {
    local_stride = b.count == 1 ? b.local_offset - a.local_offset : b.local_stride;
    remote_stride = b.count == 1 ? b.remote_offset - a.remote_offset : b.remote_stride;
  }
  if (b.count != 1 && (b.local_stride != local_stride || b.remote_stride != remote_stride)) {
    return false;
  }
  if (local_stride < a.length || remote_stride < a.length) return false;
  if (a.local_offset + a.count * local_stride != b.local_offset ||
      a.remote_offset + a.count * remote_stride != b.remote_offset) {
    return false;
  }
  a.local_stride = local_stride;
  a.remote_stride = remote_stride;
  a.count += b.count;
  return true;
}

segment normalised(segment s) noexcept {
  if (s.count > 1 && s.local_stride == s.length && s.remote_stride == s.length) {
    s.length *= s.count;
    s.count = 1;
  }
  if (s.count == 1) s.local_stride = s.remote_stride = 0;
  return s;
}

}  // namespace

std::uint64_t total_bytes(std::span<const segment> segments) noexcept {
  std::uint64_t sum = 0;
  for (const auto& s : segments) sum += s.length * s.count;
  return sum;
}

result<void> check_range(const extent& range, std::uint64_t size) {
  if (range.count == 0) {
    return fail(errc::out_of_range, describe(range) + " is empty; repeat it at least once");
  }
  bool fits = range.offset <= size && range.length <= size - range.offset;
  if (fits && range.count > 1) {
    if (range.stride == 0 || range.stride < range.length) {
      return fail(errc::out_of_range,
                  describe(range) + " overlaps itself; the stride must be at least the length");
    }
    const std::uint64_t room = size - range.offset - range.length;
    fits = (range.count - 1) <= room / range.stride;
  }
  if (!fits) {
    return fail(errc::out_of_range, describe(range) + " is not within the " + std::to_string(size) +
                                        " bytes there are");
  }
  return {};
}

result<void> check_local(std::span<const segment> segments, std::uint64_t size) {
  return check_all(segments, size, local_side);
}

result<void> check_remote(std::span<const segment> segments, std::uint64_t size) {
  return check_all(segments, size, remote_side);
}

bool covered(const extent& range, std::span<const extent> permitted) noexcept {
  if (permitted.empty()) return range.length == 0;
  if (!check_range(range, no_end)) return false;
  extent rest = range;
  while (rest.count > 0) {
    std::uint64_t done = covered_repetitions(rest, permitted[likely_index(rest.offset, permitted)]);
    for (std::size_t i = 0; i < permitted.size() && done == 0; ++i) {
      done = covered_repetitions(rest, permitted[i]);
    }
    if (done == 0) {
      if (!covered_piecewise({rest.offset, rest.length, 0, 1}, permitted)) return false;
      done = 1;
    }
    rest.offset += done * rest.stride;
    rest.count -= static_cast<std::uint32_t>(done);
  }
  return true;
}

std::vector<segment> merge_segments(std::vector<segment> segments) {
  std::size_t joined = 0;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const segment s = normalised(segments[i]);
    if (s.length == 0 || s.count == 0) continue;
    if (joined > 0 && joins(segments[joined - 1], s)) {
      segments[joined - 1].length += s.length;
    } else {
      segments[joined++] = s;
    }
  }
  std::size_t kept = 0;
  for (std::size_t i = 0; i < joined; ++i) {
    const segment s = segments[i];
    if (kept == 0 || !continues(segments[kept - 1], s)) segments[kept++] = s;
  }
  segments.resize(kept);
  return segments;
}

}  // namespace troupe
