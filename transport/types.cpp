#include "troupe/transport/types.hpp"

#include <cerrno>
#include <fstream>

#include <sys/stat.h>
#include <unistd.h>

#include "troupe/transport/random.hpp"

namespace troupe::transport {

namespace {

/// Stands for the only namespace of a kernel built without namespaces; no inode has this number.
constexpr std::uint64_t only_namespace = 1;

// The inode number of a namespace is its identity on this host. 0 if the kernel does not show it; 0
// never counts as equal.
std::uint64_t namespace_number(const char* path) {
  struct stat info {};
  if (::stat(path, &info) == 0) return static_cast<std::uint64_t>(info.st_ino);
  const bool none_of_the_kind = errno == ENOENT && ::stat("/proc/self/ns", &info) == 0;
  return none_of_the_kind ? only_namespace : 0;
}

bool same_namespace(std::uint64_t one, std::uint64_t other) {
  return one != 0 && one == other;
}

template <class Fits>
std::optional<backend_kind> first_that(Fits fits) {
  for (const auto kind :
       {backend_kind::shm, backend_kind::tcp, backend_kind::rdma, backend_kind::xgmi}) {
    if (fits(kind)) return kind;
  }
  return std::nullopt;
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
  return first_that([name](backend_kind kind) { return to_string(kind) == name; });
}

std::optional<backend_kind> backend_kind_from(std::uint8_t number) noexcept {
  return first_that(
      [number](backend_kind kind) { return static_cast<std::uint8_t>(kind) == number; });
}

host_identity host_identity::of_this_process() {
  host_identity self;
  std::ifstream{"/proc/sys/kernel/random/boot_id"} >> self.boot_id;
  self.network_namespace = namespace_number("/proc/self/ns/net");
  self.pid_namespace = namespace_number("/proc/self/ns/pid");
  self.user_namespace = namespace_number("/proc/self/ns/user");
  self.pid = static_cast<std::uint32_t>(::getpid());
  self.uid = static_cast<std::uint32_t>(::getuid());
  return self;
}

grant_scope grant_scope::for_all_transfers() {
  return {transfer_id{random_id()}, true};
}

bool joins_one_host_only(backend_kind kind) noexcept {
  switch (kind) {
    case backend_kind::shm:
    case backend_kind::xgmi: return true;
    case backend_kind::tcp:
    case backend_kind::rdma: return false;
  }
  return false;
}

std::optional<std::string> why_apart(const host_identity& self, const host_identity& peer) {
  if (self.boot_id.empty() || peer.boot_id != self.boot_id) {
    return "another host: memory is shared within one host only";
  }
  if (!same_namespace(peer.network_namespace, self.network_namespace)) {
    return "same host, another network namespace: its unix socket cannot be reached";
  }
  if (!same_namespace(peer.pid_namespace, self.pid_namespace)) {
    return "same host, another pid namespace: its process cannot be watched";
  }
  if (!same_namespace(peer.user_namespace, self.user_namespace)) {
    return "same host, another user namespace: its user is not known here";
  }
  if (peer.uid != self.uid) {
    return "same host, user " + std::to_string(peer.uid) + " there and " +
           std::to_string(self.uid) + " here: memory is shared within one user only";
  }
  return std::nullopt;
}

}  // namespace troupe::transport
