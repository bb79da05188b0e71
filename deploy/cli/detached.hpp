#pragma once

#include <cstdint>

#include "troupe/kvcache/result.hpp"

namespace troupe::deploy::cli {

/// The cores of a detached process: those that it was bound to, or all that it may use.
enum class detached_cores : std::uint8_t { as_before, all };

/// Detaches: this process exits with 0, and a child of it, in a session of its own, returns. The
/// child's standard streams are /dev/null, its folder is the root, and every other descriptor
/// except `keep` (-1: none) is closed. Call it before any other thread is made.
[[nodiscard]] result<void> detach(int keep, detached_cores cores);

}  // namespace troupe::deploy::cli
