#pragma once

#include <cstdint>
#include <fstream>
#include <string>

#include <malloc.h>
#include <sys/prctl.h>
#include <sys/types.h>
#include <unistd.h>

/// How much memory a process has, for tests that say of something that it leaves none behind.
namespace troupe::testing {

/// From here on the kernel gives neither this process nor those that it starts pages of 2 MiB. A process that only
/// uses again what it has freed could else become larger by any number of these, whenever the kernel finds the time
/// to put small pages together.
inline void keep_pages_small() {
  ::prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0);
}

/// Bytes that are in memory of a process; for one that was started after keep_pages_small().
inline std::uint64_t resident_bytes(pid_t pid) {
  std::ifstream in{"/proc/" + std::to_string(pid) + "/statm"};
  std::uint64_t all = 0;
  std::uint64_t resident = 0;
  in >> all >> resident;
  return resident * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

/// Of this process.
inline std::uint64_t resident_bytes() {
  keep_pages_small();
  return resident_bytes(::getpid());
}

/// Bytes that this process holds of the allocator, whatever that itself keeps of the kernel's pages.
inline std::uint64_t allocated_bytes() {
  const auto heap = ::mallinfo2();
  return heap.uordblks + heap.hblkhd;
}

}  // namespace troupe::testing
