#pragma once

namespace troupe::transport::xgmi {

/// AMD's runtime, libamdhip64, is opened where it is and not linked, so that one binary serves hosts with and without
/// it: `hip_library.cpp` defines each call of it that Troupe makes, also those of compiled kernels. Where it is not,
/// every call says that there is no GPU.
///
/// A function of that library, or of one that it brings; null where there is none. Thread-safe.
[[nodiscard]] void* hip_function(const char* name);

}  // namespace troupe::transport::xgmi
