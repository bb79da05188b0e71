#pragma once

#include <cstdlib>

namespace troupe::testing {

/// Whether this program runs under a sanitizer, which makes it several times slower and keeps a
/// growing amount of memory of its own. The memory use of such a process proves nothing.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool sanitized = true;
#else
inline constexpr bool sanitized = false;
#endif

/// The number of random tries to make: a tenth under a sanitizer, where each takes ten times as
/// long or more. Sanitizers find defects in the first tries or not at all.
template <class Count>
constexpr Count tries(Count all) {
  return sanitized ? all / 10 : all;
}

/// Whether this runs in the virtual machine of tests/verbs, which has RDMA devices and is slow.
inline bool have_verbs() {
  return std::getenv("TROUPE_VERBS") != nullptr;
}

/// The factor for a time that a test configures and then waits for, such as a deadline or a
/// heartbeat time-out: what must fit into it takes this much longer here.
inline const int slowness = sanitized ? 4 : have_verbs() ? 8 : 1;

/// The factor for a time limit on a wait for another process, or on how soon it must be heard of:
/// other tests run at the same time, and only a failing test waits longer. Not for times that are
/// themselves under test.
inline const int patience = have_verbs() ? 8 : 4;

}  // namespace troupe::testing
