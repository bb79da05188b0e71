#pragma once

#include <cstddef>
#include <cstdint>

#include "troupe/kvcache/result.hpp"

namespace troupe::transport::shm {

/// Maps a memfd that a peer handed over, shared, readable and writable, not inherited by forked
/// children. The file must have at least `size` bytes and be sealed against shrinking, else an
/// access could raise SIGBUS here: `unauthorized`. `pool_exhausted` when the OS cannot map it. The
/// caller unmaps.
[[nodiscard]] result<std::byte*> map_sealed(int fd, std::uint64_t size);

}  // namespace troupe::transport::shm
