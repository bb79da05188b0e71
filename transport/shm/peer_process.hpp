#pragma once

#include <cstdint>

#include "troupe/transport/owned_fd.hpp"
#include "troupe/transport/shm/wire.hpp"

namespace troupe::transport::shm {

/// The process at the other end of a link. Its number alone is no identity: when it has ended, the
/// kernel may give the number to a stranger, and `process_vm_*` takes nothing but numbers. The
/// descriptor (a pidfd) names this one process for ever; while that has not ended, the number is
/// its own.
class peer_process {
 public:
  peer_process() = default;
  peer_process(std::uint32_t pid, owned_fd pidfd) noexcept : pid_{pid}, pidfd_{std::move(pidfd)} {}

  /// Without a descriptor on kernels that have none (before 5.3) or when it has ended.
  [[nodiscard]] static peer_process open(std::uint32_t pid) noexcept;

  [[nodiscard]] std::uint32_t pid() const noexcept { return pid_; }
  /// Readable once the process has ended. -1: none.
  [[nodiscard]] int fd() const noexcept { return pidfd_.get(); }
  /// For certain: without a descriptor, never.
  [[nodiscard]] bool alive() const noexcept;
  /// Whether process_vm_* works on it, and it is the one that sent the probe: proven by reading the
  /// number that it told us.
  [[nodiscard]] bool shows(const memory_probe& probe) const noexcept;

 private:
  std::uint32_t pid_{0};
  owned_fd pidfd_;
};

}  // namespace troupe::transport::shm
