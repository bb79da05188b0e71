#include "broken_wire.hpp"

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <mutex>

#include <arpa/inet.h>
#include <dirent.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>

#ifdef TROUPE_TEST_VERBS
#include <dlfcn.h>
#include <infiniband/verbs.h>

namespace {

std::mutex pairs_mutex;
std::set<ibv_qp*> pairs;
std::atomic<bool> devices_lost{false};

template <class Function>
Function real(const char* name) {
  return reinterpret_cast<Function>(dlvsym(RTLD_NEXT, name, "IBVERBS_1.1"));
}

}  // namespace

// The linker finds these before those of libibverbs, so this file knows every queue pair that the
// backend creates.
extern "C" ibv_qp* ibv_create_qp(ibv_pd* domain, ibv_qp_init_attr* attributes) {
  auto* made = real<decltype(&ibv_create_qp)>("ibv_create_qp")(domain, attributes);
  const std::lock_guard lock{pairs_mutex};
  if (made != nullptr) pairs.insert(made);
  return made;
}
extern "C" int ibv_destroy_qp(ibv_qp* pair) {
  {
    const std::lock_guard lock{pairs_mutex};
    pairs.erase(pair);
  }
  return real<decltype(&ibv_destroy_qp)>("ibv_destroy_qp")(pair);
}
extern "C" int ibv_get_async_event(ibv_context* device, ibv_async_event* into) {
  if (devices_lost) {
    errno = EIO;
    return -1;
  }
  return real<decltype(&ibv_get_async_event)>("ibv_get_async_event")(device, into);
}
#endif

namespace troupe::testing {

namespace {

int break_queue_pairs() {
  int broken = 0;
#ifdef TROUPE_TEST_VERBS
  const std::lock_guard lock{pairs_mutex};
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_ERR;
  for (auto* pair : pairs) {
    if (ibv_modify_qp(pair, &attributes, IBV_QP_STATE) == 0) ++broken;
  }
#endif
  return broken;
}

}  // namespace

int cut_connections(const std::set<int>& spared_ports) {
  const auto is_ours = [&](const sockaddr_storage& address, socklen_t size) {
    if (address.ss_family == AF_INET) {
      const auto& in = reinterpret_cast<const sockaddr_in&>(address);
      return !spared_ports.contains(ntohs(in.sin_port));
    }
    return address.ss_family == AF_UNIX && size > sizeof(sa_family_t);
  };
  int cut = break_queue_pairs();
  auto* all = opendir("/proc/self/fd");
  if (all == nullptr) return 0;
  while (const auto* entry = readdir(all)) {
    const int fd = std::atoi(entry->d_name);
    sockaddr_storage here{};
    sockaddr_storage there{};
    socklen_t here_size = sizeof here;
    socklen_t there_size = sizeof there;
    if (getsockname(fd, reinterpret_cast<sockaddr*>(&here), &here_size) != 0 ||
        getpeername(fd, reinterpret_cast<sockaddr*>(&there), &there_size) != 0) {
      continue;
    }
    const bool ours = here.ss_family == AF_INET
                          ? is_ours(here, here_size) && is_ours(there, there_size)
                          : is_ours(here, here_size) || is_ours(there, there_size);
    if (ours && shutdown(fd, SHUT_RDWR) == 0) ++cut;
  }
  closedir(all);
  return cut;
}

bool lose_rdma_devices() {
#ifdef TROUPE_TEST_VERBS
  devices_lost = true;
#endif
  // Gives their ports another address for a moment, which raises a real event.
  return std::system(
             "for port in /sys/class/net/wire*; do"
             "  for what in add del; do"
             "    ip address $what 10.79.0.1/24 dev ${port##*/} || exit 1; done; done") == 0;
}

bool wire(const std::string& arguments) {
  const char* program = std::getenv("TROUPE_VERBS_WIRE");
  return program != nullptr && std::system((std::string{program} + " " + arguments).c_str()) == 0;
}

}  // namespace troupe::testing
