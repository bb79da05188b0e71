#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "troupe/actors/engine_types.hpp"
#include "troupe/actors/operations/cache_pool.hpp"

namespace troupe::actors {

/// The operations that wait for blocks of a node's pool, in the order of arrival. Clockless, for one
/// thread at a time.
class block_line {
 public:
  using time_point = cache_pool::time_point;

  /// `pool` outlives the line. Null: the node has none, and nobody can wait.
  explicit block_line(cache_pool* pool) noexcept : pool_{pool} {}

  /// Stands in line until `serve` answers. `invalid_config`: there is no pool; else as
  /// `cache_pool::wait`.
  [[nodiscard]] result<void> wait(operation_id operation, std::uint32_t count, time_point deadline);
  /// The operation waits no more.
  void leave(operation_id operation);

  struct answer {
    operation_id operation;
    result<kvcache::allocation> blocks;
  };
  /// Those that have their blocks now, and those whose deadline has passed.
  [[nodiscard]] std::vector<answer> serve(time_point now);
  [[nodiscard]] bool empty() const noexcept { return operation_of_.empty(); }

 private:
  cache_pool* pool_;
  std::unordered_map<kvcache::waiter_id, operation_id> operation_of_;
  std::unordered_map<operation_id, kvcache::waiter_id> waiter_of_;
};

}  // namespace troupe::actors
