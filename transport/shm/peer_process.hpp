#pragma once

#include <cstdint>

#include "troupe/transport/owned_fd.hpp"
#include "troupe/transport/shm/wire.hpp"

namespace troupe::transport::shm {

/// The process at the other end of a link. A pid alone is no identity: after the process has ended,
/// the kernel may reuse the pid, and `process_vm_*` takes nothing but pids. The pidfd always refers
/// to this one process; while that has not ended, the pid is its own.
class peer_process {
 public:
  peer_process() = default;
  peer_process(std::uint32_t pid, owned_fd pidfd) noexcept : pid_{pid}, pidfd_{std::move(pidfd)} {}

  /// Has no pidfd on kernels before 5.3, or if the process has ended.
  [[nodiscard]] static peer_process open(std::uint32_t pid) noexcept;

  [[nodiscard]] std::uint32_t pid() const noexcept { return pid_; }
  /// Readable once the process has ended. -1 if there is no pidfd.
  [[nodiscard]] int fd() const noexcept { return pidfd_.get(); }
  /// Whether the process is alive for certain: always false without a pidfd.
  [[nodiscard]] bool alive() const noexcept;
  /// Whether process_vm_* works on the process and it is the sender of the probe, proven by reading
  /// the number that it sent.
  [[nodiscard]] bool shows(const memory_probe& probe) const noexcept;

 private:
  std::uint32_t pid_{0};
  owned_fd pidfd_;
};

}  // namespace troupe::transport::shm
