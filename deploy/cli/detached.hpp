#pragma once

#include <cstdint>

#include "troupe/kvcache/result.hpp"

namespace troupe::deploy::cli {

/// On which cores a process goes on: on those that it was bound to, or on all that it may have.
enum class detached_cores : std::uint8_t { as_before, all };

/// Goes on as a process that is nobody's child, of a session of its own: this process ends here, with 0,
/// and a child of it returns. Its standard streams are /dev/null, its folder is the root, and every other
/// descriptor is closed but `keep` (-1: none). To be called before there is any other thread.
[[nodiscard]] result<void> detach(int keep, detached_cores cores);

}  // namespace troupe::deploy::cli
