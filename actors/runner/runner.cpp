#include "troupe/actors/runner/runner.hpp"

#include <random>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <caf/event_based_actor.hpp>
#include <caf/send.hpp>
#include <caf/typed_event_based_actor.hpp>

#include "troupe/actors/context/session_actor.hpp"
#include "troupe/actors/runner/operation_runner.hpp"
#include "troupe/actors/runtime/inline_executor.hpp"
#include "troupe/actors/runtime/system.hpp"

namespace troupe::actors {

namespace operations {

/// Serves the runner with CAF. What the runner asks for becomes messages, timers and actors;
/// messages and the ends of timers and actors become calls of the runner.
class runner_actor_state final : public runner_surroundings {
 public:
  using self_pointer = runner_actor::stateful_pointer<runner_slot>;

  runner_actor_state(self_pointer self, context_ptr context)
      : self_{self}, runner_{*this, std::move(context)} {}

  [[nodiscard]] runner_actor::behavior_type begin() {
    self_->set_down_handler([this](const caf::down_msg& down) { on_down(down); });
    return {
        [this](engine_command& command) { runner_.handle(command); },
        [this](runner_event& event) { runner_.handle(event); },
        [this](node_notice& notice) { runner_.handle(notice); },
        [this](report_atom) { return runner_.report(); },
        [this](tick_atom) { runner_.tick(); },
    };
  }

  // -- runner_surroundings

  [[nodiscard]] time_point now() const override { return std::chrono::steady_clock::now(); }
  [[nodiscard]] std::uint64_t draw() override { return random_(); }
  void wake_after(std::chrono::nanoseconds pause) override {
    self_->delayed_send(self_, pause, tick_atom::value);
  }
  void tell_itself(runner_event event) override { self_->send(self_, std::move(event)); }
  void do_elsewhere(std::function<runner_event()> work) override {
    self_->system().spawn(
        [](caf::event_based_actor* worker, const runner_actor& runner,
           const std::function<runner_event()>& what) { worker->send(runner, what()); },
        this_runner(), std::move(work));
  }
  void connect(connect_operations& to) override {
    node_ = std::move(to.node);
    pool_ = std::move(to.pool);
  }
  /// Never on this thread, which may be the engine's: the node also calls the engine back.
  void need_link(actors::need_link order) override {
    caf::anon_send(node_, node_command{std::move(order)});
  }
  void tell_pool(pool_command order) override { tell(pool_, std::move(order)); }
  void tell_link(const link_handle& link, link_command order) override {
    tell(link.actor, std::move(order));
  }
  void watch_link(const link_handle& link) override {
    self_->monitor(link.actor);
    links_.insert(link.id);
  }
  session_actor begin_session(transfer_id transfer, const link_handle& link,
                              std::unique_ptr<session> made) override {
    return watched(transfer, self_->spawn(session_behavior, options_for(link, std::move(made))));
  }
  session_actor begin_session_elsewhere(transfer_id transfer, const link_handle& link,
                                        std::unique_ptr<session> made) override {
    return watched(transfer,
                   self_->system().spawn(session_behavior, options_for(link, std::move(made))));
  }
  void tell_session(transfer_id /*transfer*/, const session_actor& to,
                    session_event event) override {
    tell(to, std::move(event));
  }

 private:
  [[nodiscard]] runner_actor this_runner() const { return caf::actor_cast<runner_actor>(self_); }
  [[nodiscard]] session_options options_for(const link_handle& link,
                                            std::unique_ptr<session> made) const {
    return {std::move(made), link.actor, this_runner(), pool_};
  }
  session_actor watched(transfer_id transfer, session_actor made) {
    self_->monitor(made);
    sessions_.emplace(made.id(), transfer);
    return made;
  }
  void on_down(const caf::down_msg& down) {
    if (links_.erase(down.source.id()) != 0) {
      runner_.on_link_ended(down.source.id(), static_cast<bool>(down.reason));
    } else if (const auto ended = sessions_.extract(down.source.id()); ended && down.reason) {
      runner_.on_session_crashed(ended.mapped(), self_->system().render(down.reason));
    }
  }

  const self_pointer self_;
  caf::typed_actor<caf::reacts_to<node_command>> node_;
  caf::typed_actor<caf::reacts_to<pool_command>> pool_;
  std::unordered_set<caf::actor_id> links_;
  std::unordered_map<caf::actor_id, transfer_id> sessions_;
  std::mt19937_64 random_{std::random_device{}()};
  operation_runner runner_;
};

}  // namespace operations

runner_slot::runner_slot() = default;
runner_slot::~runner_slot() = default;

runner_actor::behavior_type runner_behavior(runner_actor::stateful_pointer<runner_slot> self,
                                            context_ptr context) {
  set_log_handlers(*self, "operations");
  self->state.runner = std::make_unique<operations::runner_actor_state>(self, std::move(context));
  return self->state.runner->begin();
}

}  // namespace troupe::actors
