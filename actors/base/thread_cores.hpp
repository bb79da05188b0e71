#pragma once

#include <span>
#include <vector>

#include <sched.h>

#include "troupe/kvcache/result.hpp"

namespace troupe::actors {

/// Keeps the calling thread on these cores while the object lives; threads that it starts meanwhile
/// stay on them. Must not be moved to another thread.
class thread_cores {
 public:
  /// An empty list changes nothing. `invalid_config` naming a core that this process may not use.
  [[nodiscard]] static result<thread_cores> keep(std::span<const unsigned> cores);
  thread_cores(thread_cores&& other) noexcept;
  thread_cores& operator=(thread_cores&&) = delete;
  ~thread_cores();

 private:
  /// In the kernel's format: a bit for each core.
  using core_set = std::vector<cpu_set_t>;
  explicit thread_cores(core_set before) : before_{std::move(before)} {}

  [[nodiscard]] static result<core_set> current();
  [[nodiscard]] static bool set(const core_set& cores) noexcept;

  core_set before_;  ///< empty: nothing to restore
};

}  // namespace troupe::actors
