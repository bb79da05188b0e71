#include "troupe/transport/shm/peer_process.hpp"

#include <cerrno>

#include <poll.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

namespace troupe::transport::shm {

peer_process peer_process::open(std::uint32_t pid) noexcept {
  return {pid, owned_fd{static_cast<int>(::syscall(SYS_pidfd_open, static_cast<pid_t>(pid), 0))}};
}

bool peer_process::alive() const noexcept {
  if (!pidfd_) return false;
  pollfd ended{pidfd_.get(), POLLIN, 0};
  int ready = 0;
  do {
    ready = ::poll(&ended, 1, 0);
  } while (ready < 0 &&
           errno == EINTR);  // by a signal of the engine, even though poll does not wait
  return ready == 0;
}

bool peer_process::shows(const memory_probe& probe) const noexcept {
  std::uint64_t value = 0;
  iovec here{&value, sizeof value};
  iovec there{reinterpret_cast<void*>(probe.address), sizeof value};
  const auto got = ::process_vm_readv(static_cast<pid_t>(pid_), &here, 1, &there, 1, 0);
  return got == static_cast<ssize_t>(sizeof value) && value == probe.value && alive();
}

}  // namespace troupe::transport::shm
