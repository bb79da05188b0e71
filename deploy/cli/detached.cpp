#include "troupe/deploy/cli/detached.hpp"

#include <array>
#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstring>
#include <iostream>
#include <string>
#include <vector>

#include <fcntl.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "troupe/transport/folder.hpp"

namespace troupe::deploy::cli {

namespace {

constexpr int first_of_others = STDERR_FILENO + 1;

/// By number: not every header has it. Returns false if the kernel lacks the call (before 5.9).
bool close_from_to(unsigned first, unsigned last) noexcept {
  constexpr long number_of_close_range = 436;
  return first > last || ::syscall(number_of_close_range, first, last, 0U) == 0;
}

/// Closes the descriptors one by one, as the kernel lists them.
void close_listed(int keep) {
  std::vector<int> listed;
  const auto entries = transport::read_folder("/proc/self/fd");
  if (!entries) return;
  for (const auto& entry : *entries) {
    const auto name = entry.filename().string();
    int fd = -1;
    if (std::from_chars(name.data(), name.data() + name.size(), fd).ec == std::errc{})
      listed.push_back(fd);
  }
  for (const int fd : listed)
    if (fd >= first_of_others && fd != keep) ::close(fd);
}

void close_others(int keep) {
  constexpr auto last = ~0U;
  const auto from = static_cast<unsigned>(first_of_others);
  const bool keeps = keep >= first_of_others;
  const auto kept = static_cast<unsigned>(keep);
  const bool closed = keeps ? close_from_to(from, kept - 1) && close_from_to(kept + 1, last)
                            : close_from_to(from, last);
  if (!closed) close_listed(keep);
}

/// Asks for all cores; the kernel limits them to the process's cpuset. Without effect if the kernel
/// refuses.
void use_all_cores() noexcept {
  constexpr std::size_t most_cores = 65'536;  // more than any kernel knows
  std::array<cpu_set_t, most_cores / CPU_SETSIZE> all{};
  std::memset(all.data(), 0xff, sizeof all);
  (void)::sched_setaffinity(0, sizeof all, all.data());
}

unexpected cannot_detach(const char* what) {
  return fail(errc::internal, std::string{"this process cannot be detached: "} + what + ": " +
                                  std::strerror(errno));
}

}  // namespace

result<void> detach(int keep, detached_cores cores) {
  // Opened while an error can still be reported.
  const int nothing = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  if (nothing < 0) return cannot_detach("/dev/null cannot be opened");
  std::cout.flush();
  const auto child = ::fork();
  if (child < 0) {
    const auto why = cannot_detach("no process can be created");
    ::close(nothing);
    return why;
  }
  if (child > 0) ::_exit(0);
  ::setsid();
  if (cores == detached_cores::all) use_all_cores();
  for (int stream = STDIN_FILENO; stream < first_of_others; ++stream)
    if (stream != keep) ::dup2(nothing, stream);
  close_others(keep);
  if (::chdir("/") != 0) return cannot_detach("it cannot change to the folder /");
  return {};
}

}  // namespace troupe::deploy::cli
