#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace troupe::transport {

/// Fills `out` with unguessable bytes from the kernel's generator.
void random_bytes(std::span<std::byte> out);
/// An unguessable number, never 0.
[[nodiscard]] std::uint64_t random_id();

}  // namespace troupe::transport
