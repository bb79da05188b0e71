#pragma once

#include <cstdint>
#include <optional>
#include <string>

/// Memory of the engine is moved by process_vm_readv and process_vm_writev, which the kernel permits to
/// whom it permits to trace the process that owns the memory. Memory that the endpoint allocates is
/// mapped, and needs no such permission.
namespace troupe::transport::shm {

/// `kernel.yama.ptrace_scope`; empty: this kernel has none.
[[nodiscard]] std::optional<int> ptrace_scope();

/// Why the kernel may refuse it among processes of one user, and what to change. One clause, without
/// its full stop.
[[nodiscard]] std::string why_not_traced(std::optional<int> scope);

/// Who may trace this process: the kernel keeps one name, and once that is "any" nobody is left out again.
class named_tracers {
 public:
  /// What PR_SET_PTRACER is to be told so that this one may as well.
  [[nodiscard]] unsigned long with(std::uint32_t pid);

 private:
  std::optional<std::uint32_t> first_;
  bool any_{false};
};

/// Lets a process reach the memory of this one where `ptrace_scope` is 1, under which only those do that
/// this process has named. From the second peer on that is "any", which means any process of the same user.
/// Replaces what the engine has set by PR_SET_PTRACER. Thread-safe. False: nothing was to be named.
bool let_trace(std::uint32_t pid);

}  // namespace troupe::transport::shm
