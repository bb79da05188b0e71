#pragma once

/// Which of a model's layers the ranks of a replica hold.
///
/// A replica of P parts of T tensor-parallel ranks each has P * T ranks: rank p * T + t is tensor-parallel
/// rank t of part p. Parts follow each other as their layers do, and each layer is in one of them. A replica
/// that is not divided is one part.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "troupe/kvcache/layout.hpp"
#include "troupe/kvcache/result.hpp"

namespace troupe::kvcache {

/// How many layers the model has.
[[nodiscard]] std::uint32_t total_layers_of(const cache_layout& layout) noexcept;
/// Those of the model's that are in the layout.
[[nodiscard]] layer_range held_layers(const cache_layout& layout) noexcept;
/// Whether some of the model's layers are in another layout.
[[nodiscard]] bool is_part(const cache_layout& layout) noexcept;

/// Those of the model's layers that both hold; none: an empty range.
[[nodiscard]] layer_range shared_layers(const cache_layout& one,
                                        const cache_layout& other) noexcept;
/// The states that both hold, by their positions in each: equal positions where both hold all of a model,
/// else equal names. Of two layouts that are compatible.
[[nodiscard]] std::vector<std::pair<std::uint32_t, std::uint32_t>> shared_states(
    const cache_layout& one, const cache_layout& other);

/// What the layout says of its rank, where it cannot be that of rank `rank` of a replica of `ranks` ranks
/// (empty: not known how many): "says rank 0 of 2", the end of a sentence about it. Empty: it can.
[[nodiscard]] std::optional<std::string> contradicts_rank(const cache_layout& layout,
                                                          std::uint32_t rank,
                                                          std::optional<std::uint32_t> ranks);

/// The layout of one node of a replica. Owns nothing.
struct source_layout {
  std::string_view node;
  const cache_layout* layout{nullptr};
};
/// Whether each layer of the model is held once by the ranks of these sources, for each tensor-parallel rank,
/// and each state of `destination` likewise. Each has passed `check` and is compatible with `destination`.
/// `layout_mismatch` naming the layers or the state that nobody holds, or who the two are that do.
[[nodiscard]] result<void> check_covers(const cache_layout& destination,
                                        std::span<const source_layout> sources);

}  // namespace troupe::kvcache
