#pragma once

/// Whether what is used belongs to this process. A child of `fork` has the memory of its parent and
/// none of its threads: whoever waits for one of them waits for ever.

#include <cstdint>
#include <string_view>

#include "troupe/kvcache/result.hpp"

namespace troupe::c {

/// Held by every engine and cluster: the process that it was made in.
class process_life {
 public:
  /// `stale_incarnation`: this process was forked from one that had an engine or a cluster, whose
  /// locks nobody will give back.
  [[nodiscard]] static result<void> can_begin(std::string_view what);

  process_life();
  ~process_life();
  process_life(const process_life&) = delete;
  process_life& operator=(const process_life&) = delete;

  [[nodiscard]] bool is_this_process() const noexcept;
  /// `stale_incarnation` naming the process that `what` was begun in.
  [[nodiscard]] result<void> check(std::string_view what) const;

 private:
  std::uint64_t forks_;
  int pid_;
};

}  // namespace troupe::c
