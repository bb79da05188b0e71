#pragma once

#include <memory>

#include "troupe/transport/backend.hpp"
#include "troupe/transport/backend_context.hpp"

namespace troupe::transport {

namespace staging {
class staging_pool;
}

/// Links between processes of one host that copy into each other's mapped memory: memfd regions
/// (what `endpoint::allocate` gives) by loads and stores, memory of the engine by
/// process_vm_readv/writev where the kernel permits it. Nothing of it has a name in a file system,
/// so nothing survives a killed process. Memory of GPUs moves by way of pinned memory that both ends
/// have mapped.
///
/// Never fails: what cannot be used here says so in `probe`.
[[nodiscard]] std::unique_ptr<backend> make_shm_backend(
    backend_context& context, std::shared_ptr<staging::staging_pool> staging);

}  // namespace troupe::transport
