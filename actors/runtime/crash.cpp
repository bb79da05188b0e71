#include "troupe/actors/runtime/crash.hpp"

#include <utility>

#include <caf/abstract_actor.hpp>
#include <caf/exit_reason.hpp>

namespace troupe::actors {

bool crashed(const caf::error& reason) {
  return reason && reason != caf::exit_reason::user_shutdown;
}

void on_crash(const caf::strong_actor_ptr& actor, std::function<void()> then) {
  actor->get()->attach_functor([then = std::move(then)](const caf::error& reason) {
    if (crashed(reason)) then();
  });
}

}  // namespace troupe::actors
