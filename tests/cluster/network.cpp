#include "network.hpp"

#include <cerrno>
#include <cstring>
#include <fstream>

#include <fcntl.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

namespace troupe::testing {

namespace {

constexpr int first_host = 11;

/// Where a command of iproute2 is. Empty if it is missing.
std::string path_of(const char* command) {
  for (const char* folder : {"/usr/sbin/", "/sbin/", "/usr/bin/", "/bin/"}) {
    const auto path = std::string{folder} + command;
    if (::access(path.c_str(), X_OK) == 0) return path;
  }
  return {};
}

int this_space() {
  return ::open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC);
}

std::string link_of(int number) {
  return "host" + std::to_string(number);
}

/// Routes 127.0.0.0/8 over the device like any other network. Returns whether that works.
bool open_loopback(const std::string& device) {
  std::ofstream{"/proc/sys/net/ipv4/conf/" + device + "/route_localnet"} << "1\n";
  std::ifstream in{"/proc/sys/net/ipv4/conf/" + device + "/route_localnet"};
  int value = 0;
  in >> value;
  return value == 1;
}

/// Leaves only 127.0.0.1 local to the host, not all of 127.0.0.0/8.
constexpr const char* narrow_loopback =
    "link set lo up\naddr del 127.0.0.1/8 dev lo\naddr add 127.0.0.1/32 dev lo\n";

}  // namespace

std::optional<std::string> network::missing() {
  if (::geteuid() != 0) return "network namespaces need root";
  if (path_of("ip").empty()) return "the command ip is missing; install iproute2";
  const pid_t child = ::fork();
  if (child == 0) ::_exit(::unshare(CLONE_NEWNET) == 0 ? 0 : 1);
  int status = 1;
  if (child < 0 || ::waitpid(child, &status, 0) != child || status != 0)
    return "this machine makes no network namespaces";
  return std::nullopt;
}

network::network(const std::vector<std::string>& names, addresses which)
    : prefix_{which == addresses::loopback ? "127.77.0." : "10.77.0."}, why_{make(names)} {}

std::string network::make(const std::vector<std::string>& names) {
  const auto fails = [](const char* what) {
    return std::string{what} + ": " + std::strerror(errno);
  };
  if (::unshare(CLONE_NEWNET) != 0) return fails("no namespace");
  hub_ = this_space();
  int number = first_host;
  for (const auto& name : names) {
    if (::unshare(CLONE_NEWNET) != 0) return fails("no namespace for a host");
    hosts_[name] = {number++, this_space()};
  }
  if (::setns(hub_, CLONE_NEWNET) != 0) return fails("cannot return to the bridge");
  std::string commands = narrow_loopback;
  commands +=
      "link add bridge0 type bridge\nlink set bridge0 up\naddr add " + at(1) + "/24 dev bridge0\n";
  const auto self = std::to_string(::getpid());
  for (const auto& [name, h] : hosts_) {
    const auto link = link_of(h.number);
    commands += "link add " + link + " type veth peer name eth0 netns /proc/" + self + "/fd/" +
                std::to_string(h.space) + "\nlink set " + link + " master bridge0 up\n";
  }
  ip(hub_, commands);
  if (!open_loopback("bridge0")) return fails("cannot set route_localnet");
  for (const auto& [name, h] : hosts_) {
    ip(h.space, std::string{narrow_loopback} + "link set eth0 up\naddr add " + at(h.number) +
                    "/24 dev eth0\n");
    if (::setns(h.space, CLONE_NEWNET) != 0) return fails("cannot enter a host");
    if (!open_loopback("eth0")) return fails("cannot set route_localnet of a host");
  }
  if (::setns(hub_, CLONE_NEWNET) != 0) return fails("cannot return to the bridge");
  return {};
}

network::~network() {
  for (const auto& [name, h] : hosts_) {
    if (h.space >= 0) ::close(h.space);
  }
  if (hub_ >= 0) ::close(hub_);
}

std::string network::address(const std::string& name) const {
  return at(hosts_.at(name).number);
}

int network::space(const std::string& name) const {
  return hosts_.at(name).space;
}

void network::slow_down(std::uint32_t megabits) const {
  const auto rate = "qdisc replace dev eth0 root tbf rate " + std::to_string(megabits) +
                    "mbit burst 128kb latency 100ms\n";
  for (const auto& [name, h] : hosts_) in_space(h.space, "tc", rate);
}

// Uses a neighbour entry that belongs to no host: frames to it are lost, and the sender gets no
// error, as on a real network. (A removed route would tell the sender at once.)
void network::cut(const std::string& a, const std::string& b) const {
  const auto lose = [&](const host& from, const host& to) {
    ip(from.space,
       "neigh replace " + at(to.number) + " lladdr 02:00:00:00:00:01 dev eth0 nud permanent\n");
  };
  lose(hosts_.at(a), hosts_.at(b));
  lose(hosts_.at(b), hosts_.at(a));
}

void network::mend(const std::string& a, const std::string& b) const {
  const auto find = [&](const host& from, const host& to) {
    ip(from.space, "neigh del " + at(to.number) + " dev eth0\n");
  };
  find(hosts_.at(a), hosts_.at(b));
  find(hosts_.at(b), hosts_.at(a));
}

void network::unplug(const std::string& name) const {
  ip(hub_, "link set " + link_of(hosts_.at(name).number) + " down\n");
}

void network::plug(const std::string& name) const {
  ip(hub_, "link set " + link_of(hosts_.at(name).number) + " up\n");
}

void network::mend_all() const {
  std::string up;
  for (const auto& [name, h] : hosts_) {
    up += "link set " + link_of(h.number) + " up\n";
    ip(h.space, "neigh flush nud permanent dev eth0\n");
  }
  ip(hub_, up);
}

std::string network::at(int number) const {
  return prefix_ + std::to_string(number);
}

void network::ip(int space, const std::string& commands) const {
  in_space(space, "ip", commands);
}

/// Between fork and exec only calls that are safe in the child of a process with threads.
void network::in_space(int space, const char* command, const std::string& lines) {
  const auto path = path_of(command);
  int input[2];
  if (path.empty() || ::pipe2(input, O_CLOEXEC) != 0) return;
  const pid_t child = ::fork();
  if (child == 0) {
    if (::setns(space, CLONE_NEWNET) == 0 && ::dup2(input[0], STDIN_FILENO) >= 0)
      ::execl(path.c_str(), command, "-force", "-batch", "-", static_cast<char*>(nullptr));
    ::_exit(127);
  }
  [[maybe_unused]] const auto written = ::write(input[1], lines.data(), lines.size());
  ::close(input[0]);
  ::close(input[1]);
  int status = 0;
  if (child > 0) ::waitpid(child, &status, 0);
}

}  // namespace troupe::testing
