#pragma once

/// Processes whose memory others may not reach by process_vm_readv, as in a container or with some
/// kernel settings. A root process reaches every process until it gives up its capabilities.

#include <array>
#include <cstdint>

#include <linux/capability.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

namespace troupe::testing {

/// Permanent, for the calling thread and the threads that it starts.
inline bool give_up_rights() {
  __user_cap_header_struct of{_LINUX_CAPABILITY_VERSION_3, 0};
  std::array<__user_cap_data_struct, _LINUX_CAPABILITY_U32S_3> none{};
  return ::syscall(SYS_capset, &of, none.data()) == 0;
}

/// While this object lives, no process without capabilities reaches the memory of this one.
class hidden_memory {
 public:
  hidden_memory() { ::prctl(PR_SET_DUMPABLE, 0, 0, 0, 0); }
  ~hidden_memory() { ::prctl(PR_SET_DUMPABLE, 1, 0, 0, 0); }
  hidden_memory(const hidden_memory&) = delete;
  hidden_memory& operator=(const hidden_memory&) = delete;
};

/// Whether this process can read the memory of its parent, which has `marker` at the same address.
inline bool reaches_parent() {
  static const std::uint64_t marker = 7;
  std::uint64_t value = 0;
  iovec here{&value, sizeof value};
  iovec there{const_cast<std::uint64_t*>(&marker), sizeof marker};
  return ::process_vm_readv(::getppid(), &here, 1, &there, 1, 0) > 0;
}

}  // namespace troupe::testing
