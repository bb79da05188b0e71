#pragma once

#include <cstdint>
#include <memory>

namespace troupe::transport {

namespace xgmi {
struct gpu_site;
}

/// The options of the `xgmi` backend.
struct xgmi_options {
  /// Thread blocks that copies may take on each GPU; the rest stays with the engine's kernels. With
  /// 64 (on a GPU with bulk copies) each block is light: 128 threads and 68 KiB of shared memory,
  /// so an engine's blocks run beside it. With fewer, blocks are heavier: 384 threads and 200 KiB
  /// for 16.
  std::uint32_t copy_blocks{64};
  /// Runs of at least this many bytes go through the copy engine, which uses no processors of the
  /// GPU. For shorter runs its start costs more than it gains.
  std::uint64_t engine_bytes{std::uint64_t{16} << 20};
  /// Whether kernels may use bulk copies on GPUs that have them.
  bool bulk{true};
  /// The GPUs to use; null for those of this process. For tests.
  std::shared_ptr<xgmi::gpu_site> site{};
};

}  // namespace troupe::transport
