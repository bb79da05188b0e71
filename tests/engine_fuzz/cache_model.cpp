#include "cache_model.hpp"

#include <algorithm>

namespace troupe::engine_fuzz {

namespace {

std::uint64_t mix(std::uint64_t z) {
  z = (z ^ (z >> 30U)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27U)) * 0x94D049BB133111EBULL;
  return z ^ (z >> 31U);
}

}  // namespace

std::size_t count_of(const block_tables& tables) {
  std::size_t blocks = 0;
  for (const auto& table : tables) blocks += table.blocks.size();
  return blocks;
}

void pattern(std::uint64_t key, std::span<std::byte> into) {
  for (std::size_t at = 0; at < into.size(); at += sizeof key) {
    const auto word = mix(key + at * 0x9E3779B97F4A7C15ULL);
    std::memcpy(into.data() + at, &word, std::min(sizeof word, into.size() - at));
  }
}

cache_model::cache_model(kvcache::cache_layout layout, std::vector<std::span<std::byte>> regions,
                         std::uint64_t seed)
    : layout_{std::move(layout)},
      table_of_(layout_.layers.size(), table_of_layer{0, layout_.block_tokens}),
      regions_{std::move(regions)},
      noise_{mix(seed + 1)} {
  for (std::size_t g = 0; g < layout_.groups.size(); ++g) {
    const auto its = layout_.groups[g].block_tokens;
    for (const auto l : layout_.groups[g].layers)
      table_of_[l] = {g, its != 0 ? its : layout_.block_tokens};
  }
  for (std::size_t i = 0; i < regions_.size(); ++i) {
    expected_.emplace_back(regions_[i].size());
    noise(i, 0, regions_[i].size());
  }
}

void cache_model::noise(std::size_t region, std::uint64_t offset, std::uint64_t bytes) {
  const auto there = regions_[region].subspan(offset, bytes);
  pattern(++noise_ * 0x2545F4914F6CDD1DULL, there);
  std::memcpy(expected_[region].data() + offset, there.data(), bytes);
}

std::uint32_t cache_model::first_head(const kvcache::layer_layout& layer) const {
  const auto heads = layer.shape.kv_heads;
  return heads > 0 ? kvcache::head_range(heads, layout_.tp_size, layout_.tp_rank).begin : 0;
}

cache_model::kept_tokens cache_model::kept_of(const block_tables& blocks, std::uint32_t layer,
                                              token_span tokens) const {
  static const group_blocks nothing;
  const auto& table = table_of_[layer];
  if (table.number >= blocks.size()) return {nothing, table.block_tokens, 0, {}};
  const auto& of = blocks[table.number];
  tokens.begin = std::max(tokens.begin, of.first_token);
  return {of, table.block_tokens, of.first_token / table.block_tokens, tokens};
}

/// Visits each head of each block that holds some of the tokens.
template <class Visit>
void cache_model::each_packed(const kvcache::layer_layout& layer, std::uint64_t of_layer,
                              const kept_tokens& kept, const content& request, Visit visit) {
  const auto block_tokens = kept.block_tokens;
  const auto first = kept.tokens.begin / block_tokens;
  const auto last = (kept.tokens.end - 1) / block_tokens;
  for (std::size_t p = 0; p < layer.planes.size(); ++p) {
    const auto& plane = layer.planes[p];
    piece_.resize(plane.head_bytes);
    for (std::uint32_t head = 0; head < plane.heads; ++head) {
      const auto place = mix(of_layer | (std::uint64_t{p} << 32U) | (first_head(layer) + head));
      for (auto number = first; number <= last; ++number) {
        // A shared prefix consists of whole blocks.
        const auto token = number * block_tokens;
        const auto of = token < request.shared_tokens ? request.shared_seed : request.seed;
        pattern(mix(of ^ place) ^ mix(~std::uint64_t{number}), piece_);
        visit(plane.region, plane.offset_of(kept.block_of(token), 0, head));
      }
    }
  }
}

template <class Visit>
void cache_model::each_piece(const block_tables& blocks, layer_span layers, token_span tokens,
                             const content& request, Visit visit) {
  for (auto l = layers.begin; l < layers.end; ++l) {
    const auto& layer = layout_.layers[l];
    const auto kept = kept_of(blocks, l, tokens);
    if (kept.none()) continue;
    if (is_packed(layer)) {
      each_packed(layer, std::uint64_t{l} << 40U, kept, request, visit);
      continue;
    }
    const auto first = first_head(layer);
    for (std::size_t p = 0; p < layer.planes.size(); ++p) {
      const auto& plane = layer.planes[p];
      piece_.resize(plane.head_bytes);
      for (std::uint32_t head = 0; head < plane.heads; ++head) {
        const auto place =
            mix((std::uint64_t{l} << 40U) | (std::uint64_t{p} << 32U) | (first + head));
        for (auto token = kept.tokens.begin; token < kept.tokens.end; ++token) {
          const auto of = token < request.shared_tokens ? request.shared_seed : request.seed;
          pattern(mix(of ^ place) ^ mix(token + 1), piece_);
          const auto at = plane.base + kept.block_of(token).value * plane.block_stride +
                          (token % kept.block_tokens) * plane.token_stride +
                          head * plane.head_stride;
          visit(plane.region, at);
        }
      }
    }
  }
}

template <class Visit>
void cache_model::each_state(std::uint32_t slot, std::uint64_t request, Visit visit) {
  std::vector<std::byte> whole;
  for (std::size_t i = 0; i < layout_.states.size(); ++i) {
    const auto& state = layout_.states[i];
    auto parts = state.parts;
    if (parts.empty()) parts.push_back({state.slot_bytes, state.sharding});
    piece_.clear();
    for (std::uint64_t p = 0; p < parts.size(); ++p) {
      const bool sliced = parts[p].sharding == kvcache::state_sharding::sliced;
      const auto bytes = parts[p].bytes;
      whole.resize(bytes * (sliced ? layout_.tp_size : 1));
      pattern(mix(request ^ mix(0x57A7E000 + i + (p << 32U))), whole);
      const auto from =
          whole.begin() + static_cast<std::ptrdiff_t>(sliced ? layout_.tp_rank * bytes : 0);
      piece_.insert(piece_.end(), from, from + static_cast<std::ptrdiff_t>(bytes));
    }
    visit(state.region, state.base + slot * state.slot_stride);
  }
}

void cache_model::spoil(const kvcache::layer_layout& layer, block_id block) {
  for (const auto& plane : layer.planes) {
    for (std::uint32_t head = 0; head < plane.heads; ++head)
      noise(plane.region, plane.offset_of(block, 0, head), plane.head_bytes);
  }
}

void cache_model::compute(const block_tables& blocks, layer_span layers, token_span tokens,
                          const content& request, bool last) {
  each_piece(blocks, layers, tokens, request, [&](std::uint32_t region, std::uint64_t at) {
    std::memcpy(regions_[region].data() + at, piece_.data(), piece_.size());
    std::memcpy(expected_[region].data() + at, piece_.data(), piece_.size());
  });
  if (last) return;
  for (auto l = layers.begin; l < layers.end; ++l) {
    const auto& layer = layout_.layers[l];
    const auto kept = kept_of(blocks, l, tokens);
    const bool ends_within = tokens.end % kept.block_tokens != 0;
    if (is_packed(layer) && ends_within && !kept.none()) spoil(layer, kept.block_of(tokens.end));
  }
}

void cache_model::compute_state(std::uint32_t slot, std::uint64_t request) {
  each_state(slot, request, [&](std::uint32_t region, std::uint64_t at) {
    std::memcpy(regions_[region].data() + at, piece_.data(), piece_.size());
    std::memcpy(expected_[region].data() + at, piece_.data(), piece_.size());
  });
}

void cache_model::reuse(const block_tables& blocks, std::optional<std::uint32_t> slot) {
  for (std::size_t l = 0; l < layout_.layers.size(); ++l) {
    for (const auto& plane : layout_.layers[l].planes) {
      for (const auto block : blocks[table_of_[l].number].blocks) {
        for (std::uint32_t t = 0; t < rows_of_block(l); ++t) {
          for (std::uint32_t h = 0; h < plane.heads; ++h)
            noise(plane.region, plane.offset_of(block, t, h), plane.head_bytes);
        }
      }
    }
  }
  if (!slot) return;
  for (const auto& state : layout_.states)
    noise(state.region, state.base + *slot * state.slot_stride, state.slot_bytes);
}

std::string cache_model::is_there(const block_tables& blocks, layer_span layers, token_span tokens,
                                  const content& request) {
  std::uint64_t wrong = 0;
  std::string first;
  each_piece(blocks, layers, tokens, request, [&](std::uint32_t region, std::uint64_t at) {
    compared_ += piece_.size();
    if (std::memcmp(regions_[region].data() + at, piece_.data(), piece_.size()) == 0) return;
    if (wrong++ == 0) first = place_of(region, at);
  });
  if (wrong == 0) return {};
  return std::to_string(wrong) + " pieces are not the request's, the first is " + first;
}

std::string cache_model::state_is_there(std::uint32_t slot, std::uint64_t request) {
  std::string wrong;
  each_state(slot, request, [&](std::uint32_t region, std::uint64_t at) {
    compared_ += piece_.size();
    if (std::memcmp(regions_[region].data() + at, piece_.data(), piece_.size()) != 0)
      wrong = "the state is not the request's: " + place_of(region, at);
  });
  return wrong;
}

void cache_model::arrived(const block_tables& blocks, token_span tokens,
                          std::optional<std::uint32_t> slot, const content& request) {
  const auto expect = [&](std::uint32_t region, std::uint64_t at) {
    std::memcpy(expected_[region].data() + at, piece_.data(), piece_.size());
  };
  each_piece(blocks, all_layers(), tokens, request, expect);
  if (slot) each_state(*slot, request.seed, expect);
}

std::string cache_model::torn(const block_tables& blocks, token_span tokens,
                              std::optional<std::uint32_t> slot, const content& request) {
  std::uint64_t wrong = 0;
  std::string first;
  const auto look = [&](std::uint32_t region, std::uint64_t at) {
    auto* was = expected_[region].data() + at;
    const auto* is = regions_[region].data() + at;
    compared_ += piece_.size();
    for (std::size_t i = 0; i < piece_.size(); ++i) {
      if (is[i] != was[i] && is[i] != piece_[i] && wrong++ == 0) first = place_of(region, at + i);
      was[i] = is[i];
    }
  };
  each_piece(blocks, all_layers(), tokens, request, look);
  if (slot) each_state(*slot, request.seed, look);
  if (wrong == 0) return {};
  return std::to_string(wrong) +
         " bytes are neither what they were nor the request's, the first is " + first;
}

std::span<std::byte> cache_model::longest_run(block_id block) const {
  struct run {
    std::uint32_t region;
    std::uint64_t begin, end;
    auto operator<=>(const run&) const = default;
  };
  std::vector<run> pieces;
  for (const auto& plane : layout_.layers.front().planes) {
    for (std::uint32_t t = 0; t < rows_of_block(0); ++t) {
      for (std::uint32_t h = 0; h < plane.heads; ++h) {
        const auto at = plane.offset_of(block, t, h);
        pieces.push_back({plane.region, at, at + plane.head_bytes});
      }
    }
  }
  std::ranges::sort(pieces);
  run best{};
  run now{};
  for (const auto& piece : pieces) {
    if (piece.region == now.region && piece.begin == now.end) {
      now.end = piece.end;
    } else {
      now = piece;
    }
    if (now.end - now.begin > best.end - best.begin) best = now;
  }
  return regions_[best.region].subspan(best.begin, best.end - best.begin);
}

std::string cache_model::audit() {
  std::string wrong;
  for (std::size_t i = 0; i < regions_.size(); ++i) {
    compared_ += regions_[i].size();
    if (std::memcmp(regions_[i].data(), expected_[i].data(), regions_[i].size()) == 0) continue;
    std::uint64_t bytes = 0;
    std::uint64_t first = 0;
    for (std::uint64_t at = 0; at < regions_[i].size(); ++at) {
      if (regions_[i][at] == expected_[i][at]) continue;
      if (bytes++ == 0) first = at;
    }
    wrong += (wrong.empty() ? "" : "; ") + std::to_string(bytes) + " bytes of region " +
             std::to_string(i) + " were touched, the first is " + place_of(i, first);
    // Report each difference once.
    std::memcpy(expected_[i].data(), regions_[i].data(), regions_[i].size());
  }
  return wrong;
}

std::string cache_model::place_in(std::size_t layer, std::size_t region,
                                  std::uint64_t offset) const {
  for (std::size_t p = 0; p < layout_.layers[layer].planes.size(); ++p) {
    const auto& plane = layout_.layers[layer].planes[p];
    if (plane.region != region) continue;
    for (std::uint32_t b = 0; b < layout_.blocks; ++b) {
      for (std::uint32_t t = 0; t < rows_of_block(layer); ++t) {
        for (std::uint32_t h = 0; h < plane.heads; ++h) {
          const auto at = plane.offset_of(block_id{b}, t, h);
          if (offset < at || offset >= at + plane.head_bytes) continue;
          return "layer " + std::to_string(layer) + " plane " + std::to_string(p) + " block " +
                 std::to_string(b) + " token " + std::to_string(t) + " local head " +
                 std::to_string(h);
        }
      }
    }
  }
  return {};
}

std::string cache_model::place_of(std::size_t region, std::uint64_t offset) const {
  std::string places;  // several, where groups of layers lie over the same bytes.
  for (std::size_t l = 0; l < layout_.layers.size(); ++l) {
    const auto place = place_in(l, region, offset);
    if (!place.empty()) places += (places.empty() ? "" : ", or ") + place;
  }
  if (!places.empty()) return places;
  for (const auto& state : layout_.states) {
    if (state.region != region || offset < state.base || state.slot_stride == 0) continue;
    const auto slot = (offset - state.base) / state.slot_stride;
    const auto byte = (offset - state.base) % state.slot_stride;
    if (slot < state.slots)
      return state.name + " slot " + std::to_string(slot) + " byte " + std::to_string(byte);
  }
  return "padding, region " + std::to_string(region) + " offset " + std::to_string(offset);
}

}  // namespace troupe::engine_fuzz
