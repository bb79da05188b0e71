#pragma once

/// Which of a model's layers the ranks of a replica hold.
///
/// A replica of P parts of T tensor-parallel ranks each has P * T ranks: rank p * T + t is
/// tensor-parallel rank t of part p. Parts are in the order of their layers, and each layer is in
/// exactly one part. An undivided replica is one part.

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
/// The range of the model's layers that the layout holds.
[[nodiscard]] layer_range held_layers(const cache_layout& layout) noexcept;
/// Whether some of the model's layers are in another layout.
[[nodiscard]] bool is_part(const cache_layout& layout) noexcept;

/// The range of the model's layers that both hold; may be empty.
[[nodiscard]] layer_range shared_layers(const cache_layout& one,
                                        const cache_layout& other) noexcept;
/// The states that both hold, as positions in each, matched by position if both hold a whole model,
/// else by name. The layouts must be compatible.
[[nodiscard]] std::vector<std::pair<std::uint32_t, std::uint32_t>> shared_states(
    const cache_layout& one, const cache_layout& other);

/// How the layout contradicts being rank `rank` of a replica of `ranks` ranks (empty if their
/// number is not known): the end of a sentence, such as "says rank 0 of 2". Empty if there is no
/// contradiction.
[[nodiscard]] std::optional<std::string> contradicts_rank(const cache_layout& layout,
                                                          std::uint32_t rank,
                                                          std::optional<std::uint32_t> ranks);

/// The layout of one node of a replica. Owns nothing.
struct source_layout {
  std::string_view node;
  const cache_layout* layout{nullptr};
};
/// Whether the ranks of these sources hold each layer of the model exactly once for each
/// tensor-parallel rank, and likewise each state of `destination`. Each source must have passed
/// `check` and be compatible with `destination`. `layout_mismatch` naming the layers or the state
/// that no source holds, or the two sources that hold the same.
[[nodiscard]] result<void> check_covers(const cache_layout& destination,
                                        std::span<const source_layout> sources);

}  // namespace troupe::kvcache
