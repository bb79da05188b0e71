#pragma once

#include <array>
#include <cstdint>

namespace troupe::kvcache {

struct cache_layout;

/// A hash of everything that two layouts must agree in; all zero if not given.
using layout_fingerprint = std::array<std::uint8_t, 16>;

/// XXH3-128, big-endian, of the fields that `check_compatible` compares. Layouts with equal
/// fingerprints are compatible; layouts with different ones may be, too, if one of them does not
/// give its model. A fingerprint serves to choose partners quickly; a handshake compares the layouts
/// themselves, to name the difference. The layout must have passed `check`.
///
/// A layout with `total_layers` belongs to a pipeline. No rank knows the layers of the other ranks,
/// but all ranks must have the same fingerprint, so it covers only what is the same for the whole
/// model (dtype, block tokens, number of layers, the model's hash, block tokens of each group).
/// Layouts with equal fingerprints may then be incompatible; a hash of the model makes that
/// practically impossible. An undivided engine that is to be placed with pipelined engines must set
/// `total_layers`, too.
[[nodiscard]] layout_fingerprint fingerprint_of(const cache_layout& layout);

}  // namespace troupe::kvcache
