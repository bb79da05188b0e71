#include "troupe/actors/node/node_end.hpp"

#include <utility>

#include <spdlog/spdlog.h>

#include "troupe/actors/logging.hpp"
#include "troupe/actors/runtime/crash.hpp"

namespace troupe::actors {

void end_node(node_context& context, const std::string& what_happened) {
  const troupe::error why{
      errc::internal,
      what_happened + " (see the log); this node no longer serves anybody, start it again"};
  logger("node")->error("{}: {}", context.self.name, why.message);
  context.registration.end(why);
  for (const auto operation : context.operations.close()) {
    (void)context.events.conclude({operation, event_failed{why}});
  }
  context.events.close(why);
}

void watch_essential(const context_ptr& context, const caf::strong_actor_ptr& actor,
                     std::string what) {
  on_crash(actor, [context, what = std::move(what)] {  // touches only thread-safe objects
    end_node(*context, what + " crashed");
  });
}

}  // namespace troupe::actors
