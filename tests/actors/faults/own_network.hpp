#pragma once

/// A network of this process and the children that it forks, whose loopback addresses the test may
/// cut off. Needs the rights of root, and `ip` (package iproute2).

#include <cstdlib>
#include <string>

#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

namespace troupe::testing {

/// Made while the process has no other threads; the process returns to its former network at the end.
class own_network {
 public:
  own_network() {
    before_ = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    if (before_ < 0 || unshare(CLONE_NEWNET) != 0) return;
    // What is local is looked up behind the rules that cut.
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
  /// Nothing gets to the address or comes from it any more, and nobody is told.
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
