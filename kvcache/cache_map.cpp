#include "troupe/kvcache/cache_map.hpp"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "troupe/kvcache/byte_range.hpp"
#include "troupe/kvcache/strided_copy.hpp"

namespace troupe::kvcache {
namespace {

constexpr std::uint64_t max_pieces = std::uint64_t{1} << 20U;
/// Groups of planes that the lookup of one address may visit.
constexpr std::size_t max_looks = 256;

struct mapped_plane {
  plane at;
  bool opaque{false};
};

/// Converts the ranges to extents, sorted and merged.
std::vector<extent> extents_of(std::vector<byte_range> ranges) {
  sort_and_join(ranges);
  std::vector<extent> extents;
  extents.reserve(ranges.size());
  for (const auto& [begin, end] : ranges) extents.push_back({begin, end - begin, 0, 1});
  return extents;
}

/// The first `tokens` tokens of one block of a plane. For an opaque plane, any token stands for the
/// whole block.
strided_copy tokens_of(const mapped_plane& p, std::uint64_t tokens) {
  strided_copy copy{p.at.head_bytes};
  copy.repeat(p.at.heads, p.at.head_stride, p.at.head_stride);
  if (!p.opaque) copy.repeat(tokens, p.at.token_stride, p.at.token_stride);
  copy.simplify();
  return copy;
}

/// Calls `each` for each contiguous run of bytes of a copy that begins at `offset`.
template <class Each>
void each_run(const strided_copy& copy, std::uint64_t offset, Each&& each) {
  std::vector<segment> segments;
  copy.append_to(segments, offset, offset);
  for (const auto& s : segments) {
    for (std::uint32_t i = 0; i < s.count; ++i) each(s.local_offset + i * s.local_stride, s.length);
  }
}

/// The planes that one block table serves.
struct mapped_table {
  std::uint32_t block_tokens{0};
  std::vector<mapped_plane> planes;
  std::vector<std::shared_ptr<const place_form>> block_form;  ///< by region

  [[nodiscard]] result<void> check(token_range tokens, const block_list& list,
                                   std::uint32_t blocks) const;
  void append(std::vector<std::vector<byte_range>>& out, block_id block, std::uint64_t first_token,
              std::uint64_t tokens) const;
  /// The blocks whose tokens are all in the range; the bytes of partial blocks are added to `out`.
  [[nodiscard]] std::vector<std::uint32_t> whole_blocks(
      token_range tokens, const block_list& blocks,
      std::vector<std::vector<byte_range>>& out) const;
};

result<void> mapped_table::check(token_range tokens, const block_list& list,
                                 std::uint32_t blocks) const {
  const auto count = blocks_in(tokens, block_tokens);
  if (count == 0) return {};
  const auto first = tokens.begin / block_tokens;
  const auto last = first + count - 1;
  if (first < list.first || last >= list.end()) {
    return fail(errc::out_of_range,
                "tokens " + std::to_string(tokens.begin) + " to " + std::to_string(tokens.end) +
                    " are in blocks " + std::to_string(first) + " to " + std::to_string(last) +
                    " of the request, the list has " + std::to_string(list.blocks.size()) +
                    " blocks from number " + std::to_string(list.first) + " on");
  }
  for (auto number = first; number <= last; ++number) {
    if (list[number].value < blocks) continue;
    return fail(errc::out_of_range, "block " + std::to_string(list[number].value) +
                                        " is not among the pool's " + std::to_string(blocks));
  }
  return {};
}

/// Adds some tokens of one block, in every plane.
void mapped_table::append(std::vector<std::vector<byte_range>>& out, block_id block,
                          std::uint64_t first_token, std::uint64_t tokens) const {
  for (const auto& p : planes) {
    const auto at = p.at.offset_of(block, static_cast<std::uint32_t>(first_token), 0);
    each_run(tokens_of(p, tokens), at, [&](std::uint64_t offset, std::uint64_t length) {
      out[p.at.region].push_back({offset, offset + length});
    });
  }
}

std::vector<std::uint32_t> mapped_table::whole_blocks(
    token_range tokens, const block_list& blocks, std::vector<std::vector<byte_range>>& out) const {
  std::vector<std::uint32_t> whole;
  for (auto at = tokens.begin; at < tokens.end;) {
    const auto number = at / block_tokens;
    const auto first = at % block_tokens;
    const auto count = std::min(block_tokens - first, tokens.end - at);
    at += count;
    if (count == block_tokens) {
      if (whole.empty()) whole.reserve((tokens.end - at) / block_tokens + 1);
      whole.push_back(blocks[number].value);
    } else {
      append(out, blocks[number], first, count);
    }
  }
  return whole;
}

/// The planes of each table, and the bytes that they hold of a block in each region.
result<std::vector<mapped_table>> tables_of(const cache_layout& layout, layer_range layers) {
  std::vector<mapped_table> tables(block_tables(layout));
  for (std::uint32_t i = 0; i < tables.size(); ++i) {
    tables[i].block_tokens = block_tokens_of(layout, i);
  }
  std::uint64_t count = 0;
  for (auto i = layers.begin; i < layers.end; ++i) {
    auto& table = tables[table_of(layout, i)];
    for (const auto& p : layout.layers[i].planes) {
      table.planes.push_back({p, layout.layers[i].shape.kind == layer_kind::opaque});
      count += tokens_of(table.planes.back(), table.block_tokens).copies();
    }
  }
  if (count > max_pieces) {
    return fail(errc::invalid_config,
                "layout: a block is in " + std::to_string(count) + " pieces, more than " +
                    std::to_string(max_pieces) +
                    "; keep the heads of a token, or the tokens of a head, together");
  }
  const auto regions = region_sizes(layout).size();
  std::vector<std::size_t> looks(regions, 0);  // of all tables
  for (auto& table : tables) {
    std::vector<std::vector<place_form::piece>> pieces(regions);
    for (const auto& p : table.planes) {
      each_run(tokens_of(p, table.block_tokens), p.at.base,
               [&](std::uint64_t offset, std::uint64_t length) {
                 pieces[p.at.region].push_back({offset, length, p.at.block_stride});
               });
    }
    for (std::size_t region = 0; region < regions; ++region) {
      auto form = std::make_shared<const place_form>(std::move(pieces[region]), layout.blocks);
      if (!form->empty()) looks[region] += form->looks();
      if (looks[region] > max_looks) {
        return fail(errc::invalid_config, "layout: planes of one region are interleaved in " +
                                              std::to_string(looks[region]) +
                                              " groups with unequal strides, more than " +
                                              std::to_string(max_looks) +
                                              "; give the planes of one region one block stride");
      }
      table.block_form.push_back(std::move(form));
    }
  }
  return tables;
}

result<void> check_share(const cache_layout& layout, const mapped_share& share) {
  const auto missing = [](const char* what, std::uint64_t number, std::size_t count) {
    return fail(errc::out_of_range, "a map of " + std::string{what} + " " + std::to_string(number) +
                                        " of a layout that has " + std::to_string(count));
  };
  const auto& [begin, end] = share.layers;
  if (begin > end) return missing("layers from", begin, end);
  if (end > layout.layers.size()) return missing("layers up to", end, layout.layers.size());
  for (const auto state : share.states) {
    if (state >= layout.states.size()) return missing("state", state, layout.states.size());
  }
  return {};
}

}  // namespace

struct cache_map::prepared {
  std::uint32_t blocks{0};
  std::vector<mapped_table> tables;
  std::vector<state_tensor> states;
  std::size_t regions{0};
};

cache_map::cache_map(std::shared_ptr<const prepared> state) : state_{std::move(state)} {}

result<cache_map> cache_map::create(const cache_layout& layout) {
  mapped_share all{{0, static_cast<std::uint32_t>(layout.layers.size())}, {}};
  all.states.resize(layout.states.size());
  std::iota(all.states.begin(), all.states.end(), 0U);
  return create(layout, all);
}

result<cache_map> cache_map::create(const cache_layout& layout, const mapped_share& share) {
  if (auto ok = check(layout); !ok) return fail(ok.error());
  if (auto ok = check_share(layout, share); !ok) return fail(ok.error());
  auto tables = tables_of(layout, share.layers);
  if (!tables) return fail(tables.error());
  auto made = std::make_shared<prepared>();
  made->blocks = layout.blocks;
  made->tables = std::move(*tables);
  for (const auto number : share.states) made->states.push_back(layout.states[number]);
  made->regions = region_sizes(layout).size();
  return cache_map{std::move(made)};
}

result<std::vector<byte_set>> cache_map::bytes_of(token_range tokens,
                                                  std::span<const block_table> tables,
                                                  std::optional<std::uint32_t> state_slot) const {
  const auto& map = *state_;
  if (tokens.begin > tokens.end) {
    return fail(errc::out_of_range, "tokens from " + std::to_string(tokens.begin) + " to " +
                                        std::to_string(tokens.end) + " end before they begin");
  }
  if (tables.size() != map.tables.size()) {
    return fail(errc::invalid_config, "there are " + std::to_string(tables.size()) +
                                          " block tables, the layout has " +
                                          std::to_string(map.tables.size()));
  }
  std::vector<std::vector<byte_range>> listed(map.regions);
  std::vector<std::shared_ptr<const place_list>> places;
  for (std::size_t i = 0; i < tables.size(); ++i) {
    const auto kept = tables[i].kept_of(tokens);
    const auto& of = map.tables[i];
    if (auto ok = of.check(kept, tables[i].blocks, map.blocks); !ok) return fail(ok.error());
    places.push_back(
        std::make_shared<const place_list>(of.whole_blocks(kept, tables[i].blocks, listed)));
  }
  if (state_slot) {
    for (const auto& s : map.states) {
      if (*state_slot >= s.slots) {
        return fail(errc::out_of_range,
                    "state slot " + std::to_string(*state_slot) + " of " + std::to_string(s.slots));
      }
      const auto begin = s.base + *state_slot * s.slot_stride;
      listed[s.region].push_back({begin, begin + s.slot_bytes});
    }
  }
  std::vector<byte_set> bytes;
  bytes.reserve(listed.size());
  for (std::size_t region = 0; region < listed.size(); ++region) {
    std::vector<byte_set::placed> placed;
    for (std::size_t i = 0; i < tables.size(); ++i) {
      placed.push_back({map.tables[i].block_form[region], places[i]});
    }
    bytes.emplace_back(std::move(placed), extents_of(std::move(listed[region])));
  }
  return bytes;
}

}  // namespace troupe::kvcache
