#include "processes.hpp"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>

#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

namespace troupe::bench {

void die(const std::string& what) {
  std::fprintf(stderr, "%s: %s\n", program_invocation_short_name, what.c_str());
  std::_Exit(1);
}

double seconds_since(clock_type::time_point start) {
  return std::chrono::duration<double>(clock_type::now() - start).count();
}

double microseconds_since(clock_type::time_point start) {
  return seconds_since(start) * 1e6;
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

std::uint64_t resident_bytes() {
  auto* file = std::fopen("/proc/self/statm", "r");
  unsigned long total = 0;
  unsigned long resident = 0;
  if (file == nullptr || std::fscanf(file, "%lu %lu", &total, &resident) != 2) die("statm");
  std::fclose(file);
  return std::uint64_t{resident} * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

double processor_seconds() {
  rusage used{};
  ::getrusage(RUSAGE_SELF, &used);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) / 1e6;
  };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

void control::put_bytes(const void* data, std::size_t size) const {
  if (::send(fd, data, size, MSG_NOSIGNAL) != static_cast<ssize_t>(size)) std::_Exit(0);
}

void control::get_bytes(void* data, std::size_t size) const {
  auto* at = static_cast<char*>(data);
  while (size > 0) {
    const auto got = ::read(fd, at, size);
    if (got <= 0) std::_Exit(0);
    at += got;
    size -= static_cast<std::size_t>(got);
  }
}

void control::put_list(const std::vector<std::byte>& bytes) const {
  put(static_cast<std::uint32_t>(bytes.size()));
  put_bytes(bytes.data(), bytes.size());
}

std::vector<std::byte> control::get_list() const {
  std::vector<std::byte> bytes(get<std::uint32_t>());
  get_bytes(bytes.data(), bytes.size());
  return bytes;
}

bool control::readable() const {
  char c = 0;
  const auto got = ::recv(fd, &c, 1, MSG_PEEK | MSG_DONTWAIT);
  if (got == 0) std::_Exit(0);
  return got > 0;
}

control fork_child(const std::function<void(const control&)>& body) {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) die("socketpair");
  std::fflush(nullptr);
  const auto pid = ::fork();
  if (pid < 0) die("fork");
  if (pid == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::close(ends[0]);
    body(control{ends[1]});
    std::fflush(nullptr);
    std::_Exit(0);
  }
  ::close(ends[1]);
  return control{ends[0]};
}

}  // namespace troupe::bench
