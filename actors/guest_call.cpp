#include "troupe/actors/guest_call.hpp"

#include <caf/logger.hpp>

namespace troupe::actors {

guest_call::~guest_call() {
  caf::logger::set_current_actor_system(nullptr);
}

}  // namespace troupe::actors
