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

/// What a time is multiplied with that a test configures and then waits for, such as a deadline or a heartbeat's
/// time-out: what comes to be in it takes so much longer here.
inline const int slowness = sanitized ? 4 : have_verbs() ? 8 : 1;

/// What a limit of time is multiplied with that bounds a wait for another process, or judges how soon it was heard
/// of: other tests run at the same time, and whoever waits in vain waits longer only then. Not for times that are
/// part of what is tested.
inline const int patience = have_verbs() ? 8 : 4;

}  // namespace troupe::testing
