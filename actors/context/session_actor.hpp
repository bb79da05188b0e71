#pragma once

#include <memory>

#include <caf/typed_actor.hpp>
#include <caf/typed_event_based_actor.hpp>

#include "troupe/actors/context/session.hpp"
#include "troupe/actors/messages/messages.hpp"

namespace troupe::actors {

struct session_options {
  std::unique_ptr<session> made;
  link_actor link;
  runner_actor runner;
  caf::typed_actor<caf::reacts_to<pool_command>> pool;
};

/// The state of a session's actor, which serves the session with CAF: what it asks for becomes
/// messages. Not final: CAF derives from it to see whether it has a `name`.
class session_slot : public session_surroundings {
 public:
  using self_pointer = session_actor::stateful_pointer<session_slot>;

  explicit session_slot(self_pointer self) : self_{self} {}

  [[nodiscard]] session_actor::behavior_type begin(session_options with);

  // -- session_surroundings

  [[nodiscard]] time_point now() const override;
  [[nodiscard]] session_actor this_session() const override;
  void tell_link(link_command order) override;
  void tell_runner(runner_event event) override;
  void tell_pool(pool_command order) override;
  void tell_itself(session_event event) override;
  void finish() override;

  const char* name{"session"};  ///< for CAF; that of the session once it begins

 private:
  const self_pointer self_;
  session_options with_;
};

[[nodiscard]] session_actor::behavior_type session_behavior(session_slot::self_pointer self,
                                                            session_options options);

}  // namespace troupe::actors
