#include "troupe/actors/link/link.hpp"

#include <optional>
#include <string>
#include <utility>

#include <caf/sec.hpp>
#include <caf/typed_event_based_actor.hpp>

#include "troupe/actors/link/link_surroundings.hpp"
#include "troupe/actors/link/peer_link.hpp"
#include "troupe/actors/runtime/inline_executor.hpp"
#include "troupe/actors/runtime/network.hpp"
#include "troupe/actors/runtime/system.hpp"

namespace troupe::actors {

namespace links {

/// Serves one link with CAF. What the link asks for becomes messages and timers; messages and the ends
/// of timers become calls of the link.
class link_actor_state final : public link_surroundings {
 public:
  using self_pointer = link_actor::stateful_pointer<link_slot>;

  link_actor_state(self_pointer self, link_options options)
      : self_{self},
        runner_{std::move(options.runner)},
        settings_{options.context->settings},
        peer_{options.peer},
        reader_{self->system()},
        link_{*this,
              {std::move(options.context), std::move(options.peer), options.role, options.asked}} {}

  [[nodiscard]] link_actor::behavior_type begin() {
    self_->set_down_handler([this](const caf::down_msg& down) { on_down(down); });
    link_.begin();
    return {
        [this](link_command& command) { link_.handle(command); },
        [this](link_event& event) { link_.handle(event); },
        [this](const link_request& request) { return link_.accept(request); },
        [this](const link_notice& notice) { link_.hear(notice); },
        [this](report_atom) { return link_.report(); },
    };
  }

  // -- link_surroundings

  [[nodiscard]] time_point now() const override { return std::chrono::steady_clock::now(); }
  void later(std::chrono::nanoseconds pause, link_command order) override {
    self_->delayed_send(self_, pause, std::move(order));
  }
  void finish() override { self_->quit(); }
  [[nodiscard]] link_actor this_end() const override { return caf::actor_cast<link_actor>(self_); }
  [[nodiscard]] std::uint64_t id() const override { return self_->id(); }
  void tell_runner(runner_event event) override { tell(runner_, std::move(event)); }
  void tell_session(transfer_id /*transfer*/, const session_actor& session,
                    session_event event) override {
    tell(session, std::move(event));
  }
  [[nodiscard]] std::function<void(link_event)> reporter() override {
    return [here = this_end()](link_event event) { tell(here, std::move(event)); };
  }
  void read(transport::link& from, std::size_t polls) override;
  void reach_node() override;
  void ask_node(link_request request, std::function<void(const link_answer&)> then) override {
    ask(node_, std::move(request), std::move(then));
  }
  void ask_end(far_end end, link_request request,
               std::function<void(const link_answer&)> then) override {
    ask(actor_of(end), std::move(request), std::move(then));
  }
  void notify(far_end end, link_notice notice) override {
    self_->send(actor_of(end), std::move(notice));
  }
  void notify_and_wait(far_end end, link_notice notice, std::chrono::milliseconds patience,
                       std::function<void()> then) override {
    self_->request(actor_of(end), patience, std::move(notice))
        .then([then] { then(); }, [then](const caf::error&) { then(); });
  }
  void ask_whether_alive(far_end end, std::function<void()> then) override {
    self_->request(actor_of(end), settings_.peer_silence, report_atom::value)
        .then([then = std::move(then)](const link_report&) { then(); }, [](const caf::error&) {});
  }
  [[nodiscard]] far_end sender() override;
  void monitor(far_end end) override;
  void stop_monitoring(far_end end) override;

 private:
  void on_down(const caf::down_msg& down);
  /// The actor of the present other end; null for any other.
  [[nodiscard]] link_actor actor_of(far_end end) const {
    return end == end_ ? other_end_ : link_actor{};
  }
  template <class Handle>
  void ask(const Handle& whom, link_request request, std::function<void(const link_answer&)> then) {
    self_->request(whom, settings_.connect_timeout, std::move(request))
        .then([then](const link_reply& reply) { then(reply); },
              [this, then](const caf::error& err) {
                then(no_answer{err == caf::sec::request_timeout, self_->system().render(err)});
              });
  }

  const self_pointer self_;
  const runner_actor runner_;
  const node_settings& settings_;  ///< of the context, which `link_` keeps
  const node_info peer_;
  node_actor node_;
  link_actor other_end_;
  far_end end_;                     ///< the number of `other_end_`; also while there is none
  caf::strong_actor_ptr newcomer_;  ///< to whom `sender` gave the next number
  inline_executor reader_;          ///< collects what `read` makes runnable
  peer_link link_;
};

/// A scheduler thread that makes progress would adopt an execution unit (`engine`) for good, and
/// the actors that it makes runnable later would wait there for its next progress. The scopes limit
/// the adoption to this call.
void link_actor_state::read(transport::link& from, std::size_t polls) {
  {
    const inline_executor::scope meanwhile{reader_};
    for (std::size_t rounds = 0; rounds < polls && from.poll(); ++rounds) {
    }
  }
  const inline_executor::scope hands_over{reader_};  // hands over the jobs from before the adoption
}

void link_actor_state::reach_node() {
  reach<node_actor>(self_, peer_.host, peer_.port, settings_.connect_timeout)
      .then(
          [this](const reached& answer) {
            if (!answer.failed) {
              node_ = caf::actor_cast<node_actor>(answer.actor);
              self_->monitor(node_);
            }
            link_.on_node_reached(answer.failed);
          },
          [this](const caf::error& err) {
            link_.on_node_reached(
                troupe::error{errc::peer_unreachable, self_->system().render(err)});
          });
}

far_end link_actor_state::sender() {
  const auto& from = self_->current_sender();
  if (!from) return {};
  if (other_end_ && from->address() == other_end_.address()) return end_;
  newcomer_ = from;
  return {end_.number + 1};
}

void link_actor_state::monitor(far_end end) {
  if (!newcomer_) return;
  end_ = end;
  other_end_ = caf::actor_cast<link_actor>(std::exchange(newcomer_, nullptr));
  self_->monitor(other_end_);
}

void link_actor_state::stop_monitoring(far_end end) {
  if (end != end_ || !other_end_) return;
  self_->demonitor(other_end_.address());
  other_end_ = nullptr;
}

void link_actor_state::on_down(const caf::down_msg& down) {
  if (down.source == other_end_.address()) {
    link_.on_end_down(down.reason ? std::optional{self_->system().render(down.reason)}
                                  : std::nullopt);
  } else if (down.source == node_.address()) {
    link_.on_node_down();
  }
}

}  // namespace links

link_slot::link_slot() = default;
link_slot::~link_slot() = default;

link_actor::behavior_type link_behavior(link_actor::stateful_pointer<link_slot> self,
                                        link_options options) {
  set_log_handlers(*self, "link");
  self->state.link = std::make_unique<links::link_actor_state>(self, std::move(options));
  return self->state.link->begin();
}

}  // namespace troupe::actors
