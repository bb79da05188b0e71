#pragma once

/// The work of the tcp rows, the same for ours and the rival.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace troupe::bench {

inline constexpr std::uint64_t region_size = std::uint64_t{256} << 20;
inline constexpr std::size_t blocks_per_batch = 256;
inline constexpr std::size_t batches_in_flight = 4;
inline constexpr std::size_t message_size = 4096;  ///< of the latency rows
inline constexpr auto round_time = std::chrono::milliseconds{250};

/// The order in which the blocks of a region are used: adjacent blocks are never consecutive.
[[nodiscard]] std::vector<std::uint64_t> scattered(std::size_t block);

}  // namespace troupe::bench
