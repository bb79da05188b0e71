// Loaded before all other libraries (LD_PRELOAD): counts the calls of a program to the C library,
// and lets one of them fail. It sees only calls that are made through the names of this library,
// which are the calls of programs and of all libraries but the C library itself.
//
// Exempt:
//  - calls that only wait (poll, epoll_wait, futex), calls that cannot fail or whose failure cannot
//    be handled (close, munmap, a write to an eventfd), and calls of libraries before `main`, for
//    which there is no caller to return an error to;
//  - calls whose failure makes a library end the process by a signal or hang, which cannot be
//    prevented: system calls of CAF itself, and all calls of its actor system's constructor
//    (`check_room` checks before it), of its destructor, of the beginning and the end of an actor,
//    and of CAF's clock; the C library's list of thread-exit destructors; OpenSSL's one-time
//    initialisation.
// A call is known by its stack, not by its number: threads and processes take turns differently in
// every run.

#include "failing_calls.hpp"

#include <cerrno>
#include <cstdarg>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <dirent.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <sys/uio.h>
#include <unistd.h>

using troupe::testing::call_counts;
using troupe::testing::call_kind;
using troupe::testing::call_place;

namespace {

call_counts* counts = nullptr;  // null until `main` begins
bool traced = false;
const char* role = "";  // the name of the node that this process is
std::uint32_t role_hash = 0;
/// Whether this library is active on this thread. Initial-exec storage exists from the start,
/// without allocation.
[[gnu::tls_model("initial-exec")]] thread_local bool busy = false;

void open_counts() {
  const char* path = std::getenv(troupe::testing::call_counts_variable);
  if (path == nullptr) return;
  // By system call number: this library replaces the function.
  const auto fd = static_cast<int>(::syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC, 0));
  if (fd < 0) return;
  const auto at =
      ::syscall(SYS_mmap, nullptr, sizeof(call_counts), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  ::close(fd);
  if (at == -1) return;
  traced = std::getenv(troupe::testing::call_trace_variable) != nullptr;
  std::array<void*, 1> frames{};
  (void)::backtrace(frames.data(), 1);  // the first call loads what it needs
  counts = reinterpret_cast<call_counts*>(at);
}

bool begins_with(const char* text, const char* with) {
  return text != nullptr && std::strncmp(text, with, std::strlen(with)) == 0;
}

/// The file name of the library at that address, without its folder.
const char* library_of(const Dl_info& at) {
  const char* slash = std::strrchr(at.dli_fname, '/');
  return slash == nullptr ? at.dli_fname : slash + 1;
}

/// The innermost frames of the current call.
struct call_stack {
  std::array<void*, 64> frames{};
  int depth{::backtrace(frames.data(), static_cast<int>(frames.size()))};
};

std::uint64_t mixed(std::uint64_t hash, std::uint64_t with) {
  hash = (hash ^ with) * 0x9e37'79b9'7f4a'7c15U;
  return hash ^ (hash >> 29U);
}

/// Libraries are loaded elsewhere in every process, so offsets in them count.
std::uint64_t hash_of(const call_stack& stack) {
  std::uint64_t hash = mixed(1, role_hash);
  for (int i = 0; i < stack.depth; ++i) {
    const auto frame = stack.frames[static_cast<std::size_t>(i)];
    dl_find_object in{};
    if (::_dl_find_object(frame, &in) != 0) continue;
    hash = mixed(hash, static_cast<std::uint64_t>(static_cast<const char*>(frame) -
                                                  static_cast<const char*>(in.dlfo_map_start)));
  }
  return hash == 0 ? 1 : hash;
}

/// Whether a failure of that call would inevitably end the process.
bool is_spared(const call_stack& stack, call_kind kind) {
  bool spared = false;
  bool before_caller = true;
  for (int i = 0; i < stack.depth && !spared; ++i) {
    Dl_info at{};
    if (::dladdr(stack.frames[static_cast<std::size_t>(i)], &at) == 0) continue;
    const auto* library = library_of(at);
    const bool of_caf = begins_with(library, "libcaf_");
    const bool of_system = begins_with(library, "libfailing_calls") ||
                           begins_with(library, "libc.so") || begins_with(library, "libstdc++");
    spared = begins_with(at.dli_sname, "_ZN3caf12actor_systemC") ||
             begins_with(at.dli_sname, "_ZN3caf12actor_systemD") ||
             begins_with(at.dli_sname, "_ZN3caf15scheduled_actor6launch") ||
             begins_with(at.dli_sname, "_ZN3caf17monitorable_actor7cleanup") ||
             begins_with(at.dli_sname, "_ZN3caf15scheduled_actor7cleanup") ||
             begins_with(at.dli_sname, "_ZN3caf14blocking_actor7cleanup") ||
             begins_with(at.dli_sname, "_ZN3caf2io7network11pipe_reader") ||
             begins_with(at.dli_sname, "_ZN3caf6detail23thread_safe_actor_clock") ||
             begins_with(at.dli_sname, "_ZN3caf6logger16thread_local_aid") ||  // between two actors
             begins_with(at.dli_sname, "__cxa_thread_atexit_impl") ||
             begins_with(at.dli_sname, "CRYPTO_THREAD_run_once") ||
             (kind == call_kind::system_call && before_caller && of_caf);
    before_caller = before_caller && of_system;
  }
  return spared;
}

/// Null if the table is full.
call_place* place_of(const call_stack& stack, call_kind kind) {
  const auto hash = hash_of(stack);
  for (std::size_t i = 0; i < call_counts::most_places; ++i) {
    auto& place = counts->places[(hash + i) % call_counts::most_places];
    std::uint64_t free = 0;
    if (place.stack == 0 && place.stack.compare_exchange_strong(free, hash)) {
      place.role = role_hash;
      // Only a run in which nothing fails is asked for the places.
      place.spared = counts->failing_stack == 0 && is_spared(stack, kind);
      return &place;
    }
    if (place.stack == hash) return &place;
  }
  return nullptr;
}

void tell(const char* name, const call_stack& stack) {
  std::strncpy(counts->failed.data(), name, counts->failed.size() - 1);
  std::strncpy(counts->failed_role.data(), role, counts->failed_role.size() - 1);
  counts->failed_in.store(::getpid());
  if (traced) ::backtrace_symbols_fd(stack.frames.data(), stack.depth, STDERR_FILENO);
}

bool fails(call_kind kind, const char* name, int why) {
  if (counts == nullptr || busy || kind != counts->kind) return false;
  // A stack is found slowly; only in a run in which nothing fails are those of all processes.
  if (counts->failing_stack != 0 && counts->failing_role != role_hash) return false;
  const int before = errno;
  busy = true;
  const call_stack stack;
  auto* const place = place_of(stack, kind);
  const bool now = place != nullptr && place->calls.fetch_add(1) + 1 == counts->failing_call &&
                   place->stack == counts->failing_stack;
  if (now) tell(name, stack);
  busy = false;
  errno = now ? why : before;
  return now;
}

/// Eventfds, timers and the like never fail for lack of resources.
bool can_fail(int fd) {
  struct stat what {};
  return ::syscall(SYS_fstat, fd, &what) != 0 || (what.st_mode & S_IFMT) != 0;
}

/// The next function of that name after this library's.
template <class Function>
Function* next(Function* /*ours*/, const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

using main_function = int(int, char**, char**);
main_function* real_main = nullptr;

int counted_main(int argc, char** argv, char** environment) {
  for (int i = 1; i + 1 < argc; ++i)
    if (std::strcmp(argv[i], "--name") == 0) role = argv[i + 1];
  for (const char* at = role; *at != '\0'; ++at)
    role_hash = static_cast<std::uint32_t>(mixed(role_hash, static_cast<unsigned char>(*at)));
  open_counts();
  return real_main(argc, argv, environment);
}

}  // namespace

// -- start of the program

extern "C" int __libc_start_main(main_function* main, int argc, char** argv, void (*init)(),
                                 void (*fini)(), void (*rtld_fini)(), void* stack_end) {
  real_main = main;
  return next(&__libc_start_main, "__libc_start_main")(counted_main, argc, argv, init, fini,
                                                       rtld_fini, stack_end);
}

// -- allocations, including those of `operator new`

extern "C" {
void* __libc_malloc(std::size_t size);
void* __libc_calloc(std::size_t count, std::size_t size);
void* __libc_realloc(void* old, std::size_t size);
void* __libc_memalign(std::size_t alignment, std::size_t size);

void* malloc(std::size_t size) noexcept {
  return fails(call_kind::allocation, "malloc", ENOMEM) ? nullptr : __libc_malloc(size);
}
void* calloc(std::size_t count, std::size_t size) noexcept {
  return fails(call_kind::allocation, "calloc", ENOMEM) ? nullptr : __libc_calloc(count, size);
}
void* realloc(void* old, std::size_t size) noexcept {
  return fails(call_kind::allocation, "realloc", ENOMEM) ? nullptr : __libc_realloc(old, size);
}
void* memalign(std::size_t alignment, std::size_t size) noexcept {
  return fails(call_kind::allocation, "memalign", ENOMEM) ? nullptr
                                                          : __libc_memalign(alignment, size);
}
void* aligned_alloc(std::size_t alignment, std::size_t size) noexcept {
  return memalign(alignment, size);
}
int posix_memalign(void** made, std::size_t alignment, std::size_t size) noexcept {
  void* const at = memalign(alignment, size);
  if (at == nullptr) return ENOMEM;
  *made = at;
  return 0;
}
}

// -- system calls

// A call that fails with the result `failed` and errno `why`; otherwise the real one is called.
// NOLINTNEXTLINE(cppcoreguidelines-macro-usage): each is a name of its own for the linker
#define FAILING(type, name, parameters, arguments, failed, why, attributes) \
  FAILING_IF(true, type, name, parameters, arguments, failed, why, attributes)
// NOLINTNEXTLINE(cppcoreguidelines-macro-usage): the same, where the call is one that may fail
#define FAILING_IF(may, type, name, parameters, arguments, failed, why, attributes) \
  extern "C" type name parameters attributes {                                      \
    static auto* const real = next(&name, #name);                                   \
    const bool now = (may) && fails(call_kind::system_call, #name, why);            \
    return now ? (failed) : real arguments;                                         \
  }

FAILING(int, socket, (int domain, int type, int protocol), (domain, type, protocol), -1, EMFILE,
        noexcept)
FAILING(int, socketpair, (int domain, int type, int protocol, int* two),
        (domain, type, protocol, two), -1, EMFILE, noexcept)
FAILING(int, bind, (int fd, const sockaddr* at, socklen_t size), (fd, at, size), -1, ENOMEM,
        noexcept)
FAILING(int, listen, (int fd, int backlog), (fd, backlog), -1, EADDRINUSE, noexcept)
FAILING(int, connect, (int fd, const sockaddr* at, socklen_t size), (fd, at, size), -1, ENOBUFS, )
FAILING(int, accept, (int fd, sockaddr* at, socklen_t* size), (fd, at, size), -1, EMFILE, )
FAILING(int, accept4, (int fd, sockaddr* at, socklen_t* size, int flags), (fd, at, size, flags), -1,
        EMFILE, )
FAILING(int, setsockopt, (int fd, int level, int what, const void* value, socklen_t size),
        (fd, level, what, value, size), -1, ENOMEM, noexcept)
FAILING(int, getsockopt, (int fd, int level, int what, void* value, socklen_t* size),
        (fd, level, what, value, size), -1, ENOBUFS, noexcept)
FAILING(int, getsockname, (int fd, sockaddr* at, socklen_t* size), (fd, at, size), -1, ENOBUFS,
        noexcept)
FAILING(ssize_t, sendmsg, (int fd, const msghdr* what, int flags), (fd, what, flags), -1, ENOBUFS, )
FAILING(ssize_t, recvmsg, (int fd, msghdr* what, int flags), (fd, what, flags), -1, ENOMEM, )
FAILING(ssize_t, send, (int fd, const void* from, std::size_t size, int flags),
        (fd, from, size, flags), -1, ENOBUFS, )
FAILING(ssize_t, recv, (int fd, void* to, std::size_t size, int flags), (fd, to, size, flags), -1,
        ENOMEM, )

FAILING(int, epoll_create1, (int flags), (flags), -1, EMFILE, noexcept)
FAILING(int, epoll_ctl, (int set, int what, int fd, epoll_event* event), (set, what, fd, event), -1,
        ENOSPC, noexcept)
FAILING(int, eventfd, (unsigned begin, int flags), (begin, flags), -1, EMFILE, noexcept)
FAILING(int, pipe, (int* ends), (ends), -1, EMFILE, noexcept)
FAILING(int, pipe2, (int* ends, int flags), (ends, flags), -1, EMFILE, noexcept)
FAILING(int, timerfd_create, (clockid_t clock, int flags), (clock, flags), -1, EMFILE, noexcept)
FAILING(int, timerfd_settime, (int fd, int flags, const itimerspec* when, itimerspec* before),
        (fd, flags, when, before), -1, EINVAL, noexcept)
FAILING(int, signalfd, (int fd, const sigset_t* watched, int flags), (fd, watched, flags), -1,
        EMFILE, noexcept)
FAILING(int, dup, (int fd), (fd), -1, EMFILE, noexcept)
FAILING(int, dup2, (int fd, int to), (fd, to), -1, EMFILE, noexcept)

FAILING(void*, mmap, (void* at, std::size_t size, int may, int flags, int fd, off_t from),
        (at, size, may, flags, fd, from), MAP_FAILED, ENOMEM, noexcept)
FAILING(int, mprotect, (void* at, std::size_t size, int may), (at, size, may), -1, ENOMEM, noexcept)
FAILING(int, madvise, (void* at, std::size_t size, int what), (at, size, what), -1, EAGAIN,
        noexcept)
FAILING(int, mlock, (const void* at, std::size_t size), (at, size), -1, ENOMEM, noexcept)
FAILING(int, memfd_create, (const char* name, unsigned flags), (name, flags), -1, EMFILE, noexcept)
FAILING(int, ftruncate, (int fd, off_t size), (fd, size), -1, EFBIG, noexcept)
FAILING(int, fallocate, (int fd, int mode, off_t from, off_t size), (fd, mode, from, size), -1,
        ENOSPC, )

FAILING_IF(can_fail(fd), ssize_t, read, (int fd, void* to, std::size_t size), (fd, to, size), -1,
           EIO, )
FAILING_IF(can_fail(fd), ssize_t, write, (int fd, const void* from, std::size_t size),
           (fd, from, size), -1, ENOSPC, )
FAILING_IF(can_fail(fd), ssize_t, readv, (int fd, const iovec* parts, int count),
           (fd, parts, count), -1, ENOMEM, )
FAILING_IF(can_fail(fd), ssize_t, writev, (int fd, const iovec* parts, int count),
           (fd, parts, count), -1, ENOSPC, )
FAILING(ssize_t, pread, (int fd, void* to, std::size_t size, off_t from), (fd, to, size, from), -1,
        EIO, )
FAILING(ssize_t, pwrite, (int fd, const void* from, std::size_t size, off_t at),
        (fd, from, size, at), -1, ENOSPC, )
FAILING(std::FILE*, fopen, (const char* path, const char* mode), (path, mode), nullptr, EMFILE, )
FAILING(std::FILE*, fopen64, (const char* path, const char* mode), (path, mode), nullptr, EMFILE, )
FAILING(DIR*, opendir, (const char* path), (path), nullptr, EMFILE, )
FAILING(int, rename, (const char* from, const char* to), (from, to), -1, ENOSPC, noexcept)
FAILING(int, fsync, (int fd), (fd), -1, EIO, )
FAILING(int, fdatasync, (int fd), (fd), -1, EIO, )
FAILING(int, unlink, (const char* path), (path), -1, EBUSY, noexcept)
FAILING(int, mkdir, (const char* path, mode_t mode), (path, mode), -1, ENOSPC, noexcept)
FAILING(int, rmdir, (const char* path), (path), -1, EBUSY, noexcept)
FAILING(int, chmod, (const char* path, mode_t mode), (path, mode), -1, EPERM, noexcept)
FAILING(int, stat, (const char* path, struct stat* what), (path, what), -1, ENOMEM, noexcept)
FAILING(int, lstat, (const char* path, struct stat* what), (path, what), -1, ENOMEM, noexcept)
FAILING(int, fstat, (int fd, struct stat* what), (fd, what), -1, ENOMEM, noexcept)

FAILING(ssize_t, getrandom, (void* to, std::size_t size, unsigned flags), (to, size, flags), -1,
        ENOSYS, )
FAILING(int, getentropy, (void* to, std::size_t size), (to, size), -1, EIO, )
FAILING(int, gethostname, (char* to, std::size_t size), (to, size), -1, EPERM, noexcept)

FAILING(int, pthread_create,
        (pthread_t * made, const pthread_attr_t* attributes, void* (*body)(void*), void* argument),
        (made, attributes, body, argument), EAGAIN, EAGAIN, noexcept)
FAILING(pid_t, fork, (), (), -1, EAGAIN, noexcept)
FAILING(int, execv, (const char* path, char* const* arguments), (path, arguments), -1, ENOMEM,
        noexcept)

// Calls with an optional argument, which is passed on as a long, as the kernel takes it.
// NOLINTNEXTLINE(cppcoreguidelines-macro-usage)
#define FAILING_WITH_MORE(name, parameters, last, arguments, why)           \
  extern "C" int name parameters {                                          \
    static auto* const real = next(&name, #name);                           \
    std::va_list more;                                                      \
    va_start(more, last);                                                   \
    [[maybe_unused]] const auto extra = va_arg(more, long);                 \
    va_end(more);                                                           \
    return fails(call_kind::system_call, #name, why) ? -1 : real arguments; \
  }

FAILING_WITH_MORE(open, (const char* path, int flags, ...), flags, (path, flags, extra), EMFILE)
FAILING_WITH_MORE(open64, (const char* path, int flags, ...), flags, (path, flags, extra), EMFILE)
FAILING_WITH_MORE(openat, (int folder, const char* path, int flags, ...), flags,
                  (folder, path, flags, extra), EMFILE)
FAILING_WITH_MORE(fcntl, (int fd, int what, ...), what, (fd, what, extra), EMFILE)
FAILING_WITH_MORE(fcntl64, (int fd, int what, ...), what, (fd, what, extra), EMFILE)
FAILING_WITH_MORE(ioctl, (int fd, unsigned long what, ...), what, (fd, what, extra), ENOMEM)
