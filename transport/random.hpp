#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace troupe::transport {

/// Fills `out` from the kernel's generator. Nobody can guess what it gives.
void random_bytes(std::span<std::byte> out);
/// An unguessable number that is not 0.
[[nodiscard]] std::uint64_t random_id();

}  // namespace troupe::transport
