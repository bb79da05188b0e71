#include "troupe/transport/types.hpp"

#include <fstream>

#include <sys/stat.h>
#include <unistd.h>

namespace troupe::transport {

namespace {

// The inode number of a namespace is its identity on this host. 0: the kernel does not show it, and
// then it never counts as equal (`reaches` asks for numbers that are not 0).
std::uint64_t namespace_number(const char* path) {
  struct stat info {};
  return ::stat(path, &info) == 0 ? static_cast<std::uint64_t>(info.st_ino) : 0;
}

}  // namespace

std::string_view to_string(backend_kind kind) noexcept {
  switch (kind) {
    case backend_kind::shm: return "shm";
    case backend_kind::tcp: return "tcp";
    case backend_kind::rdma: return "rdma";
    case backend_kind::xgmi: return "xgmi";
  }
  return "unknown";
}

std::optional<backend_kind> backend_kind_from(std::string_view name) noexcept {
  for (const auto kind :
       {backend_kind::shm, backend_kind::tcp, backend_kind::rdma, backend_kind::xgmi}) {
    if (to_string(kind) == name) return kind;
  }
  return std::nullopt;
}

host_identity host_identity::of_this_process() {
  host_identity self;
  std::ifstream{"/proc/sys/kernel/random/boot_id"} >> self.boot_id;
  self.network_namespace = namespace_number("/proc/self/ns/net");
  self.pid_namespace = namespace_number("/proc/self/ns/pid");
  self.pid = static_cast<std::uint32_t>(::getpid());
  self.uid = static_cast<std::uint32_t>(::getuid());
  return self;
}

}  // namespace troupe::transport
