#pragma once

#include "troupe/transport/xgmi/copy_item.hpp"

/// The door between the file that a device compiler reads and the rest. Errors and streams are the
/// driver's, as numbers and pointers.
namespace troupe::transport::xgmi {

/// Has the driver load the kernels for the current device, which it else does at the first launch of
/// each, and then waits for what the device does: a stream that is held until a copy has come
/// must not be among that. Whether they are loaded.
bool load_copies();
/// Whether `copy_way::bulk` was compiled in for the current device, and may be launched on it: asks
/// the driver for the memory that it needs. Once per device, before the first launch.
[[nodiscard]] bool prepare_bulk_copies();
/// On the current device. The driver's error number, 0: launched.
[[nodiscard]] int launch_copy(void* stream, const copy_launch& what);

}  // namespace troupe::transport::xgmi
