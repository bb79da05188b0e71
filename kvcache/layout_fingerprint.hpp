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
[[nodiscard]] layout_fingerprint fingerprint_of(const cache_layout& layout);

}  // namespace troupe::kvcache
