#pragma once

/// Whether an object belongs to this process. A child of `fork` has its parent's memory and none of
/// its threads: waiting for one of them would never end.

#include <cstdint>
#include <string_view>

#include "troupe/kvcache/result.hpp"

namespace troupe::c {

/// The process in which an engine or a cluster was made.
class process_life {
 public:
  /// `stale_incarnation` if this process was forked from one that had an engine or a cluster, whose
  /// locks will never be released.
  [[nodiscard]] static result<void> can_begin(std::string_view what);

  process_life();
  ~process_life();
  process_life(const process_life&) = delete;
  process_life& operator=(const process_life&) = delete;

  [[nodiscard]] bool is_this_process() const noexcept;
  /// `stale_incarnation`, naming the process that `what` was begun in, if that is another one.
  [[nodiscard]] result<void> check(std::string_view what) const;

 private:
  std::uint64_t forks_;
  int pid_;
};

}  // namespace troupe::c
