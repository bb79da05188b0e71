#include "troupe/actors/runtime/room_to_start.hpp"

#include <condition_variable>
#include <exception>
#include <list>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "troupe/transport/os_error.hpp"
#include "troupe/transport/owned_fd.hpp"

namespace troupe::actors {
namespace {

using transport::owned_fd;

unexpected too_little(std::size_t had, std::size_t wanted, const std::string& what,
                      const std::string& how) {
  return fail(errc::overloaded, "this process can have " + std::to_string(had) + " more " + what +
                                    ", and needs " + std::to_string(wanted) + " to start; " + how);
}

/// Whether the limit is so far away that nothing need be taken; other threads may need descriptors
/// too.
bool far_from_limit(std::size_t wanted) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return false;
  const int lowest = ::open("/", O_PATH | O_CLOEXEC);
  if (lowest >= 0) ::close(lowest);
  return lowest >= 0 && static_cast<std::size_t>(lowest) + 16 * wanted < limit.rlim_cur;
}

result<void> check_descriptors(std::size_t wanted) {
  if (far_from_limit(wanted)) return {};
  std::vector<int> taken;
  taken.reserve(wanted);
  // An open descriptor to duplicate.
  int next = ::open("/", O_PATH | O_CLOEXEC);
  while (next >= 0) {
    taken.push_back(next);
    if (taken.size() == wanted) break;
    next = ::fcntl(taken.front(), F_DUPFD_CLOEXEC, 0);
  }
  for (const int fd : taken) ::close(fd);
  if (taken.size() == wanted) return {};
  return too_little(taken.size(), wanted, "file descriptors",
                    "close some, or raise the limit (ulimit -n, LimitNOFILE)");
}

/// CAF waits for its sockets with an epoll set, and is woken by a pipe. The limits on sets, pipes
/// and watches are per user, and per machine.
result<void> check_polling() {
  const owned_fd set{::epoll_create1(EPOLL_CLOEXEC)};
  int ends[2] = {-1, -1};
  const bool piped = set && ::pipe2(ends, O_CLOEXEC) == 0;
  const owned_fd reader{ends[0]};
  const owned_fd writer{ends[1]};
  epoll_event event{};
  event.events = EPOLLIN;
  if (piped && ::epoll_ctl(set.get(), EPOLL_CTL_ADD, reader.get(), &event) == 0) return {};
  return fail(errc::overloaded, "this process can have no pipe and no epoll set to watch it by: " +
                                    transport::what_errno(errno) +
                                    "; close some, or raise the limits (ulimit -n, fs.file-max, "
                                    "fs.epoll.max_user_watches)");
}

/// Threads that only wait for the object's end.
class idle_threads {
 public:
  idle_threads() = default;
  idle_threads(const idle_threads&) = delete;
  idle_threads& operator=(const idle_threads&) = delete;
  ~idle_threads() {
    {
      const std::lock_guard lock{mutex_};
      over_ = true;
    }
    ended_.notify_all();
    for (auto& one : all_) one.join();
  }
  void add() {
    all_.emplace_back([this] {
      std::unique_lock lock{mutex_};
      ended_.wait(lock, [this] { return over_; });
    });
  }
  [[nodiscard]] std::size_t count() const noexcept { return all_.size(); }

 private:
  std::mutex mutex_;
  std::condition_variable ended_;
  bool over_{false};
  std::list<std::thread> all_;
};

/// Starts all threads at once: threads that have ended take no room.
result<void> check_threads(std::size_t wanted) {
  idle_threads threads;
  try {
    while (threads.count() < wanted) threads.add();
  } catch (const std::exception& why) {
    return too_little(
        threads.count(), wanted, "threads",
        std::string{"raise the limit (ulimit -u, ulimit -v, TasksMax; "} + why.what() + ")");
  }
  return {};
}

/// Takes the address space and, while it is taken, starts the threads, whose stacks need some too.
result<void> check_addresses_and_threads(const room_to_start& wanted) {
  void* space = ::mmap(nullptr, wanted.address_space, PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (space == MAP_FAILED) {
    return fail(errc::overloaded, "this process cannot have " +
                                      std::to_string(wanted.address_space >> 20) +
                                      " MiB more of addresses, which it needs to start; raise the "
                                      "limit (ulimit -v, LimitAS)");
  }
  auto threads = check_threads(wanted.threads);
  ::munmap(space, wanted.address_space);
  return threads;
}

}  // namespace

result<void> check_room(const room_to_start& wanted) {
  if (auto ok = check_descriptors(wanted.descriptors); !ok) return ok;
  if (auto ok = check_polling(); !ok) return ok;
  return check_addresses_and_threads(wanted);
}

}  // namespace troupe::actors
