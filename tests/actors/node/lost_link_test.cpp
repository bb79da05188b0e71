// A link actor that crashes without its last message, and a link whose peer has left: what happens
// to those that wait for it, work over it, or need the next one.

#include <caf/default_attachable.hpp>
#include <gmock/gmock.h>

#include "dialling_node.hpp"
#include "waiting.hpp"

namespace troupe::actors::testing {
namespace {

using ::testing::HasSubstr;

// -- while it is being made

/// Records which life of the peer each link request was meant for.
asked_for_link remembers(const inbox_ptr<std::uint64_t>& meant) {
  return [meant](const link_request& request, const caf::strong_actor_ptr&) {
    meant->put(request.to_incarnation);
  };
}

TEST_F(dialling_node, whose_link_crashes_says_so_to_who_waits_for_it_and_makes_the_next_one) {
  start(there.system().spawn(mute, crashes_the_link));
  show(9);
  for (std::size_t attempt = 0; attempt < 2; ++attempt) {
    need();
    const auto told = gone->at(attempt);
    ASSERT_TRUE(told) << "nobody says that link " << attempt << " will not come";
    EXPECT_EQ(told->peer, "prefill-0");
    EXPECT_TRUE(told->asked != 0);
    EXPECT_EQ(told->why.code, errc::internal);
    EXPECT_THAT(told->why.message, HasSubstr("crashed"));
  }
}

// -- with the next life of a peer

TEST_F(dialling_node, waits_for_the_news_of_the_next_life_of_a_peer_whose_process_has_ended) {
  const auto meant = std::make_shared<inbox<std::uint64_t>>();
  start(there.system().spawn(mute, remembers(meant)));
  show(9);
  need(9);
  show(10);
  const auto life = meant->at(0);
  ASSERT_TRUE(life) << "nobody was dialled";
  EXPECT_EQ(*life, 10u);
}

TEST_F(dialling_node, dials_the_life_that_it_lost_if_no_news_of_another_comes) {
  const auto meant = std::make_shared<inbox<std::uint64_t>>();
  start(there.system().spawn(mute, remembers(meant)));
  show(9);
  need(9);
  const auto life = meant->at(0);
  ASSERT_TRUE(life) << "nobody was dialled";
  EXPECT_EQ(*life, 9u);
}

/// A supervisor that, when asked for the members, shows the next life of prefill-0 or does not
/// answer.
supervisor_part taciturn(std::uint16_t peer_port, bool answers) {
  const auto kept = std::make_shared<caf::typed_response_promise<membership>>();
  supervisor_part part;
  part.shows = [=](caf::typed_response_promise<membership> asked) {
    member peer;
    peer.node = request_of("prefill-0", 10, peer_port).node;
    peer.state = static_cast<std::uint8_t>(node_state::up);
    if (answers) asked.deliver(membership{"demo", 1, 100, {peer}});
    *kept = asked;
  };
  return part;
}

class supervised_node : public dialling_node {
 protected:
  inbox_ptr<std::uint64_t> meant = std::make_shared<inbox<std::uint64_t>>();
  actor_host boss;

  /// Registers, then needs a link with a peer whose life 9 has left.
  void need_next_life(bool supervisor_answers) {
    start(there.system().spawn(mute, remembers(meant)));
    const auto port = boss.publish(
        boss.system().spawn(played_supervisor, taciturn(peer_port, supervisor_answers)),
        "127.0.0.1", 0);
    ASSERT_TRUE(port) << port.error().message;
    context->settings.supervisor_host = "127.0.0.1";
    context->settings.supervisor_port = *port;
    caf::anon_send(actor, tick_atom_v);
    ASSERT_FALSE(context->registration.wait(troupe::testing::wait_limit));
    show(9);
    need(9);
  }
};

TEST_F(supervised_node, asks_the_supervisor_for_the_next_life_and_does_not_wait_to_be_told) {
  need_next_life(true);
  const auto life = meant->at(0);
  ASSERT_TRUE(life) << "nobody was dialled";
  EXPECT_EQ(*life, 10u);
}

TEST_F(supervised_node, dials_the_life_that_it_lost_if_the_supervisor_stands_still) {
  context->settings.heartbeat_interval = 10 * troupe::testing::wait_limit;
  need_next_life(false);
  const auto life = meant->at(0);
  ASSERT_TRUE(life) << "the supervisor is waited for";
  EXPECT_EQ(*life, 9u);
}

// -- while it is up

using asked_actor = caf::typed_actor<caf::reacts_to<node_command>>;
asked_actor::behavior_type asked_for_links(asked_actor::pointer, inbox_ptr<need_link> needs) {
  return {[needs](node_command& command) {
    if (const auto* need = std::get_if<need_link>(&command.what)) needs->put(*need);
  }};
}

/// A link over which nothing is received.
link_actor::behavior_type deaf_link(link_actor::pointer, inbox_ptr<transfer_id> attached) {
  return {
      [attached](link_command& command) {
        if (const auto* who = std::get_if<attach_session>(&command.what))
          attached->put(who->transfer);
      },
      [](link_event&) {},
      [](const link_request&) { return link_reply{}; },
      [](const link_notice&) {},
      [](report_atom) { return link_report{}; },
  };
}

class runner_of_a_node : public ::testing::Test {
 protected:
  actor_host host;
  context_ptr context = context_of("decode-0");
  inbox_ptr<need_link> wanted = std::make_shared<inbox<need_link>>();
  inbox_ptr<transfer_id> attached = std::make_shared<inbox<transfer_id>>();
  runner_actor runner = host.system().spawn(runner_behavior, context);
  asked_actor asked = host.system().spawn(asked_for_links, wanted);

  void SetUp() override {
    host.own(runner);
    host.own(asked);
    caf::anon_send(runner, engine_command{connect_operations{asked, {}}});
  }
  link_actor up(std::uint64_t life) {
    auto link = host.system().spawn(deaf_link, attached);
    host.own(link);
    say_up(link, life, 1);
    return link;
  }
  void say_up(const link_actor& link, std::uint64_t life, std::uint64_t epoch) {
    caf::anon_send(runner,
                   runner_event{link_ready{
                       {"store-0", incarnation{life}, nullptr, link, epoch, {}, link.id()}}});
  }
  operation_id query() {
    const auto operation = context->operations.begin({});
    EXPECT_TRUE(operation);
    caf::anon_send(
        runner, engine_command{start_value{*operation, "store-0", value_verb::query, "k", {}, 0}});
    return *operation;
  }
  std::optional<troupe::error> failure_of(operation_id operation) {
    std::optional<troupe::error> why;
    static_cast<void>(troupe::testing::comes_true([&] {
      for (auto& e : context->events.wait(20ms, 16)) {
        const auto* failed = std::get_if<event_failed>(&e.what);
        if (failed != nullptr && e.operation == operation) why = failed->why;
      }
      return why.has_value();
    }));
    return why;
  }
};

TEST_F(runner_of_a_node, whose_link_has_crashed_asks_for_another_one) {
  const auto link = up(5);
  const auto first = query();
  ASSERT_TRUE(attached->at(0));
  caf::anon_send_exit(link, caf::exit_reason::unhandled_exception);
  const auto why = failure_of(first);
  ASSERT_TRUE(why) << "it has no outcome";
  EXPECT_EQ(why->code, errc::peer_lost) << to_string(*why);

  static_cast<void>(query());
  const auto need = wanted->at(0);
  ASSERT_TRUE(need) << "the runner goes on with a link that has ended";
  EXPECT_EQ(need->peer, "store-0");
  const auto next = up(5);
  EXPECT_TRUE(attached->at(1)) << "what waited is done over the next link";
}

TEST_F(runner_of_a_node, begins_nothing_over_a_link_whose_peer_has_left) {
  context->settings.default_deadline =
      10 * troupe::testing::wait_limit;  // must not end anything here
  const auto link = up(5);
  static_cast<void>(query());
  ASSERT_TRUE(attached->at(0));
  // The link is still read for a while before it is gone.
  caf::anon_send(runner, runner_event{link_draining{"store-0", 5, link.id()}});
  const auto second = query();
  const auto need = wanted->at(0);
  ASSERT_TRUE(need) << "the runner goes on with a link whose peer has left";
  EXPECT_EQ(need->peer, "store-0");
  EXPECT_EQ(need->former_life, 5u);
  // The former link's end is reported later and must not affect those that wait for the next one.
  caf::anon_send(runner, runner_event{link_gone{"store-0", 5, link.id(), need->ask, {}}});
  const auto next = up(6);
  caf::anon_send(runner, runner_event{link_gone{"store-0", 5, link.id(), need->ask, {}}});
  EXPECT_TRUE(attached->at(1)) << "what waited is done over the next link";
  static_cast<void>(query());
  EXPECT_TRUE(attached->at(2));
  EXPECT_TRUE(context->operations.end(second)) << "it has ended";
}

TEST_F(runner_of_a_node,
       whose_dial_is_overtaken_by_its_peers_does_not_take_its_end_for_the_next_ones) {
  context->settings.default_deadline = 10 * troupe::testing::wait_limit;
  static_cast<void>(query());
  const auto first = wanted->at(0);
  ASSERT_TRUE(first);
  // Meanwhile the peer's own dial succeeds, and that link is lost again.
  const auto link = up(5);
  ASSERT_TRUE(attached->at(0));
  caf::anon_send(runner, runner_event{link_gone{"store-0", 5, link.id(), 0, {}}});
  const auto waits = query();
  const auto second = wanted->at(1);
  ASSERT_TRUE(second);
  // Only now is the first dial given up.
  caf::anon_send(runner, runner_event{link_gone{
                             "store-0", 5, 4711, first->ask, {errc::peer_unreachable, "of old"}}});
  const auto next = up(5);
  EXPECT_TRUE(attached->at(1)) << "what waits for the second dial has failed with the first";
  // A failure of the second dial itself does end the wait.
  caf::anon_send(runner, runner_event{link_gone{"store-0", 5, next.id(), 0, {}}});
  const auto ends = query();
  const auto third = wanted->at(2);
  ASSERT_TRUE(third);
  caf::anon_send(runner, runner_event{link_gone{
                             "store-0", 0, 0, third->ask, {errc::peer_unreachable, "of now"}}});
  const auto why = failure_of(ends);
  ASSERT_TRUE(why);
  EXPECT_EQ(why->message, "of now");
  EXPECT_TRUE(context->operations.end(waits)) << "it has ended";
}

TEST_F(runner_of_a_node, watches_a_link_once_however_often_that_is_made_again) {
  const auto link = up(5);
  for (std::uint64_t epoch = 2; epoch < 6; ++epoch) say_up(link, 5, epoch);
  static_cast<void>(query());
  ASSERT_TRUE(attached->at(0));  // handled after all of them
  const caf::default_attachable::observe_token token{runner.address(),
                                                     caf::default_attachable::monitor};
  EXPECT_EQ(caf::actor_cast<caf::abstract_actor*>(link)->detach(token), 1u);
}

}  // namespace
}  // namespace troupe::actors::testing
