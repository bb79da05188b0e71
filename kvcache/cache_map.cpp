#include "troupe/kvcache/cache_map.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "troupe/kvcache/byte_range.hpp"
#include "troupe/kvcache/strided_copy.hpp"

namespace troupe::kvcache {
namespace {

constexpr std::uint64_t max_pieces = std::uint64_t{1} << 20U;
/// Of one address, in every group of planes whose bytes may be around it.
constexpr std::size_t max_looks = 256;

struct mapped_plane {
  plane at;
  bool opaque{false};
};

/// As extents, sorted and joined.
std::vector<extent> extents_of(std::vector<byte_range> ranges) {
  sort_and_join(ranges);
  std::vector<extent> extents;
  extents.reserve(ranges.size());
  for (const auto& [begin, end] : ranges) extents.push_back({begin, end - begin, 0, 1});
  return extents;
}

/// So many tokens of one block of a plane, from its first on. Of an opaque one the whole block is meant
/// by any of them.
strided_copy tokens_of(const mapped_plane& p, std::uint64_t tokens) {
  strided_copy copy{p.at.head_bytes};
  copy.repeat(p.at.heads, p.at.head_stride, p.at.head_stride);
  if (!p.opaque) copy.repeat(tokens, p.at.token_stride, p.at.token_stride);
  copy.simplify();
  return copy;
}

/// Each contiguous run of bytes of a copy that begins at `offset`.
template <class Each>
void each_run(const strided_copy& copy, std::uint64_t offset, Each&& each) {
  std::vector<segment> segments;
  copy.append_to(segments, offset, offset);
  for (const auto& s : segments) {
    for (std::uint32_t i = 0; i < s.count; ++i) each(s.local_offset + i * s.local_stride, s.length);
  }
}

}  // namespace

struct cache_map::prepared {
  std::uint32_t block_tokens{0};
  std::uint32_t blocks{0};
  std::vector<mapped_plane> planes;
  std::vector<state_tensor> states;
  std::vector<std::shared_ptr<const place_form>> block_form;  ///< by region

  [[nodiscard]] result<void> check(token_range tokens, const block_list& blocks) const;
  void append(std::vector<std::vector<byte_range>>& out, block_id block, std::uint64_t first_token,
              std::uint64_t tokens) const;
};

cache_map::cache_map(std::shared_ptr<const prepared> state) : state_{std::move(state)} {}

result<cache_map> cache_map::create(const cache_layout& layout) {
  if (auto ok = check(layout); !ok) return fail(ok.error());
  auto made = std::make_shared<prepared>();
  made->block_tokens = layout.block_tokens;
  made->blocks = layout.blocks;
  made->states = layout.states;
  const auto regions = region_sizes(layout).size();
  std::vector<std::vector<place_form::piece>> pieces(regions);
  std::uint64_t count = 0;
  for (const auto& layer : layout.layers) {
    for (const auto& p : layer.planes) {
      made->planes.push_back({p, layer.shape.kind == layer_kind::opaque});
      count += tokens_of(made->planes.back(), layout.block_tokens).copies();
    }
  }
  if (count > max_pieces) {
    return fail(errc::invalid_config,
                "layout: a block is in " + std::to_string(count) + " pieces, more than " +
                    std::to_string(max_pieces) +
                    "; keep the heads of a token, or the tokens of a head, together");
  }
  for (const auto& p : made->planes) {
    each_run(tokens_of(p, layout.block_tokens), p.at.base,
             [&](std::uint64_t offset, std::uint64_t length) {
               pieces[p.at.region].push_back({offset, length, p.at.block_stride});
             });
  }
  for (auto& of : pieces) {
    auto form = std::make_shared<const place_form>(std::move(of), layout.blocks);
    if (form->looks() > max_looks) {
      return fail(errc::invalid_config, "layout: planes of one region are interleaved in " +
                                            std::to_string(form->looks()) +
                                            " groups with unequal strides, more than " +
                                            std::to_string(max_looks) +
                                            "; give the planes of one region one block stride");
    }
    made->block_form.push_back(std::move(form));
  }
  return cache_map{std::move(made)};
}

result<void> cache_map::prepared::check(token_range tokens, const block_list& list) const {
  if (tokens.begin > tokens.end) {
    return fail(errc::out_of_range, "tokens from " + std::to_string(tokens.begin) + " to " +
                                        std::to_string(tokens.end) + " end before they begin");
  }
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

/// Some tokens of one block, in every plane.
void cache_map::prepared::append(std::vector<std::vector<byte_range>>& out, block_id block,
                                 std::uint64_t first_token, std::uint64_t tokens) const {
  for (const auto& p : planes) {
    const auto at = p.at.offset_of(block, static_cast<std::uint32_t>(first_token), 0);
    each_run(tokens_of(p, tokens), at, [&](std::uint64_t offset, std::uint64_t length) {
      out[p.at.region].push_back({offset, offset + length});
    });
  }
}

result<std::vector<byte_set>> cache_map::bytes_of(token_range tokens, const block_list& blocks,
                                                  std::optional<std::uint32_t> state_slot) const {
  const auto& map = *state_;
  if (auto ok = map.check(tokens, blocks); !ok) return fail(ok.error());
  std::vector<std::vector<byte_range>> listed(map.block_form.size());
  std::vector<std::uint32_t> whole;
  for (auto at = tokens.begin; at < tokens.end;) {
    const auto number = at / map.block_tokens;
    const auto first = at % map.block_tokens;
    const auto count = std::min(map.block_tokens - first, tokens.end - at);
    at += count;
    if (count == map.block_tokens) {
      if (whole.empty()) whole.reserve((tokens.end - at) / map.block_tokens + 1);
      whole.push_back(blocks[number].value);
    } else {
      map.append(listed, blocks[number], first, count);
    }
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
  const auto places = std::make_shared<const place_list>(std::move(whole));
  std::vector<byte_set> bytes;
  bytes.reserve(listed.size());
  for (std::size_t region = 0; region < listed.size(); ++region) {
    bytes.emplace_back(map.block_form[region], places, extents_of(std::move(listed[region])));
  }
  return bytes;
}

}  // namespace troupe::kvcache
