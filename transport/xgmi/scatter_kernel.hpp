#pragma once

#include "troupe/transport/xgmi/copy_item.hpp"

/// The interface to the file that a device compiler reads. Errors and streams are the driver's, as
/// numbers and pointers.
namespace troupe::transport::xgmi {

/// Makes the driver load the kernels for the current device. Otherwise it loads each kernel at its
/// first launch and then waits for the device's work, which must not include a stream that is held
/// until a copy has arrived. Returns whether the kernels are loaded.
bool load_copies();
/// Returns whether `copy_way::bulk` was compiled in for the current device and can be launched on
/// it, by asking the driver for the memory that it needs. Call once per device, before the first
/// launch.
[[nodiscard]] bool prepare_bulk_copies();
/// Launches on the current device. Returns the driver's error number, 0 on success.
[[nodiscard]] int launch_copy(void* stream, const copy_launch& what);

}  // namespace troupe::transport::xgmi
