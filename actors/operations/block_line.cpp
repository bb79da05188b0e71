#include "troupe/actors/operations/block_line.hpp"

#include <utility>

namespace troupe::actors {

result<void> block_line::wait(operation_id operation, std::uint32_t count, time_point deadline) {
  if (pool_ == nullptr) {
    return fail(errc::invalid_config,
                "this node has no pool of its own; name the destination blocks");
  }
  const auto waiter = pool_->wait(count, deadline);
  if (!waiter) return fail(waiter.error());
  operation_of_.emplace(*waiter, operation);
  waiter_of_.emplace(operation, *waiter);
  return {};
}

void block_line::leave(operation_id operation) {
  const auto found = waiter_of_.find(operation);
  if (found == waiter_of_.end()) return;
  operation_of_.erase(found->second);
  pool_->cancel(found->second);
  waiter_of_.erase(found);
}

std::vector<block_line::answer> block_line::serve(time_point now) {
  std::vector<answer> answers;
  if (pool_ == nullptr) return answers;
  for (auto& served : pool_->serve(now)) {
    const auto found = operation_of_.find(served.waiter);
    if (found == operation_of_.end()) {
      // It left the line at the same moment: nobody else knows of these blocks.
      if (served.outcome) (void)pool_->free(served.outcome->owner, served.outcome->blocks);
      continue;
    }
    answers.push_back({found->second, std::move(served.outcome)});
    waiter_of_.erase(found->second);
    operation_of_.erase(found);
  }
  return answers;
}

}  // namespace troupe::actors
