#pragma once

/// A network of hosts inside this machine: one network namespace per host, joined by a bridge in a
/// namespace that the calling process enters itself. The namespaces have no names: the kernel
/// removes them and everything in them with the last process of the test, however it ends.

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace troupe::testing {

/// The addresses of the hosts.
enum class addresses {
  /// 127.77.0.x, but routed between hosts, so that processes that listen only on loopback addresses
  /// can be cut off from each other.
  loopback,
  /// 10.77.0.x
  open,
};

class network {
 public:
  /// Why no such network can be made here (no root, no iproute2). Empty if it can.
  [[nodiscard]] static std::optional<std::string> missing();
  /// Makes hosts of these names with the addresses .11, .12, ... From now on the calling thread,
  /// which must be the only one of the process, is at the bridge (.1).
  network(const std::vector<std::string>& names, addresses which);
  ~network();
  network(const network&) = delete;
  network& operator=(const network&) = delete;

  /// Why the network could not be made. Empty if it was.
  [[nodiscard]] const std::string& why() const { return why_; }
  [[nodiscard]] std::string address(const std::string& name) const;
  /// Descriptor of the host's namespace, for `setns` in a child.
  [[nodiscard]] int space(const std::string& name) const;

  /// Limits what each host sends to that rate, so that faults find bytes in flight. If the kernel
  /// cannot do that, the speed stays as it is.
  void slow_down(std::uint32_t megabits) const;
  /// Drops every packet between the two, without any error to a sender.
  void cut(const std::string& a, const std::string& b) const;
  void mend(const std::string& a, const std::string& b) const;
  /// Pulls out the host's cable.
  void unplug(const std::string& name) const;
  void plug(const std::string& name) const;
  /// Undoes every cut and unplug.
  void mend_all() const;

 private:
  struct host {
    int number{0};
    int space{-1};
  };
  /// Returns why it could not be made, or an empty string.
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
