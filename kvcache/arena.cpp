#include "troupe/kvcache/arena.hpp"

#include <bit>
#include <iterator>
#include <optional>
#include <string>
#include <utility>

namespace troupe::kvcache {
namespace {

std::string describe(const arena_range& range) {
  return std::to_string(range.size) + " bytes at " + std::to_string(range.offset);
}

/// The offset of an aligned range in a gap, if it fits.
std::optional<std::uint64_t> place(std::uint64_t gap, std::uint64_t gap_size, std::uint64_t size,
                                   std::uint64_t alignment) noexcept {
  const std::uint64_t padding = (alignment - (gap & (alignment - 1))) & (alignment - 1);
  if (padding > gap_size || size > gap_size - padding) return std::nullopt;
  return gap + padding;
}

}  // namespace

arena::arena(std::uint64_t size) : size_{size} {
  if (size == 0) return;
  gaps_.emplace(0, size);
  by_size_.emplace(size, 0);
}

result<arena_range> arena::allocate(std::uint64_t size, std::uint64_t alignment) {
  if (size == 0) {
    return fail(errc::invalid_config, "arena: a range of 0 bytes; ask for at least 1");
  }
  if (!std::has_single_bit(alignment)) {
    return fail(errc::invalid_config,
                "arena: alignment " + std::to_string(alignment) + " is not a power of two");
  }
  for (auto gap = by_size_.lower_bound({size, 0}); gap != by_size_.end(); ++gap) {
    const auto [length, begin] = *gap;
    if (const auto offset = place(begin, length, size, alignment)) {
      const std::uint64_t end = *offset + size;
      // Allocates memory before it changes anything.
      gap_map rest;
      size_set rest_by_size;
      const auto leave = [&](std::uint64_t from, std::uint64_t to) {
        if (from == to) return;
        rest.emplace(from, to - from);
        rest_by_size.emplace(to - from, from);
      };
      leave(begin, *offset);
      leave(end, begin + length);
      const auto at = held_.emplace(*offset, held{}).first;
      at->second = {size, next_serial_++, gaps_.extract(begin), by_size_.extract(gap)};
      gaps_.merge(rest);
      by_size_.merge(rest_by_size);
      used_bytes_ += size;
      return arena_range{*offset, size, at->second.serial};
    }
  }
  const auto now = counters();
  return fail(errc::pool_exhausted,
              "arena: no room for " + std::to_string(size) + " bytes; " + std::to_string(now.free) +
                  " of " + std::to_string(now.total) + " are free, the largest gap has " +
                  std::to_string(now.largest_free));
}

void arena::drop_gap(std::uint64_t offset, std::uint64_t size) {
  gaps_.erase(offset);
  by_size_.erase({size, offset});
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
  used_bytes_ -= range.size;
  give_back(range.offset, std::move(held_.extract(found).mapped()));
  return {};
}

void arena::give_back(std::uint64_t offset, held range) {
  auto size = range.size;
  const auto after = gaps_.lower_bound(offset);
  std::optional<std::pair<std::uint64_t, std::uint64_t>> left;
  std::optional<std::pair<std::uint64_t, std::uint64_t>> right;
  if (after != gaps_.end() && after->first == offset + size) right = *after;
  if (after != gaps_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == offset) left = *before;
  }
  if (left) {
    drop_gap(left->first, left->second);
    offset = left->first;
    size += left->second;
  }
  if (right) {
    drop_gap(right->first, right->second);
    size += right->second;
  }
  range.gap.key() = offset;
  range.gap.mapped() = size;
  range.by_size.value() = {size, offset};
  gaps_.insert(std::move(range.gap));
  by_size_.insert(std::move(range.by_size));
}

arena_counters arena::counters() const noexcept {
  return {size_,        used_bytes_, free_bytes(), by_size_.empty() ? 0 : by_size_.rbegin()->first,
          held_.size(), gaps_.size()};
}

}  // namespace troupe::kvcache
