#pragma once

#include <cstdint>
#include <memory>

namespace troupe::transport {

namespace xgmi {
struct gpu_site;
}

/// What a node may choose of its `xgmi` backend.
struct xgmi_options {
  /// Thread blocks of each GPU that copies may take: the rest goes on with the engine's kernels. Of
  /// 64 (on a GPU that copies in bulk) each is light: 128 threads and 68 KiB of shared memory, beside
  /// which an engine's blocks run. Fewer are heavier: 384 threads and 200 KiB for 16.
  std::uint32_t copy_blocks{64};
  /// Runs of at least so many bytes go by the copy engine, which takes nothing of the processors.
  /// Below, its start costs more than it wins.
  std::uint64_t engine_bytes{std::uint64_t{16} << 20};
  /// Whether kernels may use the GPU's bulk copies where it has them.
  bool bulk{true};
  /// The GPUs to work with; null: those of this process. For tests.
  std::shared_ptr<xgmi::gpu_site> site{};
};

}  // namespace troupe::transport
