#pragma once

#include <future>

#include <caf/actor_system.hpp>
#include <caf/io/middleman.hpp>

namespace troupe::actors::testing {

/// Blocks the network loop of that system for its lifetime, so that everything that arrives
/// meanwhile is handled in a single turn of the loop.
class one_turn {
 public:
  explicit one_turn(caf::actor_system& system) {
    std::promise<void> stands;
    const auto stood = stands.get_future();
    system.middleman().backend().post(
        [stands = std::move(stands), go_on = go_on_.get_future()]() mutable {
          stands.set_value();
          go_on.wait();
        });
    stood.wait();
  }
  ~one_turn() { go_on_.set_value(); }
  one_turn(const one_turn&) = delete;
  one_turn& operator=(const one_turn&) = delete;

 private:
  std::promise<void> go_on_;
};

}  // namespace troupe::actors::testing
