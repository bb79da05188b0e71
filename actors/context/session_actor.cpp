#include "troupe/actors/context/session_actor.hpp"

#include <chrono>
#include <utility>

namespace troupe::actors {

session_actor::behavior_type session_slot::begin(session_options with) {
  with_ = std::move(with);
  name = with_.made->name();
  with_.made->begin(*this);
  return {[this](session_event& event) { with_.made->handle(event); }};
}

time_point session_slot::now() const {
  return std::chrono::steady_clock::now();
}

session_actor session_slot::this_session() const {
  return caf::actor_cast<session_actor>(self_);
}

void session_slot::tell_link(link_command order) {
  self_->send(with_.link, std::move(order));
}

void session_slot::tell_runner(runner_event event) {
  self_->send(with_.runner, std::move(event));
}

void session_slot::tell_pool(pool_command order) {
  self_->send(with_.pool, std::move(order));
}

void session_slot::tell_itself(session_event event) {
  self_->send(this_session(), std::move(event));
}

void session_slot::finish() {
  self_->quit();
}

session_actor::behavior_type session_behavior(session_slot::self_pointer self,
                                              session_options options) {
  return self->state.begin(std::move(options));
}

}  // namespace troupe::actors
