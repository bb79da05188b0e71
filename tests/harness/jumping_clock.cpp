// A wall clock that jumps back and forth, for every program that it is preloaded into (LD_PRELOAD).
// The machine's own clock stays unchanged, since everything else running there would suffer. All
// processes see the same jumps. The steady clock is left alone, as the kernel does.

#include <array>
#include <cerrno>
#include <cstdint>
#include <ctime>

#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

namespace {

constexpr std::int64_t second = 1'000'000'000;
/// The clock jumps every two seconds.
constexpr std::int64_t between_jumps = 2 * second;
/// The offsets from the right time, in seconds: larger than any wait of a test, and with smaller
/// differences than the five minutes by which a certificate is valid before it is made.
constexpr std::array<std::int64_t, 6> jumps{0, 120, -45, 0, -110, 90};
/// How long a wait for a wall time lasts before it looks at the clock again.
constexpr std::int64_t longest_wait = second / 10;
/// An earlier time is not a wall time, but one of the steady clock.
constexpr std::int64_t first_wall_time = 1'000'000'000 * second;

std::int64_t count_of(const timespec& time) {
  return time.tv_sec * second + time.tv_nsec;
}

timespec time_of(std::int64_t count) {
  return {count / second, count % second};
}

std::int64_t kernel_time(clockid_t clock) {
  timespec time{};
  ::syscall(SYS_clock_gettime, clock, &time);
  return count_of(time);
}

std::int64_t offset() {
  const auto number = kernel_time(CLOCK_MONOTONIC) / between_jumps;
  // Never returns to exactly the same time, so that two readings always differ.
  return jumps[static_cast<std::size_t>(number) % jumps.size()] * second +
         number % 200 * second / 10;
}

std::int64_t wall_time() {
  return kernel_time(CLOCK_REALTIME) + offset();
}

/// The function that this one replaces.
template <class Function>
Function* next(const char* name, const char* version = nullptr) {
  void* found = version == nullptr ? nullptr : ::dlvsym(RTLD_NEXT, name, version);
  return reinterpret_cast<Function*>(found != nullptr ? found : ::dlsym(RTLD_NEXT, name));
}

/// Waits until the shown clock reaches `until`. `wait` waits until a true time; this calls it in
/// pieces. `otherwise` is the result of a wait that ended early, which its caller must expect.
template <class Wait>
int wait_for_wall_time(const timespec* until, int otherwise, const Wait& wait) {
  const auto wanted = count_of(*until);
  if (wanted < first_wall_time) return wait(*until);
  const auto left = wanted - wall_time();
  const auto piece = left < longest_wait ? left : longest_wait;
  const auto ended = wait(time_of(kernel_time(CLOCK_REALTIME) + piece));
  return ended == ETIMEDOUT && wall_time() < wanted ? otherwise : ended;
}

}  // namespace

extern "C" {

int clock_gettime(clockid_t clock, timespec* time) {
  const bool wall = clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE;
  static const auto real = next<int(clockid_t, timespec*)>("clock_gettime");
  const int done = real(clock, time);
  if (wall && done == 0) *time = time_of(count_of(*time) + offset());
  return done;
}

int gettimeofday(timeval* time, void*) {
  const auto now = time_of(wall_time());
  *time = {now.tv_sec, now.tv_nsec / 1'000};
  return 0;
}

std::time_t time(std::time_t* where) {
  const auto now = wall_time() / second;
  if (where != nullptr) *where = now;
  return now;
}

int timespec_get(timespec* time, int base) {
  if (base != TIME_UTC) return 0;
  *time = time_of(wall_time());
  return base;
}

int pthread_cond_timedwait(pthread_cond_t* condition, pthread_mutex_t* mutex,
                           const timespec* until) {
#if defined(__x86_64__)
  constexpr auto version = "GLIBC_2.3.2";
#else
  constexpr auto version = "GLIBC_2.17";
#endif
  static const auto real =
      next<int(pthread_cond_t*, pthread_mutex_t*, const timespec*)>(__func__, version);
  return wait_for_wall_time(until, 0,
                            [&](const timespec& time) { return real(condition, mutex, &time); });
}

int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                           const timespec* until) {
  static const auto real =
      next<int(pthread_cond_t*, pthread_mutex_t*, clockid_t, const timespec*)>(__func__);
  if (clock != CLOCK_REALTIME) return real(condition, mutex, clock, until);
  return wait_for_wall_time(
      until, 0, [&](const timespec& time) { return real(condition, mutex, clock, &time); });
}

int sem_timedwait(sem_t* semaphore, const timespec* until) {
  static const auto real = next<int(sem_t*, const timespec*)>(__func__);
  const auto wait = [&](const timespec& time) { return real(semaphore, &time) == 0 ? 0 : errno; };
  const int ended = wait_for_wall_time(until, EINTR, wait);
  if (ended == 0) return 0;
  errno = ended;
  return -1;
}

int clock_nanosleep(clockid_t clock, int flags, const timespec* until, timespec* rest) {
  static const auto real = next<int(clockid_t, int, const timespec*, timespec*)>(__func__);
  if (clock != CLOCK_REALTIME || (flags & TIMER_ABSTIME) == 0)
    return real(clock, flags, until, rest);
  for (;;) {
    const auto left = count_of(*until) - wall_time();
    if (left <= 0) return 0;
    const auto piece = time_of(left < longest_wait ? left : longest_wait);
    if (const int failed = real(CLOCK_MONOTONIC, 0, &piece, nullptr); failed != 0) return failed;
  }
}

}  // extern "C"
