// Whether the planes and states of a layout lie in their regions, and which of them share bytes.

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <optional>

#include "troupe/kvcache/layout.hpp"

namespace troupe::kvcache {
namespace {

/// Bytes that repeat in up to three nested strides: the form of every plane and state here.
struct strided_set {
  struct level {
    std::int64_t count;
    std::int64_t stride;
    std::int64_t reach;  ///< from the first to past the last byte of this level
  };
  std::uint32_t region{0};
  std::int64_t base{0};
  std::int64_t unit{0};           ///< contiguous bytes at the innermost
  std::array<level, 3> levels{};  ///< outermost first
  std::size_t depth{0};
  std::optional<std::uint32_t> table{};  ///< empty for a state
  const plane* of{nullptr};
  std::int64_t block_reach{0};  ///< from the first to past the last byte of one block
  std::string name;

  [[nodiscard]] std::int64_t reach(std::size_t from) const noexcept {
    return from < depth ? levels[from].reach : unit;
  }
};

strided_set make_set(std::string name, std::uint32_t region, std::uint64_t base, std::uint64_t unit,
                     std::array<std::pair<std::uint64_t, std::uint64_t>, 3> repetitions) {
  strided_set set;
  set.name = std::move(name);
  set.region = region;
  set.base = static_cast<std::int64_t>(base);
  set.unit = static_cast<std::int64_t>(unit);
  std::sort(repetitions.begin(), repetitions.end(),
            [](const auto& a, const auto& b) { return a.second < b.second; });
  for (const auto& [count, stride] : repetitions) {
    if (count < 2) continue;
    const auto n = static_cast<std::int64_t>(count);
    const auto step = static_cast<std::int64_t>(stride);
    if (set.depth == 0 && step == set.unit) {
      set.unit *= n;  // dense: no repetition at all
    } else {
      const std::int64_t inner = set.depth == 0 ? set.unit : set.levels[set.depth - 1].reach;
      set.levels[set.depth] = {n, step, (n - 1) * step + inner};
      ++set.depth;
    }
  }
  std::reverse(set.levels.begin(), set.levels.begin() + static_cast<std::ptrdiff_t>(set.depth));
  return set;
}

std::int64_t floor_divide(std::int64_t a, std::int64_t b) noexcept {
  return a / b - ((a % b != 0 && (a < 0) != (b < 0)) ? 1 : 0);
}

/// Searches for a byte that two sets share: by arithmetic for equal strides, else by walking the
/// elements where the sets meet, within a budget.
class overlap_search {
 public:
  explicit overlap_search(std::int64_t steps_in_all = std::numeric_limits<std::int64_t>::max())
      : left_{steps_in_all} {}
  [[nodiscard]] bool found(const strided_set& a, const strided_set& b) {
    const auto most = std::min(steps_per_pair, left_);
    budget_ = most;
    const bool met = meets(a, 0, b, 0, b.base - a.base);
    left_ -= most - std::max<std::int64_t>(budget_, 0);
    return met;
  }
  [[nodiscard]] bool gave_up() const noexcept { return budget_ <= 0; }

 private:
  /// Whether level `i` of `a`, at 0, meets level `j` of `b`, at `distance`.
  bool meets(const strided_set& a, std::size_t i, const strided_set& b, std::size_t j,
             std::int64_t distance) {
    if (--budget_ <= 0) return false;
    if (distance >= a.reach(i) || -distance >= b.reach(j)) return false;
    if (i == a.depth && j == b.depth) return true;
    if (i == a.depth) return walk(b, j, a, i, -distance);
    if (j == b.depth || a.levels[i].stride > b.levels[j].stride) return walk(a, i, b, j, distance);
    if (a.levels[i].stride < b.levels[j].stride) return walk(b, j, a, i, -distance);
    const std::int64_t stride = a.levels[i].stride;
    const std::int64_t nearest = floor_divide(-distance, stride);
    // Elements are no longer than the stride, so only neighbours of the nearest can meet.
    for (std::int64_t d = nearest - 1; d <= nearest + 2; ++d) {
      if (d <= -a.levels[i].count || d >= b.levels[j].count) continue;
      if (meets(a, i + 1, b, j + 1, distance + d * stride)) return true;
    }
    return false;
  }

  /// Tries the elements of `a`'s level `i` that reach into all of `b`'s level `j`.
  bool walk(const strided_set& a, std::size_t i, const strided_set& b, std::size_t j,
            std::int64_t distance) {
    const auto& level = a.levels[i];
    const std::int64_t first =
        std::max<std::int64_t>(0, floor_divide(distance - a.reach(i + 1), level.stride));
    const std::int64_t last =
        std::min(level.count - 1, floor_divide(distance + b.reach(j), level.stride));
    for (std::int64_t k = first; k <= last && budget_ > 0; ++k) {
      if (meets(a, i + 1, b, j, distance - k * level.stride)) return true;
    }
    return false;
  }

  static constexpr std::int64_t steps_per_pair = std::int64_t{1} << 20;
  std::int64_t left_;
  std::int64_t budget_{0};
};

std::vector<strided_set> all_sets(const cache_layout& layout) {
  std::vector<strided_set> sets;
  for (std::uint32_t i = 0; i < layout.layers.size(); ++i) {
    const auto& planes = layout.layers[i].planes;
    const bool opaque = layout.layers[i].shape.kind == layer_kind::opaque;
    const auto table = table_of(layout, i);
    const std::uint64_t tokens = opaque ? 1 : block_tokens_of(layout, table);
    for (std::size_t p = 0; p < planes.size(); ++p) {
      sets.push_back(make_set("layer " + std::to_string(i) + " plane " + std::to_string(p),
                              planes[p].region, planes[p].base, planes[p].head_bytes,
                              {{{layout.blocks, planes[p].block_stride},
                                {tokens, planes[p].token_stride},
                                {planes[p].heads, planes[p].head_stride}}}));
      sets.back().table = table;
      sets.back().of = &planes[p];
      sets.back().block_reach = static_cast<std::int64_t>(
          (tokens - 1) * planes[p].token_stride +
          (planes[p].heads - std::uint64_t{1}) * planes[p].head_stride + planes[p].head_bytes);
    }
  }
  for (const auto& s : layout.states) {
    sets.push_back(make_set("state '" + s.name + "'", s.region, s.base, s.slot_bytes,
                            {{{s.slots, s.slot_stride}, {1, 0}, {1, 0}}}));
  }
  return sets;
}

/// Calls `look` for each pair whose hulls meet, until it returns false.
template <class Look>
void each_neighbours(std::vector<strided_set> sets, Look&& look) {
  std::sort(sets.begin(), sets.end(), [](const strided_set& a, const strided_set& b) {
    return a.region != b.region ? a.region < b.region : a.base < b.base;
  });
  std::vector<std::size_t> open;  // earlier sets that reach past the current one's base
  for (std::size_t i = 0; i < sets.size(); ++i) {
    std::erase_if(open, [&](std::size_t o) {
      return sets[o].region != sets[i].region || sets[o].base + sets[o].reach(0) <= sets[i].base;
    });
    for (const std::size_t o : open) {
      if (!look(sets[o], sets[i])) return;
    }
    open.push_back(i);
  }
}

/// Whether the two are planes of different groups of layers.
bool of_two_groups(const strided_set& a, const strided_set& b) noexcept {
  return a.table && b.table && a.table != b.table;
}

/// Whether a block of one shares bytes at most with the block of the same number of the other.
bool share_block_by_block(const strided_set& a, const strided_set& b) noexcept {
  const plane& one = *a.of;
  const plane& other = *b.of;
  if (one.block_stride != other.block_stride) return false;
  const auto span =
      std::max(a.base + a.block_reach, b.base + b.block_reach) - std::min(a.base, b.base);
  if (span <= static_cast<std::int64_t>(one.block_stride)) return true;
  return one == other;
}

result<void> check_disjoint(std::vector<strided_set> sets) {
  overlap_search search;
  result<void> outcome;
  each_neighbours(std::move(sets), [&](const strided_set& a, const strided_set& b) {
    const bool groups = of_two_groups(a, b);
    if (groups && share_block_by_block(a, b)) return true;
    if (search.found(a, b)) {
      outcome = fail(
          errc::invalid_config,
          "layout: " + a.name + " and " + b.name + " share bytes of region " +
              std::to_string(b.region) +
              (groups ? ", but not block by block; a block must be the same bytes in every group"
                      : "; check their bases and strides"));
    } else if (search.gave_up()) {
      outcome = fail(errc::invalid_config,
                     "layout: " + a.name + " and " + b.name +
                         " are interleaved with unequal strides too finely to tell whether they "
                         "share bytes; give the planes of one region one block stride");
    }
    return outcome.has_value();
  });
  return outcome;
}

}  // namespace

std::vector<std::uint32_t> pools_of_tables(const cache_layout& layout) {
  std::vector<std::uint32_t> pools(block_tables(layout));
  std::iota(pools.begin(), pools.end(), 0U);
  if (pools.size() == 1) return pools;
  // A peer's layout may be anything that passes `check`.
  overlap_search search{std::int64_t{1} << 22};
  each_neighbours(all_sets(layout), [&](const strided_set& a, const strided_set& b) {
    if (!of_two_groups(a, b) || pools[*a.table] == pools[*b.table]) return true;
    // If the search gave up, assume one pool.
    if (search.found(a, b) || search.gave_up()) {
      // Copies, since `replace` takes references, which would refer to elements that it replaces.
      const auto [low, high] = std::minmax({pools[*a.table], pools[*b.table]});
      std::ranges::replace(pools, high, low);
    }
    return true;
  });
  return pools;
}

result<void> validate(const cache_layout& layout, std::span<const std::uint64_t> region_sizes) {
  if (auto ok = check(layout); !ok) return ok;
  auto sets = all_sets(layout);
  for (const auto& set : sets) {
    if (set.region >= region_sizes.size()) {
      return fail(errc::out_of_range, "layout: " + set.name + " is in region " +
                                          std::to_string(set.region) + ", but only " +
                                          std::to_string(region_sizes.size()) +
                                          " regions are registered");
    }
    const auto end = static_cast<std::uint64_t>(set.base + set.reach(0));
    if (end > region_sizes[set.region]) {
      return fail(errc::out_of_range, "layout: " + set.name + " ends at byte " +
                                          std::to_string(end) + " of region " +
                                          std::to_string(set.region) + ", which has " +
                                          std::to_string(region_sizes[set.region]) + " bytes");
    }
  }
  return check_disjoint(std::move(sets));
}

}  // namespace troupe::kvcache
