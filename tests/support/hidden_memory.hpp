#pragma once

/// Processes whose memory another may not reach by process_vm_readv, as a container or a setting of the
/// kernel has it. A process of root reaches everybody's, until it gives up its rights.

#include <array>
#include <cstdint>

#include <linux/capability.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

namespace troupe::testing {

/// For good, and for the calling thread and those that it starts.
inline bool give_up_rights() {
  __user_cap_header_struct of{_LINUX_CAPABILITY_VERSION_3, 0};
  std::array<__user_cap_data_struct, _LINUX_CAPABILITY_U32S_3> none{};
  return ::syscall(SYS_capset, &of, none.data()) == 0;
}

/// While it lives, no process without rights reaches the memory of this one.
class hidden_memory {
 public:
  hidden_memory() { ::prctl(PR_SET_DUMPABLE, 0, 0, 0, 0); }
  ~hidden_memory() { ::prctl(PR_SET_DUMPABLE, 1, 0, 0, 0); }
  hidden_memory(const hidden_memory&) = delete;
  hidden_memory& operator=(const hidden_memory&) = delete;
};

/// Whether this process reaches the memory of one that has it at the same address: its parent.
inline bool reaches_parent() {
  static const std::uint64_t marker = 7;
  std::uint64_t value = 0;
  iovec here{&value, sizeof value};
  iovec there{const_cast<std::uint64_t*>(&marker), sizeof marker};
  return ::process_vm_readv(::getppid(), &here, 1, &there, 1, 0) > 0;
}

}  // namespace troupe::testing
