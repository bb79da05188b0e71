#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace troupe::reference {

/// How the cache stores an element. Values are rounded to nearest, ties to even; values too large
/// for fp16 or fp8 become the largest that fits.
enum class number_format : std::uint8_t {
  fp32,
  bf16,
  fp16,
  fp8,  ///< 1 sign, 4 exponent, 3 fraction bits, no infinities
};

/// The format of a dtype name; empty if it is not supported here.
[[nodiscard]] std::optional<number_format> number_format_from(std::string_view dtype) noexcept;
[[nodiscard]] std::uint32_t element_bytes(number_format format) noexcept;

/// `to` has `from.size() * element_bytes(format)` bytes, in the machine's byte order, unaligned.
void store_numbers(number_format format, std::span<const float> from, std::byte* to) noexcept;
/// The reverse of `store_numbers`.
void load_numbers(number_format format, const std::byte* from, std::span<float> to) noexcept;

}  // namespace troupe::reference
