#pragma once

/// What is done to GPU memory bare, beside Troupe: the rivals, and the kernels without a link.

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "xgmi_side.hpp"

namespace troupe::bench {

/// The other process's two pools, opened here.
struct opened_pools {
  std::shared_ptr<const transport::xgmi::opened_allocation> keep_source, keep_target;
  std::byte* source{nullptr};
  std::byte* target{nullptr};
};
void export_pools(const control& to, const gpu_memory& mine);
[[nodiscard]] opened_pools open_pools(const control& from, const gpu_memory& mine);

/// Microseconds for copies by the driver on one stream, from the first call until the last byte.
class bare_copies {
 public:
  bare_copies(const gpu_memory& mine, const opened_pools& theirs);
  bare_copies(const bare_copies&) = delete;
  bare_copies& operator=(const bare_copies&) = delete;
  ~bare_copies();

  [[nodiscard]] double contiguous(std::uint64_t bytes, transport::direction dir);
  [[nodiscard]] double one_per_block(std::span<const segment> segments, transport::direction dir);

 private:
  void copy(std::uint64_t here, std::uint64_t there, std::uint64_t bytes, transport::direction dir);
  [[nodiscard]] double until_done(clock_type::time_point since);

  const gpu_memory& mine_;
  const opened_pools& theirs_;
  transport::xgmi::gpu_stream stream_;
  transport::xgmi::gpu_event event_;
};

/// The kernels with other settings than the backend's, without a link: GB/s to standard error.
void sweep(const gpu_memory& mine, const opened_pools& theirs);

}  // namespace troupe::bench
