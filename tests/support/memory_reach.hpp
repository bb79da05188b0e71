#pragma once

#include <csignal>
#include <cstdint>
#include <optional>
#include <string>

#include <sys/prctl.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

namespace troupe::testing {

/// Why no process of this user can reach the memory of another one here, as `shm` does with memory
/// that the engine allocated. Empty if it can.
inline std::optional<std::string> why_memory_is_out_of_reach() {
  static const bool reached = [] {
    static const std::uint64_t marker = 7;
    const pid_t child = ::fork();
    if (child == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      while (true) ::pause();
    }
    std::uint64_t value = 0;
    iovec here{&value, sizeof value};
    iovec there{const_cast<std::uint64_t*>(&marker), sizeof marker};
    const bool read = ::process_vm_readv(child, &here, 1, &there, 1, 0) > 0;
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    return read;
  }();
  if (reached) return std::nullopt;
  return "this machine lets no process reach the memory of another one (process_vm_readv)";
}

}  // namespace troupe::testing
