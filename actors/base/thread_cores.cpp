#include "troupe/actors/base/thread_cores.hpp"

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>

#include "troupe/transport/os_error.hpp"

namespace troupe::actors {

namespace {

/// More than any kernel supports (CONFIG_NR_CPUS is 8,192 at most).
constexpr unsigned most_cores = 65'536;

std::size_t bytes_of(const std::vector<cpu_set_t>& cores) {
  return cores.size() * sizeof(cpu_set_t);
}

result<thread_cores> refused(unsigned core) {
  return fail(errc::invalid_config, "core " + std::to_string(core) +
                                        " is not one that this process may use; see `taskset -p` "
                                        "and the cpuset of its container");
}

}  // namespace

result<thread_cores::core_set> thread_cores::current() {
  // The kernel refuses a set that is too small for its cores.
  for (core_set cores(1);; cores.resize(2 * cores.size())) {
    if (::sched_getaffinity(0, bytes_of(cores), cores.data()) == 0) return cores;
    if (errno != EINVAL || cores.size() * CPU_SETSIZE >= most_cores) {
      return fail(errc::internal, "sched_getaffinity: " + transport::what_errno(errno));
    }
  }
}

bool thread_cores::set(const core_set& cores) noexcept {
  return ::sched_setaffinity(0, bytes_of(cores), cores.data()) == 0;
}

result<thread_cores> thread_cores::keep(std::span<const unsigned> cores) {
  if (cores.empty()) return thread_cores{core_set{}};
  auto before = current();
  if (!before) return fail(std::move(before).error());
  const auto last = *std::ranges::max_element(cores);
  if (last >= most_cores) return refused(last);
  core_set wanted(std::max<std::size_t>(before->size(), last / CPU_SETSIZE + 1));
  for (auto& part : wanted) CPU_ZERO(&part);
  for (const auto core : cores) CPU_SET_S(core, bytes_of(wanted), wanted.data());
  thread_cores kept{std::move(*before)};
  const bool is_set = set(wanted);
  if (!is_set && errno != EINVAL) {
    return fail(errc::invalid_config, "sched_setaffinity: " + transport::what_errno(errno));
  }
  // The kernel applies what it can of a set, and does not report what it leaves out.
  auto now = current();
  if (!now) return fail(std::move(now).error());
  for (const auto core : cores) {
    if (!is_set || core / CPU_SETSIZE >= now->size() ||
        !CPU_ISSET_S(core, bytes_of(*now), now->data())) {
      return refused(core);
    }
  }
  return kept;
}

thread_cores::thread_cores(thread_cores&& other) noexcept
    : before_{std::exchange(other.before_, {})} {}

thread_cores::~thread_cores() {
  if (!before_.empty()) (void)set(before_);
}

}  // namespace troupe::actors
