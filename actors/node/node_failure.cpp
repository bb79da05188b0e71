#include <utility>

#include <spdlog/spdlog.h>

#include "troupe/actors/base/phrases.hpp"
#include "troupe/actors/logging.hpp"
#include "troupe/actors/messages/member_list.hpp"
#include "troupe/actors/node/node_parts.hpp"

namespace troupe::actors::node_parts {

void on_engine_failed(self_pointer self, engine_failed& order) {
  auto& st = self->state;
  const bool first = st.failure.empty();
  auto why = printable(order.why, max_failure);
  if (why.empty()) why = "a failure without a reason";
  if (why == st.failure) return;
  st.failure = std::move(why);
  logger("node")->error("the engine of {} reports that it can serve nobody: {}",
                        st.context->self.name, st.failure);
  // Another reason goes with the next beat: who reports one after the other must not flood anybody.
  if (first && st.registered) say_alive(self);
}

void on_engine_recovered(self_pointer self) {
  auto& st = self->state;
  if (st.failure.empty()) return;
  logger("node")->info("the engine of {} has recovered from: {}", st.context->self.name,
                       st.failure);
  st.failure.clear();
  if (!st.registered) return;  // it is about to register
  st.registered = false;
  reach_supervisor(self);
}

}  // namespace troupe::actors::node_parts
