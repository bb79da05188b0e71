#pragma once

#include <cstdint>
#include <optional>
#include <string>

/// Engine memory is moved by process_vm_readv and process_vm_writev, which the kernel permits only
/// to a process that may trace the owner of the memory. Memory that the endpoint allocates is
/// mapped, and needs no such permission.
namespace troupe::transport::shm {

/// `kernel.yama.ptrace_scope`; empty if this kernel has none.
[[nodiscard]] std::optional<int> ptrace_scope();

/// Why the kernel may refuse tracing among processes of one user, and what to change. One clause,
/// without its full stop.
[[nodiscard]] std::string why_not_traced(std::optional<int> scope);

/// The processes that may trace this one. The kernel keeps one name, and "any" is never narrowed
/// again.
class named_tracers {
 public:
  /// The argument for PR_SET_PTRACER that also lets `pid` trace this process.
  [[nodiscard]] unsigned long with(std::uint32_t pid);

 private:
  std::optional<std::uint32_t> first_;
  bool any_{false};
};

/// Lets a process access the memory of this one where `ptrace_scope` is 1: only processes that this
/// one has named may do so. From the second peer on the name is "any": any process of the same
/// user. Replaces what the engine has set by PR_SET_PTRACER. Thread-safe. Returns false if there
/// was no need to name the process.
bool let_trace(std::uint32_t pid);

}  // namespace troupe::transport::shm
