#pragma once

#include <cstdint>
#include <fstream>
#include <string>

#include <malloc.h>
#include <sys/prctl.h>
#include <sys/types.h>
#include <unistd.h>

/// The memory of a process, for tests that check for leaks.
namespace troupe::testing {

/// From now on the kernel gives this process and its children no pages of 2 MiB. Otherwise a
/// process that only reuses freed memory could still grow by any number of such pages, whenever the
/// kernel finds time to merge small ones.
inline void keep_pages_small() {
  ::prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0);
}

/// Resident bytes of a process; call keep_pages_small() before starting it.
inline std::uint64_t resident_bytes(pid_t pid) {
  std::ifstream in{"/proc/" + std::to_string(pid) + "/statm"};
  std::uint64_t all = 0;
  std::uint64_t resident = 0;
  in >> all >> resident;
  return resident * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

/// Resident bytes of this process.
inline std::uint64_t resident_bytes() {
  keep_pages_small();
  return resident_bytes(::getpid());
}

/// Bytes that this process holds from the allocator, however many pages the allocator keeps of the
/// kernel.
inline std::uint64_t allocated_bytes() {
  const auto heap = ::mallinfo2();
  return heap.uordblks + heap.hblkhd;
}

}  // namespace troupe::testing
