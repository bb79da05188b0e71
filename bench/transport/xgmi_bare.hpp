#pragma once

/// The rival of GPU copies: the driver's own, bare.

#include <cstddef>
#include <cstdint>
#include <span>

#include "troupe/kvcache/segment.hpp"
#include "troupe/transport/backend.hpp"
#include "troupe/transport/xgmi/gpu_runtime.hpp"

#include "processes.hpp"

namespace troupe::bench {

/// The addresses that copies out of a memory read, and that copies into it write.
struct copy_ends {
  const std::byte* source{nullptr};
  std::byte* target{nullptr};
};

/// Microseconds for copies by the driver on one stream, from the first call until the last byte.
class bare_copies {
 public:
  /// Copies by GPU `gpu`, to whose memory `here` belongs.
  bare_copies(transport::xgmi::gpu_runtime& runtime, std::uint32_t gpu, copy_ends here,
              copy_ends there);
  bare_copies(const bare_copies&) = delete;
  bare_copies& operator=(const bare_copies&) = delete;
  ~bare_copies();

  [[nodiscard]] double contiguous(std::uint64_t bytes, transport::direction dir);
  [[nodiscard]] double one_per_block(std::span<const segment> segments, transport::direction dir);

 private:
  void copy(std::uint64_t here, std::uint64_t there, std::uint64_t bytes, transport::direction dir);
  [[nodiscard]] double until_done(clock_type::time_point since);

  transport::xgmi::gpu_runtime& runtime_;
  const copy_ends here_;
  const copy_ends there_;
  transport::xgmi::gpu_stream stream_;
  transport::xgmi::gpu_event event_;
};

}  // namespace troupe::bench
