#include "troupe/kvcache/layer_parts.hpp"

#include <algorithm>
#include <map>
#include <string_view>
#include <tuple>

namespace troupe::kvcache {
namespace {

std::string layers_text(layer_range layers, std::uint32_t total) {
  const auto last = layers.end - 1;
  std::string text = layers.begin == last
                         ? "layer " + std::to_string(last)
                         : "layers " + std::to_string(layers.begin) + " to " + std::to_string(last);
  return text + " of the model's " + std::to_string(total);
}

std::string rank_text(const cache_layout& layout) {
  return "rank " + std::to_string(layout.tp_rank) + " of " + std::to_string(layout.tp_size);
}

/// Names the tensor-parallel rank in a sentence, if there are several.
std::string of_rank(std::uint32_t rank, std::uint32_t ranks) {
  if (ranks == 1) return {};
  return " at tensor-parallel rank " + std::to_string(rank) + " of " + std::to_string(ranks);
}

std::string in_quotes(std::string_view name) {
  std::string text{"`"};
  text.append(name).append("`");
  return text;
}

unexpected held_by_none(const std::string& what) {
  return fail(errc::layout_mismatch,
              what + " held by none of the sources; name every rank of every part of the replica");
}

unexpected held_twice(const std::string& what, std::string_view one, std::string_view other) {
  return fail(errc::layout_mismatch,
              what + " held by " + in_quotes(one) + " and by " + in_quotes(other) +
                  "; in a replica each layer, with its states, is in one part");
}

std::string held(layer_range layers, std::uint32_t total) {
  return layers_text(layers, total) + (layers.count() == 1 ? " is" : " are");
}

/// Whether the sources can be ranks of one replica, judging by their layouts.
result<void> check_alike(std::span<const source_layout> sources) {
  const auto& first = sources.front();
  for (const auto& other : sources) {
    const auto differs = [&](const char* what, std::uint32_t here, std::uint32_t there) {
      return fail(errc::layout_mismatch,
                  in_quotes(first.node) + " has " + std::to_string(here) + what + ", " +
                      in_quotes(other.node) + " " + std::to_string(there) +
                      "; the sources of a receive are the ranks of one replica");
    };
    if (other.layout->tp_size != first.layout->tp_size) {
      return differs(" tensor-parallel ranks", first.layout->tp_size, other.layout->tp_size);
    }
    if (total_layers_of(*other.layout) != total_layers_of(*first.layout)) {
      return differs(" layers in all", total_layers_of(*first.layout),
                     total_layers_of(*other.layout));
    }
  }
  return {};
}

/// Whether, for each tensor-parallel rank, the ranges follow each other from the first layer to the
/// last.
result<void> check_layers_held(std::span<const source_layout> sources) {
  const auto ranks = sources.front().layout->tp_size;
  const auto total = total_layers_of(*sources.front().layout);
  std::vector<source_layout> sorted{sources.begin(), sources.end()};
  std::ranges::sort(sorted, {}, [](const source_layout& one) {
    return std::tuple{one.layout->tp_rank, one.layout->first_layer, one.node};
  });
  auto next = sorted.begin();
  for (std::uint32_t rank = 0; rank < ranks; ++rank) {
    std::uint32_t end = 0;  // of the layers held so far
    for (auto last = sorted.end(); next != sorted.end() && next->layout->tp_rank == rank; ++next) {
      const auto here = held_layers(*next->layout);
      if (here.begin > end) {
        return held_by_none(held({end, here.begin}, total) + of_rank(rank, ranks));
      }
      if (here.begin < end) {
        return held_twice(held({here.begin, std::min(end, here.end)}, total) + of_rank(rank, ranks),
                          last->node, next->node);
      }
      end = here.end;
      last = next;
    }
    if (end < total) return held_by_none(held({end, total}, total) + of_rank(rank, ranks));
  }
  return {};
}

result<void> check_states_held(const cache_layout& destination,
                               std::span<const source_layout> sources) {
  const auto ranks = sources.front().layout->tp_size;
  std::map<std::pair<std::string_view, std::uint32_t>, std::vector<std::string_view>> holders;
  for (const auto& source : sources) {
    for (const auto& state : source.layout->states) {
      holders[{state.name, source.layout->tp_rank}].push_back(source.node);
    }
  }
  for (const auto& state : destination.states) {
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
      const auto what = "state '" + state.name + "' is" + of_rank(rank, ranks);
      const auto who = holders.find({state.name, rank});
      if (who == holders.end()) return held_by_none(what);
      if (who->second.size() > 1) return held_twice(what, who->second[0], who->second[1]);
    }
  }
  return {};
}

}  // namespace

std::uint32_t total_layers_of(const cache_layout& layout) noexcept {
  return layout.total_layers != 0 ? layout.total_layers
                                  : static_cast<std::uint32_t>(layout.layers.size());
}

layer_range held_layers(const cache_layout& layout) noexcept {
  return {layout.first_layer,
          layout.first_layer + static_cast<std::uint32_t>(layout.layers.size())};
}

bool is_part(const cache_layout& layout) noexcept {
  return layout.layers.size() < total_layers_of(layout);
}

layer_range shared_layers(const cache_layout& one, const cache_layout& other) noexcept {
  const auto a = held_layers(one);
  const auto b = held_layers(other);
  const auto begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

std::vector<std::pair<std::uint32_t, std::uint32_t>> shared_states(const cache_layout& one,
                                                                   const cache_layout& other) {
  std::vector<std::pair<std::uint32_t, std::uint32_t>> shared;
  if (!is_part(one) && !is_part(other)) {
    for (std::uint32_t i = 0; i < one.states.size(); ++i) shared.emplace_back(i, i);
    return shared;
  }
  std::map<std::string_view, std::uint32_t> there;
  for (std::uint32_t i = 0; i < other.states.size(); ++i) there.emplace(other.states[i].name, i);
  for (std::uint32_t i = 0; i < one.states.size(); ++i) {
    const auto found = there.find(one.states[i].name);
    if (found != there.end()) shared.emplace_back(i, found->second);
  }
  return shared;
}

std::optional<std::string> contradicts_rank(const cache_layout& layout, std::uint32_t rank,
                                            std::optional<std::uint32_t> ranks) {
  const auto said = "says " + rank_text(layout);
  if (!is_part(layout)) {
    const bool fits = rank == layout.tp_rank && ranks.value_or(layout.tp_size) == layout.tp_size;
    return fits ? std::nullopt : std::optional{said};
  }
  const auto of_part = std::max(layout.tp_size, 1U);
  const auto part = rank / of_part;
  const auto here = held_layers(layout);
  const auto behind = total_layers_of(layout) - here.end;
  bool fits =
      rank % of_part == layout.tp_rank && (part == 0) == (here.begin == 0) && part <= here.begin;
  if (ranks) {
    // Each of the other parts has at least one layer.
    const auto parts = *ranks / of_part;
    fits = fits && *ranks % of_part == 0 && part < parts && (part + 1 == parts) == (behind == 0) &&
           parts - part - 1 <= behind;
  }
  if (fits) return std::nullopt;
  return said + " and " + layers_text(here, total_layers_of(layout)) +
         ": parts follow each other as their layers do, each of " + std::to_string(of_part) +
         (of_part == 1 ? " rank" : " ranks");
}

result<void> check_covers(const cache_layout& destination, std::span<const source_layout> sources) {
  if (sources.empty()) {
    const auto total = total_layers_of(destination);
    return held_by_none(held({0, total}, total));
  }
  if (auto ok = check_alike(sources); !ok) return ok;
  if (auto ok = check_layers_held(sources); !ok) return ok;
  return check_states_held(destination, sources);
}

}  // namespace troupe::kvcache
