#pragma once

/// A network namespace for this process and the children that it forks. The test may cut off its
/// loopback addresses. Needs root and `ip` (package iproute2).

#include <cstdlib>
#include <string>

#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

namespace troupe::testing {

/// Construct it while the process has a single thread. The destructor returns the process to its
/// former network.
class own_network {
 public:
  own_network() {
    before_ = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    if (before_ < 0 || unshare(CLONE_NEWNET) != 0) return;
    // Move the lookup of local addresses behind the rules that `cut` adds.
    made_ = ip("link set lo up") && ip("rule add pref 100 lookup local") && ip("rule del pref 0");
  }
  ~own_network() {
    if (before_ < 0) return;
    [[maybe_unused]] const auto back = setns(before_, CLONE_NEWNET);
    close(before_);
  }
  own_network(const own_network&) = delete;
  own_network& operator=(const own_network&) = delete;

  [[nodiscard]] bool made() const { return made_; }
  /// Drops all packets to and from the address, without any error to a sender.
  [[nodiscard]] static bool cut(const std::string& address) {
    return ip("rule add pref 1 to " + address + " blackhole") &&
           ip("rule add pref 2 from " + address + " blackhole");
  }
  [[nodiscard]] static bool mend() { return ip("rule del pref 1") && ip("rule del pref 2"); }

 private:
  static bool ip(const std::string& arguments) {
    return std::system(("ip " + arguments + " 2>/dev/null").c_str()) == 0;
  }

  int before_{-1};
  bool made_{false};
};

}  // namespace troupe::testing
