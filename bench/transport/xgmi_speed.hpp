#pragma once

/// Bare work on GPU memory, without Troupe: the rivals, and the kernels without a link.

#include <memory>

#include "xgmi_bare.hpp"
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
/// Copies by the GPU here between its memory and the other's.
[[nodiscard]] bare_copies bare_copies_of(const gpu_memory& mine, const opened_pools& theirs);

/// The kernels with other settings than the backend's, without a link: GB/s to standard error.
void sweep(const gpu_memory& mine, const opened_pools& theirs);

}  // namespace troupe::bench
