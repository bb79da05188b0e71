#include "troupe/config/units.hpp"

#include <array>
#include <charconv>
#include <span>
#include <system_error>

namespace troupe::config {
namespace {

struct unit {
  std::string_view name;
  std::uint64_t factor;
};

constexpr std::array<unit, 4> duration_units{
    {{"ms", 1}, {"s", 1000}, {"min", 60'000}, {"h", 3'600'000}}};
constexpr std::array<unit, 9> size_units{{{"B", 1},
                                          {"KiB", std::uint64_t{1} << 10U},
                                          {"MiB", std::uint64_t{1} << 20U},
                                          {"GiB", std::uint64_t{1} << 30U},
                                          {"TiB", std::uint64_t{1} << 40U},
                                          {"KB", 1000},
                                          {"MB", 1'000'000},
                                          {"GB", 1'000'000'000},
                                          {"TB", 1'000'000'000'000}}};
constexpr std::size_t binary_size_units = 5;  // at the front of `size_units`, ascending

std::optional<std::uint64_t> parse_quantity(std::string_view text, std::span<const unit> units,
                                            std::uint64_t limit) {
  std::uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{}) return std::nullopt;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  if (text.starts_with(' ')) text.remove_prefix(1);
  for (const auto& known : units) {
    if (text != known.name) continue;
    if (number > limit / known.factor) return std::nullopt;
    return number * known.factor;
  }
  return std::nullopt;
}

/// `units` ascend by factor, and each divides the next.
std::string format_quantity(std::uint64_t value, std::span<const unit> units) {
  unit best = units.front();
  for (const auto& candidate : units) {
    if (value != 0 && value % candidate.factor == 0) best = candidate;
  }
  return std::to_string(value / best.factor) + std::string{best.name};
}

}  // namespace

std::optional<std::chrono::milliseconds> parse_duration(std::string_view text) {
  const auto value =
      parse_quantity(text, duration_units, static_cast<std::uint64_t>(max_duration.count()));
  if (!value) return std::nullopt;
  return std::chrono::milliseconds{static_cast<std::int64_t>(*value)};
}

std::optional<std::uint64_t> parse_size(std::string_view text) {
  return parse_quantity(text, size_units, max_size);
}

std::string format_duration(std::chrono::milliseconds value) {
  return format_quantity(static_cast<std::uint64_t>(value.count()), duration_units);
}

std::string format_size(std::uint64_t bytes) {
  return format_quantity(bytes, std::span{size_units}.first(binary_size_units));
}

}  // namespace troupe::config
