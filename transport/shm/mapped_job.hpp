#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <vector>

#include "troupe/kvcache/result.hpp"
#include "troupe/transport/backend.hpp"

namespace troupe::transport::shm {

/// A batch on its way over a `mapped_link`. What it is besides knows the leaf that moves its bytes.
struct mapped_job {
  mapped_job() = default;
  mapped_job(const mapped_job&) = delete;
  mapped_job& operator=(const mapped_job&) = delete;
  virtual ~mapped_job() = default;

  /// Ends the use of the local regions.
  virtual void release_memory() = 0;
  /// Indices, over all pieces in order, of the segments that are not certain to have arrived.
  [[nodiscard]] virtual std::vector<std::uint32_t> unfinished() const = 0;

  batch work;
  std::uint64_t total{0};
  std::uint64_t moved{0};
  std::optional<troupe::error> failure;
  bool running{false};  ///< bytes may be moving; under the link's lock
  std::atomic<bool> cancelled{false};
};

}  // namespace troupe::transport::shm
