#include "troupe/actors/runner/session_fence.hpp"

#include <variant>

namespace troupe::actors {

void session_fence::begin(session_surroundings& around) {
  around_ = &around;
  ask_link(*around_, link_, attach_session{transfer_, around_->this_session()});
  ask_link(*around_, link_, fence_now{transfer_});
}

/// A link that ends or is made again fences its transfers as well, and then says so.
void session_fence::handle(session_event& event) {
  if (!std::holds_alternative<transfer_fenced>(event.what)) return;
  ask_link(*around_, link_, detach_session{transfer_});
  around_->tell_runner({session_unpinned{transfer_}});
  around_->finish();
}

}  // namespace troupe::actors
