#pragma once

#include <cstdlib>

namespace troupe::testing {

/// Whether a sanitizer is in this program. It makes it several times slower, and keeps memory of
/// its own that grows with what it has seen, so that the memory of the process says nothing.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool sanitized = true;
#else
inline constexpr bool sanitized = false;
#endif

/// How many of so many tries with random input are made: a tenth under a sanitizer, where each takes ten times
/// as long or more. What it looks for shows in the first of them or not at all.
template <class Count>
constexpr Count tries(Count all) {
  return sanitized ? all / 10 : all;
}

/// Whether this runs in the virtual machine of tests/verbs: it has RDMA devices, and is slow.
inline bool have_verbs() {
  return std::getenv("TROUPE_VERBS") != nullptr;
}

/// What a limit of time is multiplied with that bounds a wait for another process, or judges how
/// soon it was heard of. Not for times that are part of what is tested, such as deadlines.
inline const int patience = sanitized ? 4 : have_verbs() ? 8 : 1;

}  // namespace troupe::testing
