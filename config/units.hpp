#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

/// Durations and sizes in the deployment file: a whole number, at most one space, a unit.
namespace troupe::config {

/// Largest size that is accepted anywhere, in bytes (the end of any region).
inline constexpr std::uint64_t max_size = std::uint64_t{1} << 60U;
/// Longest duration that is accepted anywhere.
inline constexpr std::chrono::milliseconds max_duration = std::chrono::hours{24 * 365};

/// Parses "100ms", "1 s", "5min", "1h". Empty if the text is not a duration, lacks its unit, or
/// exceeds `max_duration`. `m` is not a unit: it could be a minute or a month, or a mistyped `ms`.
[[nodiscard]] std::optional<std::chrono::milliseconds> parse_duration(std::string_view text);

/// Parses "512B", "64KiB", "1 GiB", "2TiB" (powers of 1024), "500MB" (powers of 1000: KB, MB, GB,
/// TB). Empty if the text is not a size, lacks its unit, or exceeds `max_size`. `K`, `M`, `G` alone
/// are not units: people use them for both powers.
[[nodiscard]] std::optional<std::uint64_t> parse_size(std::string_view text);

/// In the largest unit that is exact; `parse_duration` returns the same value.
[[nodiscard]] std::string format_duration(std::chrono::milliseconds value);
/// In the largest power of 1024 that is exact; `parse_size` returns the same value.
[[nodiscard]] std::string format_size(std::uint64_t bytes);

}  // namespace troupe::config
