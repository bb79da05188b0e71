#include "troupe/actors/crash.hpp"

#include <utility>

#include <caf/abstract_actor.hpp>
#include <caf/exit_reason.hpp>
#include <spdlog/spdlog.h>

#include "troupe/actors/logging.hpp"

namespace troupe::actors {

bool crashed(const caf::error& reason) {
  return reason && reason != caf::exit_reason::user_shutdown;
}

void watch_essential(const context_ptr& context, const caf::strong_actor_ptr& actor,
                     std::string what) {
  // Runs on the thread that the actor ends on; all that it touches is thread-safe.
  actor->get()->attach_functor([context, what = std::move(what)](const caf::error& reason) {
    if (!crashed(reason)) return;
    const troupe::error why{errc::internal,
                            what +
                                " crashed (see the log); this node serves nobody any more, "
                                "start it again"};
    logger("node")->error("{}: {}", context->self.name, why.message);
    context->registration.end(why);
    for (const auto operation : context->operations.close()) {
      if (context->operations.end(operation)) {
        context->events.push_last({operation, event_failed{why}});
      }
    }
  });
}

}  // namespace troupe::actors
