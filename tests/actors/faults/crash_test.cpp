// Actors that end by a defect of ours: what ends with them, and what does not.

#include "troupe/actors/runtime/crash.hpp"

#include <future>

#include <caf/io/basp_broker.hpp>
#include <caf/io/middleman.hpp>
#include <caf/send.hpp>
#include <gmock/gmock.h>

#include "troupe/actors/link/link.hpp"
#include "troupe/actors/link/link_count.hpp"
#include "troupe/actors/node/node_end.hpp"

#include "dialling_node.hpp"

namespace troupe::actors::testing {
namespace {

using ::testing::HasSubstr;
using troupe::testing::comes_true;
using troupe::testing::wait_limit;

constexpr auto planted = caf::exit_reason::unhandled_exception;

// -- essential actors

class essential_actor : public ::testing::Test {
 protected:
  actor_host host;
  context_ptr context = context_of("decode-0");
  runner_actor actor = host.system().spawn(disappointed, std::make_shared<inbox<link_gone>>());

  void SetUp() override {
    host.own(actor);
    watch_essential(context, actor, "the operation runner");
  }
};

TEST_F(essential_actor, that_crashes_fails_every_live_operation_and_who_waits_to_be_registered) {
  const auto first = context->operations.begin({});
  const auto second = context->operations.begin({});
  ASSERT_TRUE(first && second);
  caf::anon_send_exit(actor, planted);
  std::vector<event> events;
  while (events.size() < 2) {
    auto more = context->events.wait(wait_limit, 16);
    ASSERT_FALSE(more.empty()) << "an operation has no outcome";
    for (auto& e : more) events.push_back(std::move(e));
  }
  for (const auto& e : events) {
    const auto* failed = std::get_if<event_failed>(&e.what);
    ASSERT_NE(failed, nullptr);
    EXPECT_EQ(failed->why.code, errc::internal);
    EXPECT_THAT(failed->why.message, HasSubstr("the operation runner crashed"));
  }
  const auto why = context->registration.wait(0ms);
  ASSERT_TRUE(why);
  EXPECT_EQ(why->code, errc::internal);
  EXPECT_FALSE(context->operations.begin({})) << "and nothing begins any more";
}

TEST_F(essential_actor, that_crashes_wakes_who_waits_for_the_end_of_an_operation) {
  const auto live = context->operations.begin({});
  const auto pinned = context->operations.begin({});
  ASSERT_TRUE(live && pinned && context->operations.end(*pinned));
  context->events.push({*pinned, event_done{}});
  const auto end_of = [&](operation_id id) {
    const auto claim = context->events.claim_events(id).value();
    claim->wait_until(std::chrono::steady_clock::now() + wait_limit);
    return claim->take();
  };
  auto first = std::async(std::launch::async, end_of, *live);
  auto second = std::async(std::launch::async, end_of, *pinned);
  caf::anon_send_exit(actor, planted);
  const auto failed = first.get();
  ASSERT_TRUE(failed && *failed) << "its outcome came";
  EXPECT_EQ((*failed)->size(), 1u);
  const auto told = second.get();
  ASSERT_TRUE(told && !*told) << "nobody is left to unpin its blocks";
  EXPECT_THAT(told->error().message, HasSubstr("the operation runner crashed"));
}

TEST_F(essential_actor, of_caf_that_crashes_ends_the_node_and_whoever_asks_for_a_peer_is_told) {
  watch_network(context, host.system());
  const auto live = context->operations.begin({});
  ASSERT_TRUE(live);
  caf::anon_send_exit(
      host.system().middleman().named_broker<caf::io::basp_broker>(caf::atom("BASP")), planted);
  const auto told = context->events.wait(wait_limit, 1);
  ASSERT_EQ(told.size(), 1u) << "it has no outcome";
  const auto* failed = std::get_if<event_failed>(&told.front().what);
  ASSERT_NE(failed, nullptr);
  EXPECT_THAT(failed->why.message, HasSubstr("the network of this process crashed"));
  EXPECT_EQ(context->registration.wait(0ms)->code, errc::internal);
  // CAF tells the network's own actor at about the same time.
  EXPECT_TRUE(comes_true([&] {
    const auto found = host.connect<node_actor>("127.0.0.1", 1, wait_limit);
    return !found && found.error().message.find("has crashed") != std::string::npos;
  }));
}

TEST_F(essential_actor, that_is_told_to_end_is_no_crash) {
  const auto operation = context->operations.begin({});
  ASSERT_TRUE(operation);
  ASSERT_TRUE(host.shutdown());
  EXPECT_TRUE(context->operations.end(*operation)) << "it is for its owner to end it";
  EXPECT_EQ(context->registration.wait(0ms)->code, errc::deadline);
}

TEST(node_whose_runner_crashed, tells_the_supervisor_why_and_refuses_links) {
  actor_host boss, here;
  const auto beats = std::make_shared<inbox<heartbeat>>();
  supervisor_part part;
  part.hears = [beats](const heartbeat& beat) {
    if (!beat.failure.empty()) beats->put(beat);
  };
  const auto bound = boss.publish(boss.system().spawn(played_supervisor, part), "127.0.0.1", 0);
  ASSERT_TRUE(bound) << bound.error().message;
  const auto context = context_of("decode-0");
  transport::endpoint_options place;
  place.self = incarnation{7};
  auto endpoint = transport::endpoint::create(place);
  ASSERT_TRUE(endpoint) << to_string(endpoint.error());
  context->endpoint = std::move(*endpoint);
  context->settings.supervisor_host = "127.0.0.1";
  context->settings.supervisor_port = *bound;
  const auto runner = here.system().spawn(disappointed, std::make_shared<inbox<link_gone>>());
  const auto actor = here.system().spawn(node, context, runner, pool_manager_actor{},
                                         std::make_shared<node_drain>());
  here.own(actor);
  caf::anon_send(actor, tick_atom_v);
  ASSERT_FALSE(context->registration.wait(wait_limit));
  caf::anon_send_exit(runner, planted);
  const auto last = beats->at(0);
  ASSERT_TRUE(last) << "the supervisor was not told";
  EXPECT_THAT(last->failure, HasSubstr("the operation runner of decode-0 crashed"));
  link_request request;
  const auto answer = ask<link_reply>(here.system(), actor, "the node", wait_limit, request);
  ASSERT_TRUE(answer) << to_string(answer.error());
  EXPECT_EQ(answer->failed, static_cast<std::uint8_t>(errc::internal));
  EXPECT_THAT(answer->sentence, HasSubstr("crashed"));
}

// -- links

class node_with_crashing_links : public dialling_node {
 protected:
  std::size_t asked{0};

  /// Needs a link once more. Returns why it did not come.
  std::optional<troupe::error> refusal() {
    need();
    const auto told = gone->at(asked++);
    return told ? std::optional{told->why} : std::nullopt;
  }
  /// Lets as many links with one life of the peer crash as are allowed, until the peer is given up.
  void expect_peer_given_up() {
    for (int crash = 0; crash < 6; ++crash) {
      const auto why = refusal();
      ASSERT_TRUE(why);
      EXPECT_THAT(why->message, HasSubstr("the link's actor crashed")) << crash;
    }
    const auto why = refusal();
    ASSERT_TRUE(why);
    EXPECT_EQ(why->code, errc::internal);
    EXPECT_THAT(why->message, HasSubstr("keep crashing and are given up"));
  }
};

TEST_F(node_with_crashing_links, makes_a_link_that_crashed_again_but_not_for_ever) {
  start(there.system().spawn(mute, crashes_the_link));
  show(9);
  expect_peer_given_up();
  // The next life of the peer has its own count.
  show(10);
  const auto next = refusal();
  ASSERT_TRUE(next);
  EXPECT_THAT(next->message, HasSubstr("the link's actor crashed"));
}

TEST_F(node_with_crashing_links,
       that_gave_a_peer_up_is_not_swayed_by_a_late_crash_of_its_former_life) {
  // Links with the first life wait, those with the next one crash.
  const auto waiting = std::make_shared<inbox<caf::strong_actor_ptr>>();
  const auto peer = [waiting](const link_request& request, const caf::strong_actor_ptr& link) {
    if (request.to_incarnation == 9) {
      waiting->put(link);
    } else {
      crashes_the_link(request, link);
    }
  };
  start(there.system().spawn(mute, peer));
  show(9);
  need();
  const auto former = waiting->at(0);
  ASSERT_TRUE(former);
  // The list is from another supervisor, so that the link with the former life stays.
  member next;
  next.node = request_of("prefill-0", 10, peer_port).node;
  next.state = static_cast<std::uint8_t>(node_state::up);
  caf::anon_send(actor, members_atom_v, membership{"demo", 2, 1, {next}});
  expect_peer_given_up();
  ASSERT_FALSE(HasFailure());
  caf::anon_send_exit(*former, planted);
  ASSERT_TRUE(gone->at(asked)) << "the late crash";
  ++asked;
  const auto refused = refusal();
  ASSERT_TRUE(refused);
  EXPECT_THAT(refused->message, HasSubstr("keep crashing and are given up"));
}

// -- sessions

/// A link that records the sessions that work over it and the messages that it is to send. Nothing
/// moves over it, so that every fence holds at once.
link_actor::behavior_type overheard(link_actor::pointer, inbox_ptr<session_actor> sessions,
                                    inbox_ptr<session_message> said) {
  return {
      [=](link_command& command) {
        if (const auto* who = std::get_if<attach_session>(&command.what))
          sessions->put(who->session);
        if (const auto* words = std::get_if<say>(&command.what)) said->put(words->message);
        if (std::holds_alternative<fence_now>(command.what)) {
          caf::anon_send(sessions->at(sessions->size() - 1).value(),
                         session_event{transfer_fenced{}});
        }
      },
      [](link_event&) {},
      [](const link_request&) { return link_reply{}; },
      [](const link_notice&) {},
      [](report_atom) { return link_report{}; },
  };
}

using asked_actor = caf::typed_actor<caf::reacts_to<node_command>>;
asked_actor::behavior_type deaf(asked_actor::pointer) {
  return {[](node_command&) {}};
}

/// A query to store-0, which does not answer.
class session : public ::testing::Test {
 protected:
  void SetUp() override {
    context->settings.default_deadline = 10 * wait_limit;  // must not end anything here
    host.own(runner);
    host.own(asked);
    caf::anon_send(runner, engine_command{connect_operations{asked, {}}});
    caf::anon_send(
        runner,
        runner_event{link_ready{{"store-0", incarnation{5}, nullptr, link, 1, {}, link.id()}}});
    const auto operation = context->operations.begin({});
    ASSERT_TRUE(operation);
    caf::anon_send(
        runner, engine_command{start_value{*operation, "store-0", value_verb::query, "k", {}, 0}});
    actor = sessions->at(0);
    ASSERT_TRUE(actor);
  }
  void expect_none_is_waited_for() const {
    EXPECT_TRUE(comes_true([&] { return context->counters.active_transfers.load() == 0; }))
        << "a drain would wait for what never ends";
  }

  actor_host host;
  const context_ptr context = context_of("decode-0");
  const std::shared_ptr<inbox<session_actor>> sessions = std::make_shared<inbox<session_actor>>();
  const std::shared_ptr<inbox<session_message>> said = std::make_shared<inbox<session_message>>();
  const runner_actor runner = host.system().spawn(runner_behavior, context);
  const asked_actor asked = host.system().spawn(deaf);
  const link_actor link = host.system().spawn(overheard, sessions, said);
  std::optional<session_actor> actor;
};

TEST_F(session, that_crashes_fails_its_operation_and_both_sides_are_told) {
  host.own(link);
  caf::anon_send_exit(*actor, planted);
  const auto events = context->events.wait(wait_limit, 1);
  ASSERT_EQ(events.size(), 1u) << "it has no outcome";
  const auto* failed = std::get_if<event_failed>(&events.front().what);
  ASSERT_NE(failed, nullptr);
  EXPECT_EQ(failed->why.code, errc::internal);
  const auto last = said->at(1);  // after its query
  ASSERT_TRUE(last) << "the other side is told nothing";
  const auto* abort = std::get_if<transfer_abort>(&*last);
  ASSERT_NE(abort, nullptr);
  EXPECT_EQ(abort->code, errc::internal);
  expect_none_is_waited_for();
  EXPECT_TRUE(comes_true([&] {
    const auto report =
        ask<transfer_reports>(host.system(), runner, "the runner", wait_limit, report_atom::value);
    return report && report->transfers.empty();
  })) << "it was fenced, and what it held is held for ever";
}

TEST_F(session, is_waited_for_no_more_when_its_link_has_crashed) {
  host.own(*actor);
  // The session may send before the runner, on another thread, has counted it.
  EXPECT_TRUE(comes_true([&] { return context->counters.active_transfers.load() == 1; }));
  caf::anon_send_exit(link, planted);
  EXPECT_EQ(context->events.wait(wait_limit, 1).size(), 1u) << "it has no outcome";
  expect_none_is_waited_for();
}

session_actor::behavior_type fenced_recorder(session_actor::pointer,
                                             const inbox_ptr<std::string>& fenced,
                                             const std::string& name) {
  return {[=](session_event& event) {
    if (std::holds_alternative<transfer_fenced>(event.what)) fenced->put(name);
  }};
}

TEST(link_of_a_session_that_crashed, knows_the_one_in_its_place) {
  actor_host host;
  const auto runner = host.system().spawn(disappointed, std::make_shared<inbox<link_gone>>());
  host.own(runner);
  // It waits for its peer, and so has nothing to fence.
  const auto link = host.system().spawn(
      link_behavior, link_options{context_of("decode-0"), runner, request_of("prefill-0", 9).node,
                                  transport::link_role::acceptor});
  const auto fenced = std::make_shared<inbox<std::string>>();
  for (const auto* name : {"crashed", "in its place"}) {
    const auto session = host.system().spawn(fenced_recorder, fenced, name);
    host.own(session);
    caf::anon_send(link, link_command{attach_session{transfer_id{1}, session, 0}});
  }
  caf::anon_send(link, link_command{fence_now{transfer_id{1}}});
  EXPECT_EQ(fenced->at(0), "in its place");
  caf::anon_send(link, link_command{close_link{{errc::aborted, "the test is over"}}});
  caf::anon_send(link, link_command{detach_session{transfer_id{1}}});
}

using counted_actor = caf::typed_actor<caf::reacts_to<tick_atom>>;
struct counted_state {
  std::optional<links::link_count> count;
};
/// A link as seen by the node's counters.
counted_actor::behavior_type counted(counted_actor::stateful_pointer<counted_state> self,
                                     const context_ptr& context, bool broken) {
  auto& count = self->state.count.emplace(context);
  count.is_up();
  if (broken) count.broke();
  return {[](tick_atom) {}};
}

TEST(link_that_crashed, is_counted_no_more) {
  const auto context = context_of("decode-0");
  actor_host host;
  for (const bool broken : {false, true}) {
    auto& counter = broken ? context->counters.links_broken : context->counters.links_up;
    auto link = host.system().spawn(counted, context, broken);
    EXPECT_TRUE(comes_true([&] { return counter.load() == 1; }));
    caf::anon_send_exit(link, planted);
    link = nullptr;
    EXPECT_TRUE(comes_true([&] { return counter.load() == 0; })) << (broken ? "broken" : "up");
  }
}

}  // namespace
}  // namespace troupe::actors::testing
