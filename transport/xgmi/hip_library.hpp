#pragma once

namespace troupe::transport::xgmi {

/// AMD's runtime, libamdhip64, is opened at run time instead of linked, so that one binary serves
/// hosts with and without it: `hip_library.cpp` defines each of its functions that Troupe or the
/// compiled kernels call. On a host without the library every call reports that there is no GPU.
///
/// Finds a function of that library or of its dependencies; null if there is none. Thread-safe.
[[nodiscard]] void* hip_function(const char* name);

}  // namespace troupe::transport::xgmi
