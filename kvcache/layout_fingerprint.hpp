#pragma once

#include <array>
#include <cstdint>

namespace troupe::kvcache {

struct cache_layout;

/// A short word for what two layouts must agree in; all zero: not said.
using layout_fingerprint = std::array<std::uint8_t, 16>;

/// XXH3-128, big-endian, of what `check_compatible` compares. Layouts with equal ones are compatible; so
/// may be those of which one does not say its model.
/// For choosing partners quickly: a handshake compares the layouts themselves, to name what differs. The
/// layout must have passed `check`.
///
/// A layout that says `total_layers` is one of a pipeline. No rank of it knows the layers of the others, and
/// all of them must say one word: it is of what is the same for the whole model (dtype, block tokens, number of
/// layers, the model's hash, block tokens of each group). Equal ones may be incompatible then; a hash of the
/// model makes that as good as impossible. An engine that is not divided, and is to be placed with engines
/// that are, says `total_layers`, too.
[[nodiscard]] layout_fingerprint fingerprint_of(const cache_layout& layout);

}  // namespace troupe::kvcache
