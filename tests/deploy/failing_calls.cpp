// Loaded before all other libraries (LD_PRELOAD): counts what a program asks the C library for, and
// lets one of those calls fail. Only what is called through this library's names is seen, which is all
// that programs and libraries other than the C library itself call.
//
// Left out:
//  - calls that only wait (poll, epoll_wait, futex), those that cannot fail or whose failure nobody can
//    act on (close, munmap, a write to an eventfd), and what libraries do before `main`, which has
//    nobody to return an error to;
//  - where a library ends the process by a signal, or stands still for ever, and cannot be asked not to:
//    system calls of CAF's own, and all calls of its actor system's constructor (for which `check_room`
//    looks before), of its destructor, of the beginning and the end of an actor and of CAF's clock; the
//    C library's list of what is destroyed at the end of a thread; what OpenSSL does once, at its first
//    use.
// Where the one that is to fail is left out the next one does.

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

namespace {

call_counts* counts = nullptr;  // null until `main` begins
bool traced = false;
/// Whether this library itself is at work on this thread. There from the beginning: to make it takes no memory.
[[gnu::tls_model("initial-exec")]] thread_local bool busy = false;

void open_counts() {
  const char* path = std::getenv(troupe::testing::call_counts_variable);
  if (path == nullptr) return;
  // By number: the names are ours.
  const auto fd = static_cast<int>(::syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC, 0));
  if (fd < 0) return;
  const auto at =
      ::syscall(SYS_mmap, nullptr, sizeof(call_counts), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  ::close(fd);
  if (at == -1) return;
  traced = std::getenv(troupe::testing::call_trace_variable) != nullptr;
  std::array<void*, 1> frames{};
  (void)::backtrace(frames.data(), 1);  // what it needs is loaded at its first call
  counts = reinterpret_cast<call_counts*>(at);
}

bool begins_with(const char* text, const char* with) {
  return text != nullptr && std::strncmp(text, with, std::strlen(with)) == 0;
}

/// The library that the address is in, without its folder.
const char* library_of(const Dl_info& at) {
  const char* slash = std::strrchr(at.dli_fname, '/');
  return slash == nullptr ? at.dli_fname : slash + 1;
}

/// Whether nobody can keep the call that is under way from ending the process.
bool is_spared(call_kind kind) {
  std::array<void*, 64> frames{};
  const int depth = ::backtrace(frames.data(), static_cast<int>(frames.size()));
  bool spared = false;
  bool before_caller = true;
  for (int i = 0; i < depth && !spared; ++i) {
    Dl_info at{};
    if (::dladdr(frames[static_cast<std::size_t>(i)], &at) == 0) continue;
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

void tell(const char* name) {
  std::strncpy(counts->failed.data(), name, counts->failed.size() - 1);
  counts->failed_in.store(::getpid());
  if (!traced) return;
  std::array<void*, 40> frames{};
  const int depth = ::backtrace(frames.data(), static_cast<int>(frames.size()));
  ::backtrace_symbols_fd(frames.data(), depth, STDERR_FILENO);
}

bool fails(call_kind kind, const char* name, int why) {
  if (counts == nullptr || busy) return false;
  const auto index = static_cast<std::size_t>(kind);
  auto& failing = counts->failing[index];
  if (counts->made[index].fetch_add(1) + 1 != failing) return false;
  busy = true;
  const bool spared = is_spared(kind);
  if (spared) {
    ++failing;
  } else {
    tell(name);
  }
  busy = false;
  errno = why;
  return !spared;
}

/// What an eventfd, a timer or the like takes and gives never fails for want of anything.
bool can_fail(int fd) {
  struct stat what {};
  return ::syscall(SYS_fstat, fd, &what) != 0 || (what.st_mode & S_IFMT) != 0;
}

/// The function of that name behind this library.
template <class Function>
Function* next(Function* /*ours*/, const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

using main_function = int(int, char**, char**);
main_function* real_main = nullptr;

int counted_main(int argc, char** argv, char** environment) {
  open_counts();
  return real_main(argc, argv, environment);
}

}  // namespace

// -- where it begins

extern "C" int __libc_start_main(main_function* main, int argc, char** argv, void (*init)(),
                                 void (*fini)(), void (*rtld_fini)(), void* stack_end) {
  real_main = main;
  return next(&__libc_start_main, "__libc_start_main")(counted_main, argc, argv, init, fini,
                                                       rtld_fini, stack_end);
}

// -- allocations; `operator new` makes them, too

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

// One that fails by `failed` with errno `why`, and takes and returns what the real one does.
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

// Those with an argument that may be missing: it is passed on as a long one, which is what the kernel takes.
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
