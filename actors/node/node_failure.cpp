#include <utility>

#include <spdlog/spdlog.h>

#include "troupe/actors/base/phrases.hpp"
#include "troupe/actors/logging.hpp"
#include "troupe/actors/messages/member_list.hpp"
#include "troupe/actors/node/node_core.hpp"

namespace troupe::actors::nodes {

void node_core::on_engine_failed(engine_failed& order) {
  const bool first = failure_.empty();
  auto why = printable(order.why, max_failure);
  if (why.empty()) why = "a failure without a reason";
  if (why == failure_) return;
  failure_ = std::move(why);
  logger("node")->error("the engine of {} reports that it can serve nobody: {}",
                        context_->self.name, failure_);
  // A further reason goes with the next beat: an engine that reports many must not cause a flood.
  if (first && registered_) say_alive();
}

void node_core::on_engine_recovered() {
  if (failure_.empty()) return;
  logger("node")->info("the engine of {} has recovered from: {}", context_->self.name, failure_);
  failure_.clear();
  if (!registered_) return;  // it is about to register
  registered_ = false;
  reach_supervisor();
}

}  // namespace troupe::actors::nodes
