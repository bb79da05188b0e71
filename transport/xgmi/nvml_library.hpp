#pragma once

#include <string>

#include "troupe/transport/backend.hpp"

namespace troupe::transport::xgmi {

/// Whether kernels of one GPU may touch memory of another, by NVIDIA's management library, libnvidia-ml, which knows
/// every GPU that was given to the container and not only those of CUDA_VISIBLE_DEVICES. Both are named by bus id. The
/// library is opened where it is, at the first call; where that fails no later one tries again. What cannot be used has
/// a clause about the peer's GPU for a reason, and what to do behind a ';'. Thread-safe.
[[nodiscard]] usability nvml_reaches(const std::string& gpu, const std::string& peer);

}  // namespace troupe::transport::xgmi
