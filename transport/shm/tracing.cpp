#include "troupe/transport/shm/tracing.hpp"

#include <fstream>
#include <mutex>
#include <optional>

#include <sys/prctl.h>
#include <unistd.h>

namespace troupe::transport::shm {

namespace {

/// The `ptrace_scope` in which a process names its tracers.
constexpr int only_who_is_named = 1;

}  // namespace

std::optional<int> ptrace_scope() {
  std::ifstream file{"/proc/sys/kernel/yama/ptrace_scope"};
  int scope = 0;
  if (!(file >> scope)) return std::nullopt;
  return scope;
}

std::string why_not_traced(std::optional<int> scope) {
  if (scope.value_or(0) == 0) {
    return "one of the two processes has rights that the other has not, cannot be dumped "
           "(PR_SET_DUMPABLE), or runs in a container that forbids it: start both alike, or give "
           "them CAP_SYS_PTRACE";
  }
  const auto found = "kernel.yama.ptrace_scope is " + std::to_string(*scope);
  if (*scope == only_who_is_named) {
    return found +
           " and naming the peer with PR_SET_PTRACER was not enough: set it to 0, or give "
           "both processes CAP_SYS_PTRACE";
  }
  if (*scope == 2) return found + ": set it to 1, or give both processes CAP_SYS_PTRACE";
  return found + ": boot this host with 0 or 1";
}

unsigned long named_tracers::with(std::uint32_t pid) {
  any_ = any_ || (first_ && *first_ != pid);
  if (!first_) first_ = pid;
  return any_ ? PR_SET_PTRACER_ANY : static_cast<unsigned long>(pid);
}

bool let_trace(std::uint32_t pid) {
  // The kernel keeps one entry for the whole process, so this state is shared, too.
  static std::mutex mutex;
  static named_tracers named;
  if (pid == static_cast<std::uint32_t>(::getpid())) return false;
  const std::lock_guard lock{mutex};
  if (ptrace_scope() != only_who_is_named) return false;
  return ::prctl(PR_SET_PTRACER, named.with(pid), 0, 0, 0) == 0;
}

}  // namespace troupe::transport::shm
