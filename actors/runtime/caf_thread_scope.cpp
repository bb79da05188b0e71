#include "troupe/actors/runtime/caf_thread_scope.hpp"

#include <caf/logger.hpp>

namespace troupe::actors {

caf_thread_scope::~caf_thread_scope() {
  caf::logger::set_current_actor_system(nullptr);
}

}  // namespace troupe::actors
