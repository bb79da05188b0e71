#pragma once

#include <memory>

#include "troupe/transport/backend.hpp"
#include "troupe/transport/backend_context.hpp"
#include "troupe/transport/xgmi/gpu_site.hpp"

namespace troupe::transport {

/// Links between processes of one host whose memory is on GPUs: the GPU at one end copies from or
/// to the other end's memory over the GPUs' own fabric, or within one GPU. Creating the backend
/// never fails: `probe` says why it cannot be used, also after a GPU is lost while the node runs.
[[nodiscard]] std::unique_ptr<backend> make_xgmi_backend(backend_context& context,
                                                         std::shared_ptr<xgmi::gpu_site> site);

}  // namespace troupe::transport
