#pragma once

#include <string>

#include "troupe/transport/backend.hpp"

namespace troupe::transport::xgmi {

/// Whether kernels of one GPU can access memory of another, both named by bus id. Asks NVIDIA's
/// management library, libnvidia-ml, which knows every GPU given to the container and not only
/// those in CUDA_VISIBLE_DEVICES. The first call opens the library; a failure is final. The reason
/// against it is a clause about the peer's GPU, followed by what to do behind a ';'. Thread-safe.
[[nodiscard]] usability nvml_reaches(const std::string& gpu, const std::string& peer);

}  // namespace troupe::transport::xgmi
