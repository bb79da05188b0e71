#pragma once

/// The actor of one node in the test's own process, which dials a peer that the test plays.

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <caf/send.hpp>
#include <caf/stateful_actor.hpp>
#include <gtest/gtest.h>

#include "troupe/actors/node/node.hpp"
#include "troupe/actors/runner/runner.hpp"

#include "cluster_peer.hpp"
#include "waiting.hpp"

namespace troupe::actors::testing {

using namespace std::chrono_literals;

/// Messages that actors sent to the test.
template <class What>
class inbox {
 public:
  void put(What what) {
    const std::lock_guard lock{mutex_};
    all_.push_back(std::move(what));
    changed_.notify_all();
  }
  [[nodiscard]] std::size_t size() {
    const std::lock_guard lock{mutex_};
    return all_.size();
  }
  /// Message number `index`; empty if it does not come in time.
  std::optional<What> at(std::size_t index) {
    std::unique_lock lock{mutex_};
    const auto here = [&] { return all_.size() > index; };
    if (!changed_.wait_for(lock, troupe::testing::wait_limit, here)) return std::nullopt;
    return all_[index];
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<What> all_;
};

template <class What>
using inbox_ptr = std::shared_ptr<inbox<What>>;

/// Called with a request for a link and the actor of that link.
using asked_for_link = std::function<void(const link_request&, const caf::strong_actor_ptr&)>;

/// Ends that actor as a defect would.
inline void crashes_the_link(const link_request&, const caf::strong_actor_ptr& link) {
  caf::anon_send_exit(link, caf::exit_reason::unhandled_exception);
}

/// A peer that answers no request for a link.
inline node_actor::behavior_type mute(node_actor::pointer self, const asked_for_link& asked) {
  return {
      [](members_atom, const membership&) {},
      [](register_again_atom) {},
      [](drain_atom, const drain_order&) {},
      [self, asked](const link_request& request) {
        asked(request, self->current_sender());
        return self->make_response_promise<link_reply>();
      },
      [](report_atom) { return node_report{}; },
      [](const call_request&) { return call_reply{}; },
  };
}

/// A peer that hands every link request to `end`.
inline node_actor::behavior_type accepting_node(node_actor::pointer self, link_actor end) {
  return {
      [](members_atom, const membership&) {},
      [](register_again_atom) {},
      [](drain_atom, const drain_order&) {},
      [self, end](const link_request& request) { return self->delegate(end, request); },
      [](report_atom) { return node_report{}; },
      [](const call_request&) { return call_reply{}; },
  };
}

inline context_ptr context_of(const std::string& name) {
  node_settings settings;
  settings.cluster = "demo";
  settings.self = request_of(name, 7).node;
  settings.backend = transport::backend_kind::tcp;
  settings.default_deadline = 10 * troupe::testing::wait_limit;
  return std::make_shared<node_context>(std::move(settings));
}

/// A runner that records the links that could not be made.
inline runner_actor::behavior_type disappointed(runner_actor::pointer, inbox_ptr<link_gone> gone) {
  return {
      [](engine_command&) {},
      [](node_notice&) {},
      [gone](runner_event& event) {
        if (const auto* what = std::get_if<link_gone>(&event.what)) gone->put(*what);
      },
      [](report_atom) { return transfer_reports{}; },
      [](tick_atom) {},
  };
}

/// A node actor that makes links on demand, and the peer that it dials.
class dialling_node : public ::testing::Test {
 protected:
  actor_host there, here;
  context_ptr context = context_of("decode-0");
  transport::endpoint_options place;  ///< of the node
  inbox_ptr<link_gone> gone = std::make_shared<inbox<link_gone>>();
  local_node_actor actor;
  std::uint16_t peer_port{0};
  std::uint64_t epoch{0};
  /// Changes what the peer says of itself. By default it is a process of this host.
  std::function<void(node_info&)> peer_is = [](node_info&) {};

  void TearDown() override {
    if (actor) caf::anon_send(actor, node_command{stop_node{}});  // and its links
  }
  void start(const node_actor& peer) {
    const auto bound = there.publish(peer, "127.0.0.1", 0);
    ASSERT_TRUE(bound) << bound.error().message;
    peer_port = *bound;
    place.self = incarnation{7};
    auto endpoint = transport::endpoint::create(place);
    ASSERT_TRUE(endpoint) << to_string(endpoint.error());
    context->endpoint = std::move(*endpoint);
    context->settings.connect_timeout = 10 * troupe::testing::wait_limit;  // must not end the wait
    const auto runner = here.system().spawn(disappointed, gone);
    actor = here.system().spawn(node, context, runner, pool_manager_actor{},
                                std::make_shared<node_drain>());
    here.own(runner);
    here.own(actor);
  }
  /// Tells the node of this incarnation of the peer, as the supervisor would.
  void show(std::uint64_t life) {
    member peer;
    peer.node = request_of("prefill-0", life, peer_port).node;
    peer_is(peer.node);
    peer.state = static_cast<std::uint8_t>(node_state::up);
    caf::anon_send(actor, members_atom_v, membership{"demo", 1, ++epoch, {peer}});
  }
  void need(std::uint64_t former_life = 0) {
    caf::anon_send(actor, node_command{need_link{"prefill-0", former_life, 1}});
  }
};

}  // namespace troupe::actors::testing
