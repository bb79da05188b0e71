#pragma once

#include <memory>

#include "troupe/transport/backend.hpp"
#include "troupe/transport/backend_context.hpp"

namespace troupe::transport {

namespace staging {
class staging_pool;
}

/// Links between processes of one host that copy into each other's mapped memory: memfd regions
/// (from `endpoint::allocate`) by loads and stores, engine memory by process_vm_readv/writev where
/// the kernel permits it. No memory has a name in a file system, so nothing survives a killed
/// process. GPU memory moves by way of pinned memory that both ends have mapped.
///
/// Never fails: if the backend cannot be used here, its `probe` says so.
[[nodiscard]] std::unique_ptr<backend> make_shm_backend(
    backend_context& context, std::shared_ptr<staging::staging_pool> staging);

}  // namespace troupe::transport
