#pragma once

#include <cstddef>
#include <cstdint>

#include "troupe/kvcache/result.hpp"
#include "troupe/transport/owned_fd.hpp"

namespace troupe::transport::shm {

/// A fresh memfd of `size` zeros whose size is sealed. `name` appears in /proc. `pool_exhausted`.
[[nodiscard]] result<owned_fd> make_sealed(const char* name, std::uint64_t size);

/// Maps a memfd that a peer handed over, shared, readable and writable, not inherited by forked
/// children. `unauthorized` unless the file has at least `size` bytes and is sealed against
/// shrinking: else an access could raise SIGBUS. `pool_exhausted` when the OS cannot map it. The
/// caller unmaps.
[[nodiscard]] result<std::byte*> map_sealed(int fd, std::uint64_t size);

}  // namespace troupe::transport::shm
