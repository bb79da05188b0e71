// The node's and the supervisor's actor, and state that must not grow: calls that the engine never
// answers, and watches that each attempt to register sets again.

#include "troupe/actors/node/node.hpp"

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <caf/default_attachable.hpp>
#include <caf/scoped_actor.hpp>
#include <caf/send.hpp>
#include <gmock/gmock.h>

#include "troupe/actors/supervisor/supervisor.hpp"

#include "cluster_peer.hpp"
#include "waiting.hpp"

namespace troupe::actors::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using ::testing::HasSubstr;
using troupe::testing::comes_true;
using troupe::testing::wait_limit;
using namespace std::chrono_literals;

/// Removes the watches of `observer` on `observed` and returns how many there were.
template <class Observed, class Observer>
std::size_t take_watches(const Observed& observed, const Observer& observer) {
  const caf::default_attachable::observe_token token{caf::actor_cast<caf::actor_addr>(observer),
                                                     caf::default_attachable::monitor};
  return caf::actor_cast<caf::abstract_actor*>(observed)->detach(token);
}

context_ptr settled_context() {
  node_settings settings;
  settings.cluster = "demo";
  settings.self = request_of("decode-0", 7).node;
  settings.heartbeat_interval = 20ms;
  return std::make_shared<node_context>(std::move(settings));
}

class lone_node : public ::testing::Test {
 protected:
  actor_host host;
  context_ptr context = settled_context();
  local_node_actor actor;

  /// `first` runs before the node looks for a supervisor.
  void start(const std::function<void()>& first = [] {}) {
    actor = host.system().spawn(node, context, runner_actor{}, pool_manager_actor{},
                                std::make_shared<node_drain>());
    host.own(actor);
    first();
    caf::anon_send(actor, tick_atom_v);
  }
};

// -- calls

/// An engine that takes calls and never answers.
class silent_engine : public lone_node {
 protected:
  std::mutex mutex;
  std::vector<call> kept;

  void SetUp() override {
    context->on_call = [this](call what) {
      const std::lock_guard lock{mutex};
      kept.push_back(std::move(what));
    };
    start();
  }
  std::size_t taken() {
    const std::lock_guard lock{mutex};
    return kept.size();
  }
  call_reply ask(milliseconds timeout) {
    call_reply reply;
    caf::scoped_actor self{host.system()};
    const call_request request{"m", {}, static_cast<std::uint32_t>(timeout.count())};
    self->request(caf::actor_cast<node_actor>(actor), wait_limit, request)
        .receive([&](call_reply& r) { reply = std::move(r); },
                 [&](caf::error& e) { ADD_FAILURE() << host.system().render(e); });
    return reply;
  }
};

TEST_F(silent_engine, leaves_a_call_to_its_time_and_may_answer_it_late_for_nobody) {
  const auto begin = steady_clock::now();
  const auto reply = ask(50ms);
  EXPECT_EQ(reply.failed, static_cast<std::uint8_t>(errc::deadline));
  EXPECT_THAT(reply.sentence, HasSubstr("did not answer the call in time"));
  EXPECT_GE(steady_clock::now() - begin, 50ms);
  ASSERT_EQ(taken(), 1u);
  kept.front().reply(std::vector<std::uint8_t>{1});
  EXPECT_EQ(ask(20ms).failed, static_cast<std::uint8_t>(errc::deadline)) << "the node lives on";
}

TEST_F(silent_engine, loses_no_place_for_calls_to_those_that_nobody_waits_for) {
  for (std::size_t i = 0; i < max_pending_calls; ++i) {
    caf::anon_send(actor, call_request{"m", {}, 1});
  }
  ASSERT_TRUE(comes_true([&] { return taken() == max_pending_calls; }));
  // The engine still holds all of them.
  EXPECT_TRUE(comes_true([&] {
    return ask(30ms).failed == static_cast<std::uint8_t>(errc::deadline);
  })) << "each further call is refused, since too many are said to wait";
}

TEST_F(silent_engine, is_asked_no_more_while_as_many_calls_wait_as_may) {
  for (std::size_t i = 0; i < max_pending_calls; ++i) {
    caf::anon_send(actor, call_request{"m", {}, 60'000});
  }
  ASSERT_TRUE(comes_true([&] { return taken() == max_pending_calls; }));
  EXPECT_EQ(ask(30ms).failed, static_cast<std::uint8_t>(errc::overloaded));
  EXPECT_EQ(taken(), max_pending_calls);
}

// -- waiting for registration

TEST(registration_state, that_is_lost_before_the_waiting_thread_runs_was_one_all_the_same) {
  registration_state state;
  state.set(true, {});
  state.set(false, "its process is gone");
  const auto now = state.why_not();
  ASSERT_TRUE(now);
  EXPECT_EQ(now->message, "its process is gone");
  EXPECT_FALSE(state.wait(0ms)) << "it was taken in since anybody asked";
  const auto later = state.wait(0ms);
  ASSERT_TRUE(later) << "that was said already";
  EXPECT_EQ(later->code, errc::deadline);
  EXPECT_EQ(later->message, "its process is gone");
}

TEST(registration_state, that_is_refused_for_good_is_so_whatever_was_before) {
  registration_state state;
  state.set(true, {});
  state.end({errc::stale_incarnation, "another has its name"});
  for (const auto& why : {state.wait(0ms), state.wait(1h), state.why_not()}) {
    ASSERT_TRUE(why);
    EXPECT_EQ(why->code, errc::stale_incarnation);
  }
}

// -- watches

TEST_F(lone_node, watches_its_supervisor_once_however_often_that_refuses_it) {
  actor_host there;
  const auto asked = std::make_shared<std::atomic<int>>(0);
  supervisor_part part;
  part.registers = [asked] {  // the first five refusals are temporary, so the node tries again
    registration reply;
    if (asked->fetch_add(1) < 5) {
      reply.failed = static_cast<std::uint8_t>(errc::overloaded);
      reply.sentence = "not now";
    }
    return reply;
  };
  const auto port = there.publish(there.system().spawn(played_supervisor, part), "127.0.0.1", 0);
  ASSERT_TRUE(port) << port.error().message;
  context->settings.supervisor_host = "127.0.0.1";
  context->settings.supervisor_port = *port;
  start();
  const auto why_not = context->registration.wait(wait_limit);
  ASSERT_FALSE(why_not) << to_string(*why_not);
  EXPECT_EQ(asked->load(), 6);
  // This process's proxy of the supervisor, on which the node's watch is set.
  const auto proxy = host.connect<supervisor_actor>("127.0.0.1", *port, wait_limit);
  ASSERT_TRUE(proxy) << proxy.error().message;
  EXPECT_EQ(take_watches(*proxy, actor), 1u);
}

// -- requests to a supervisor that is gone, and messages it missed

/// What the supervisors of a test received.
struct heard {
  std::vector<caf::typed_response_promise<registration>> unanswered;
  std::atomic<int> registrations{0};
  std::mutex mutex;
  std::vector<std::string> ended;
};

/// Answers registrations, or never answers them.
supervisor_actor::behavior_type scripted_supervisor(supervisor_actor::pointer self,
                                                    std::shared_ptr<heard> ear, bool answers) {
  return {
      [=](register_atom, const registration_request&, const node_actor&) {
        auto promise = self->make_response_promise<registration>();
        ++ear->registrations;
        if (answers) {
          promise.deliver(registration{});
        } else {
          ear->unanswered.push_back(promise);
        }
        return promise;
      },
      [](const heartbeat&) {
        heartbeat_ack ack;
        ack.known = true;
        return ack;
      },
      [](leave_atom, const std::string&, std::uint64_t) {},
      [](place_atom, const placement_request&) { return placement{}; },
      [ear](placed_request_ended_atom, const std::string& request) {
        const std::lock_guard lock{ear->mutex};
        ear->ended.push_back(request);
      },
      [](members_atom) { return membership{}; },
      [](drain_atom, const drain_request&) { return drain_reply{}; },
      [](lease_name_atom, const name_request&) { return name_lease{}; },
      [](events_atom, const event_query&) { return event_page{}; },
      [](tick_atom) {},
  };
}

TEST_F(lone_node, that_is_registered_does_not_mind_what_an_earlier_attempt_comes_to) {
  const auto ear = std::make_shared<heard>();
  auto first = std::make_unique<actor_host>();
  const auto silent = first->system().spawn(scripted_supervisor, ear, false);
  const auto port = first->publish(silent, "127.0.0.1", 0);
  ASSERT_TRUE(port) << port.error().message;
  context->settings.heartbeat_interval = 500ms;  // an attempt is given up after twice that
  context->settings.supervisor_host = "127.0.0.1";
  context->settings.supervisor_port = *port;
  start();
  ASSERT_TRUE(comes_true([&] { return ear->registrations == 1; }));
  first.reset();
  actor_host second;
  ASSERT_TRUE(comes_true([&] {
    return second.publish(second.system().spawn(scripted_supervisor, ear, true), "127.0.0.1", *port)
        .has_value();
  }));
  ASSERT_FALSE(context->registration.wait(wait_limit));
  std::this_thread::sleep_for(1300ms);
  EXPECT_EQ(ear->registrations, 2) << "it registered again, since the first one had not answered";
  EXPECT_FALSE(context->registration.wait(0ms));
}

TEST_F(lone_node, tells_the_ends_of_placed_requests_once_it_has_a_supervisor) {
  const auto ear = std::make_shared<heard>();
  actor_host there;
  const auto port =
      there.publish(there.system().spawn(scripted_supervisor, ear, true), "127.0.0.1", 0);
  ASSERT_TRUE(port) << port.error().message;
  context->settings.supervisor_host = "127.0.0.1";
  context->settings.supervisor_port = *port;
  start([&] {
    caf::anon_send(actor, node_command{placed_request_ended{"first"}});
    caf::anon_send(actor, node_command{placed_request_ended{"second"}});
  });
  ASSERT_TRUE(comes_true([&] {
    const std::lock_guard lock{ear->mutex};
    return ear->ended.size() == 2;
  }));
  EXPECT_THAT(ear->ended, ::testing::ElementsAre("first", "second"));
}

TEST(a_supervisor, watches_a_node_once_however_often_that_registers) {
  actor_host host;
  const auto boss = spawn_supervisor(host.system(), three_nodes());
  const auto request = request_of("decode-0", 5);
  const auto member = host.system().spawn(listening_node, std::make_shared<told>(), request.node);
  host.own(boss);
  host.own(member);
  for (int i = 0; i < 5; ++i) {
    const auto reply = ask<registration>(host.system(), boss, "the supervisor", wait_limit,
                                         register_atom_v, request, node_actor{member});
    ASSERT_TRUE(reply) << reply.error().message;
    ASSERT_EQ(reply->failed, 0) << reply->sentence;
  }
  EXPECT_EQ(take_watches(member, boss), 1u);
}

}  // namespace
}  // namespace troupe::actors::testing
