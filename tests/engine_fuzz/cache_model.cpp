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

void pattern(std::uint64_t key, std::span<std::byte> into) {
  for (std::size_t at = 0; at < into.size(); at += sizeof key) {
    const auto word = mix(key + at * 0x9E3779B97F4A7C15ULL);
    std::memcpy(into.data() + at, &word, std::min(sizeof word, into.size() - at));
  }
}

cache_model::cache_model(kvcache::cache_layout layout, std::vector<std::span<std::byte>> regions,
                         std::uint64_t seed)
    : layout_{std::move(layout)}, regions_{std::move(regions)}, noise_{mix(seed + 1)} {
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

template <class Visit>
void cache_model::each_piece(const std::vector<block_id>& blocks, layer_span layers,
                             token_span tokens, const content& request, Visit visit) {
  for (auto l = layers.begin; l < layers.end; ++l) {
    const auto& layer = layout_.layers[l];
    const auto first =
        layer.shape.kv_heads > 0
            ? kvcache::head_range(layer.shape.kv_heads, layout_.tp_size, layout_.tp_rank).begin
            : 0;
    for (std::size_t p = 0; p < layer.planes.size(); ++p) {
      const auto& plane = layer.planes[p];
      piece_.resize(plane.head_bytes);
      for (std::uint32_t head = 0; head < plane.heads; ++head) {
        const auto place =
            mix((std::uint64_t{l} << 40U) | (std::uint64_t{p} << 32U) | (first + head));
        for (auto token = tokens.begin; token < tokens.end; ++token) {
          const auto of = token < request.shared_tokens ? request.shared_seed : request.seed;
          pattern(mix(of ^ place) ^ mix(token + 1), piece_);
          const auto at =
              plane.base + blocks[token / layout_.block_tokens].value * plane.block_stride +
              (token % layout_.block_tokens) * plane.token_stride + head * plane.head_stride;
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
    const bool sliced = state.sharding == kvcache::state_sharding::sliced;
    whole.resize(state.slot_bytes * (sliced ? layout_.tp_size : 1));
    pattern(mix(request ^ mix(0x57A7E000 + i)), whole);
    const auto from = sliced ? layout_.tp_rank * state.slot_bytes : 0;
    piece_.assign(whole.begin() + static_cast<std::ptrdiff_t>(from),
                  whole.begin() + static_cast<std::ptrdiff_t>(from + state.slot_bytes));
    visit(state.region, state.base + slot * state.slot_stride);
  }
}

void cache_model::compute(const std::vector<block_id>& blocks, layer_span layers, token_span tokens,
                          const content& request) {
  each_piece(blocks, layers, tokens, request, [&](std::uint32_t region, std::uint64_t at) {
    std::memcpy(regions_[region].data() + at, piece_.data(), piece_.size());
    std::memcpy(expected_[region].data() + at, piece_.data(), piece_.size());
  });
}

void cache_model::compute_state(std::uint32_t slot, std::uint64_t request) {
  each_state(slot, request, [&](std::uint32_t region, std::uint64_t at) {
    std::memcpy(regions_[region].data() + at, piece_.data(), piece_.size());
    std::memcpy(expected_[region].data() + at, piece_.data(), piece_.size());
  });
}

void cache_model::reuse(const std::vector<block_id>& blocks, std::optional<std::uint32_t> slot) {
  for (const auto& layer : layout_.layers) {
    for (const auto& plane : layer.planes) {
      for (const auto block : blocks) {
        for (std::uint32_t t = 0; t < layout_.block_tokens; ++t) {
          for (std::uint32_t h = 0; h < plane.heads; ++h) {
            noise(plane.region,
                  plane.base + block.value * plane.block_stride + t * plane.token_stride +
                      h * plane.head_stride,
                  plane.head_bytes);
          }
        }
      }
    }
  }
  if (!slot) return;
  for (const auto& state : layout_.states)
    noise(state.region, state.base + *slot * state.slot_stride, state.slot_bytes);
}

std::string cache_model::is_there(const std::vector<block_id>& blocks, layer_span layers,
                                  token_span tokens, const content& request) {
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

void cache_model::arrived(const std::vector<block_id>& blocks, token_span tokens,
                          std::optional<std::uint32_t> slot, const content& request) {
  const auto expect = [&](std::uint32_t region, std::uint64_t at) {
    std::memcpy(expected_[region].data() + at, piece_.data(), piece_.size());
  };
  each_piece(blocks, all_layers(), tokens, request, expect);
  if (slot) each_state(*slot, request.seed, expect);
}

std::string cache_model::torn(const std::vector<block_id>& blocks, token_span tokens,
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
    for (std::uint32_t t = 0; t < layout_.block_tokens; ++t) {
      for (std::uint32_t h = 0; h < plane.heads; ++h) {
        const auto at = plane.base + block.value * plane.block_stride + t * plane.token_stride +
                        h * plane.head_stride;
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
    // Said once.
    std::memcpy(expected_[i].data(), regions_[i].data(), regions_[i].size());
  }
  return wrong;
}

std::string cache_model::place_of(std::size_t region, std::uint64_t offset) const {
  for (std::size_t l = 0; l < layout_.layers.size(); ++l) {
    for (std::size_t p = 0; p < layout_.layers[l].planes.size(); ++p) {
      const auto& plane = layout_.layers[l].planes[p];
      if (plane.region != region) continue;
      for (std::uint32_t b = 0; b < layout_.blocks; ++b) {
        for (std::uint32_t t = 0; t < layout_.block_tokens; ++t) {
          for (std::uint32_t h = 0; h < plane.heads; ++h) {
            const auto at = plane.base + b * plane.block_stride + t * plane.token_stride +
                            h * plane.head_stride;
            if (offset < at || offset >= at + plane.head_bytes) continue;
            return "layer " + std::to_string(l) + " plane " + std::to_string(p) + " block " +
                   std::to_string(b) + " token " + std::to_string(t) + " local head " +
                   std::to_string(h);
          }
        }
      }
    }
  }
  for (const auto& state : layout_.states) {
    if (state.region != region || offset < state.base || state.slot_stride == 0) continue;
    const auto slot = (offset - state.base) / state.slot_stride;
    if (slot < state.slots) return state.name + " slot " + std::to_string(slot);
  }
  return "padding, region " + std::to_string(region) + " offset " + std::to_string(offset);
}

}  // namespace troupe::engine_fuzz
