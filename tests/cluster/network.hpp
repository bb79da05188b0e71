#pragma once

/// A network of hosts inside this machine: one network namespace for each host, joined by a bridge in
/// a namespace that the calling process enters itself. The namespaces have no names: the kernel
/// removes them and all that is in them with the last process of the test, however it ends.

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace troupe::testing {

/// Whose addresses the hosts have.
enum class addresses {
  /// 127.77.0.x, which leave their host even so: what listens on nothing but loopback addresses
  /// can be cut off from the others.
  loopback,
  /// 10.77.0.x
  open,
};

class network {
 public:
  /// Why no such network can be made here (no root, no iproute2); nothing if it can.
  [[nodiscard]] static std::optional<std::string> missing();
  /// Hosts of these names with the addresses .11, .12, ... The calling thread, which must be the only
  /// one of the process, stands at the bridge (.1) from now on.
  network(const std::vector<std::string>& names, addresses which);
  ~network();
  network(const network&) = delete;
  network& operator=(const network&) = delete;

  /// Empty if it could not be made: `why` says it.
  [[nodiscard]] const std::string& why() const { return why_; }
  [[nodiscard]] std::string address(const std::string& name) const;
  /// Descriptor of the host's namespace, for `setns` in a child.
  [[nodiscard]] int space(const std::string& name) const;

  /// What each host sends takes its time, so that faults find bytes under way: megabits a second.
  /// Where the kernel cannot do that it goes on as fast as before.
  void slow_down(std::uint32_t megabits) const;
  /// No packet between the two arrives any more, and nobody is told.
  void cut(const std::string& a, const std::string& b) const;
  void mend(const std::string& a, const std::string& b) const;
  /// The host's cable is pulled out.
  void unplug(const std::string& name) const;
  void plug(const std::string& name) const;
  /// Everything is whole again.
  void mend_all() const;

 private:
  struct host {
    int number{0};
    int space{-1};
  };
  /// Why it could not be made.
  [[nodiscard]] std::string make(const std::vector<std::string>& names);
  [[nodiscard]] std::string at(int number) const;
  void ip(int space, const std::string& commands) const;
  static void in_space(int space, const char* command, const std::string& lines);

  std::string prefix_;
  int hub_{-1};
  std::map<std::string, host> hosts_;
  std::string why_;
};

}  // namespace troupe::testing
