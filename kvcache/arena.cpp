#include "troupe/kvcache/arena.hpp"

#include <algorithm>
#include <bit>
#include <iterator>
#include <optional>
#include <string>

namespace troupe::kvcache {
namespace {

std::string describe(const arena_range& range) {
  return std::to_string(range.size) + " bytes at " + std::to_string(range.offset);
}

/// Where in a gap an aligned range begins, if it fits.
std::optional<std::uint64_t> place(std::uint64_t gap, std::uint64_t gap_size, std::uint64_t size,
                                   std::uint64_t alignment) noexcept {
  const std::uint64_t padding = (alignment - (gap & (alignment - 1))) & (alignment - 1);
  if (padding > gap_size || size > gap_size - padding) return std::nullopt;
  return gap + padding;
}

}  // namespace

arena::arena(std::uint64_t size) : size_{size} {
  if (size > 0) gaps_.emplace(0, size);
}

result<arena_range> arena::allocate(std::uint64_t size, std::uint64_t alignment) {
  if (size == 0) {
    return fail(errc::invalid_config, "arena: a range of 0 bytes; ask for at least 1");
  }
  if (!std::has_single_bit(alignment)) {
    return fail(errc::invalid_config,
                "arena: alignment " + std::to_string(alignment) + " is not a power of two");
  }
  if (size <= free_bytes()) {
    for (auto gap = gaps_.begin(); gap != gaps_.end(); ++gap) {
      if (const auto offset = place(gap->first, gap->second, size, alignment)) {
        take(gap, *offset, size);
        const std::uint64_t serial = next_serial_++;
        held_.emplace(*offset, held{size, serial});
        used_bytes_ += size;
        return arena_range{*offset, size, serial};
      }
    }
  }
  const auto now = counters();
  return fail(errc::pool_exhausted,
              "arena: no room for " + std::to_string(size) + " bytes; " + std::to_string(now.free) +
                  " of " + std::to_string(now.total) + " are free, the largest gap has " +
                  std::to_string(now.largest_free));
}

void arena::take(std::map<std::uint64_t, std::uint64_t>::iterator gap, std::uint64_t offset,
                 std::uint64_t size) {
  const auto [begin, length] = *gap;
  const std::uint64_t before = offset - begin;
  const std::uint64_t after = length - before - size;
  if (before > 0) {
    gap->second = before;
  } else {
    gaps_.erase(gap);
  }
  if (after > 0) gaps_.emplace(offset + size, after);
}

result<void> arena::free(const arena_range& range) {
  const auto found = held_.find(range.offset);
  if (found == held_.end() || found->second.serial != range.serial ||
      found->second.size != range.size) {
    const char* why = "it is free: it was freed before, or never given out";
    auto next = held_.upper_bound(range.offset);
    if (found != held_.end()) {
      why = found->second.serial != range.serial ? "it was freed before and given out again"
                                                 : "it was given out with another size";
    } else if (next != held_.begin()) {
      const auto before = std::prev(next);
      if (range.offset < before->first + before->second.size) {
        why = "it lies inside another range";
      }
    }
    return fail(errc::not_found, "arena: cannot free " + describe(range) + ": " + why);
  }
  held_.erase(found);
  used_bytes_ -= range.size;
  give_back(range.offset, range.size);
  return {};
}

void arena::give_back(std::uint64_t offset, std::uint64_t size) {
  auto after = gaps_.lower_bound(offset);
  if (after != gaps_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == offset) {
      offset = before->first;
      size += before->second;
      gaps_.erase(before);
    }
  }
  if (after != gaps_.end() && after->first == offset + size) {
    size += after->second;
    after = gaps_.erase(after);
  }
  gaps_.emplace_hint(after, offset, size);
}

arena_counters arena::counters() const noexcept {
  arena_counters counters{size_, used_bytes_, free_bytes(), 0, held_.size(), gaps_.size()};
  for (const auto& [offset, size] : gaps_) {
    counters.largest_free = std::max(counters.largest_free, size);
  }
  return counters;
}

}  // namespace troupe::kvcache
