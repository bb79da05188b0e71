#include "troupe/deploy/reference_engine/number_format.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <iterator>
#include <vector>

namespace troupe::reference {

namespace {

/// All values of a small format, in the order of their codes: the positive ones ascend, so encoding
/// is a search without bit tricks.
class value_table {
 public:
  value_table(int exponent_bits, int fraction_bits, std::uint32_t largest_code)
      : top_{largest_code} {
    const int bias = (1 << (exponent_bits - 1)) - 1;
    sign_ = std::uint32_t{1} << (exponent_bits + fraction_bits);
    positive_.reserve(largest_code + 1);
    for (std::uint32_t code = 0; code <= largest_code; ++code) {
      const int exponent = static_cast<int>(code >> fraction_bits);
      const auto fraction = static_cast<float>(code & ((1u << fraction_bits) - 1));
      const float scaled = std::ldexp(fraction, -fraction_bits);
      positive_.push_back(exponent == 0 ? std::ldexp(scaled, 1 - bias)
                                        : std::ldexp(1.0f + scaled, exponent - bias));
    }
  }

  [[nodiscard]] std::uint32_t encode(float value) const noexcept {
    const std::uint32_t sign = std::signbit(value) ? sign_ : 0;
    const float magnitude = std::fabs(value);
    if (!(magnitude < positive_[top_])) return sign | top_;
    const auto above = std::upper_bound(positive_.begin(), positive_.end(), magnitude);
    const auto high = static_cast<std::uint32_t>(std::distance(positive_.begin(), above));
    const std::uint32_t low = high - 1;
    const float to_low = magnitude - positive_[low];
    const float to_high = positive_[high] - magnitude;
    const bool up = to_high < to_low || (to_high == to_low && low % 2 == 1);
    return sign | (up ? high : low);
  }

  [[nodiscard]] float decode(std::uint32_t code) const noexcept {
    const float magnitude = positive_[std::min(code & (sign_ - 1), top_)];
    return (code & sign_) != 0 ? -magnitude : magnitude;
  }

 private:
  std::vector<float> positive_;
  std::uint32_t sign_{0};
  std::uint32_t top_{0};
};

const value_table& fp16_values() {
  static const value_table table{5, 10, 0x7bff};
  return table;
}
const value_table& fp8_values() {
  static const value_table table{4, 3, 0x7e};
  return table;
}

std::uint16_t to_bf16(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounding = 0x7fffu + ((bits >> 16) & 1u);
  return static_cast<std::uint16_t>((bits + rounding) >> 16);
}

template <class Code, class Encode>
void store_each(std::span<const float> from, std::byte* to, Encode encode) noexcept {
  for (std::size_t i = 0; i < from.size(); ++i) {
    const auto code = static_cast<Code>(encode(from[i]));
    std::memcpy(to + i * sizeof(Code), &code, sizeof(Code));
  }
}

template <class Code, class Decode>
void load_each(const std::byte* from, std::span<float> to, Decode decode) noexcept {
  for (std::size_t i = 0; i < to.size(); ++i) {
    Code code{};
    std::memcpy(&code, from + i * sizeof(Code), sizeof(Code));
    to[i] = decode(code);
  }
}

}  // namespace

std::optional<number_format> number_format_from(std::string_view dtype) noexcept {
  if (dtype == "fp32") return number_format::fp32;
  if (dtype == "bf16") return number_format::bf16;
  if (dtype == "fp16") return number_format::fp16;
  if (dtype == "fp8") return number_format::fp8;
  return std::nullopt;
}

std::uint32_t element_bytes(number_format format) noexcept {
  switch (format) {
    case number_format::fp32: return 4;
    case number_format::bf16:
    case number_format::fp16: return 2;
    case number_format::fp8: return 1;
  }
  return 0;
}

void store_numbers(number_format format, std::span<const float> from, std::byte* to) noexcept {
  switch (format) {
    case number_format::fp32: std::memcpy(to, from.data(), from.size_bytes()); return;
    case number_format::bf16: store_each<std::uint16_t>(from, to, to_bf16); return;
    case number_format::fp16:
      store_each<std::uint16_t>(from, to, [](float v) { return fp16_values().encode(v); });
      return;
    case number_format::fp8:
      store_each<std::uint8_t>(from, to, [](float v) { return fp8_values().encode(v); });
      return;
  }
}

void load_numbers(number_format format, const std::byte* from, std::span<float> to) noexcept {
  switch (format) {
    case number_format::fp32: std::memcpy(to.data(), from, to.size_bytes()); return;
    case number_format::bf16:
      load_each<std::uint16_t>(
          from, to, [](std::uint16_t c) { return std::bit_cast<float>(std::uint32_t{c} << 16); });
      return;
    case number_format::fp16:
      load_each<std::uint16_t>(from, to, [](std::uint16_t c) { return fp16_values().decode(c); });
      return;
    case number_format::fp8:
      load_each<std::uint8_t>(from, to, [](std::uint8_t c) { return fp8_values().decode(c); });
      return;
  }
}

}  // namespace troupe::reference
