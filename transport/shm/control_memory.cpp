#include "troupe/transport/shm/control_memory.hpp"

#include <cerrno>
#include <string>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "troupe/transport/os_error.hpp"
#include "troupe/transport/shm/sealed_memory.hpp"

namespace troupe::transport::shm {

namespace {

unexpected refused(errc code, const std::string& call) {
  return fail(code, "shared memory: " + call + ": " + what_errno(errno));
}

}  // namespace

result<owned_fd> make_sealed(const char* name, std::uint64_t size) {
  owned_fd fd{::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING)};
  if (!fd) return refused(errc::pool_exhausted, "memfd_create");
  if (::ftruncate(fd.get(), static_cast<off_t>(size)) != 0) {
    return refused(errc::pool_exhausted, "ftruncate");
  }
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return refused(errc::pool_exhausted, "fcntl(F_ADD_SEALS)");
  }
  return fd;
}

result<std::byte*> map_sealed(int fd, std::uint64_t size) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) return refused(errc::unauthorized, "fstat");
  if (!S_ISREG(status.st_mode) || status.st_size < 0 ||
      static_cast<std::uint64_t>(status.st_size) < size || size == 0) {
    return fail(errc::unauthorized, "the peer's memory file has " + std::to_string(status.st_size) +
                                        " bytes, " + std::to_string(size) + " were announced");
  }
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    return fail(
        errc::unauthorized,
        "the peer's memory file is not sealed against shrinking; it could be cut off under us");
  }
  void* at = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) return refused(errc::pool_exhausted, "mmap");
  // A child that is forked without exec must neither keep the peer's memory nor touch it.
  ::madvise(at, size, MADV_DONTFORK);
  return static_cast<std::byte*>(at);
}

void control_mapping::unmap::operator()(control_memory* mapped) const noexcept {
  ::munmap(mapped, sizeof(control_memory));
}

std::uint64_t control_mapping::file_number() const noexcept {
  struct stat status {};
  return ::fstat(fd_.get(), &status) == 0 ? status.st_ino : 0;
}

result<control_mapping> control_mapping::create() {
  auto fd = make_sealed("troupe:link", sizeof(control_memory));
  if (!fd) return fail(std::move(fd).error());
  return map(std::move(*fd));
}

result<control_mapping> control_mapping::map(owned_fd fd) {
  auto at = map_sealed(fd.get(), sizeof(control_memory));
  if (!at) return fail(std::move(at).error());
  control_mapping made;
  made.fd_ = std::move(fd);
  // A fresh memfd reads as zeros, which is the initial state of all members.
  made.memory_.reset(reinterpret_cast<control_memory*>(*at));
  return made;
}

}  // namespace troupe::transport::shm
