// The actors of a process get no thread for a while, and something is in flight with it: its links
// still answer, since that takes no actor thread.

#include "troupe/actors/link/link.hpp"

#include "dialling_node.hpp"

namespace troupe::actors::testing {
namespace {

/// Records the handles of links.
runner_actor::behavior_type remembering_runner(runner_actor::pointer,
                                               inbox_ptr<link_handle> ready) {
  return {
      [](engine_command&) {},
      [](node_notice&) {},
      [ready](runner_event& event) {
        if (const auto* what = std::get_if<link_ready>(&event.what)) ready->put(what->link);
      },
      [](report_atom) { return transfer_reports{}; },
      [](tick_atom) {},
  };
}

/// A node that spawns one end of a link for each request.
node_actor::behavior_type accepting(node_actor::pointer self, context_ptr context,
                                    runner_actor runner) {
  return {
      [](members_atom, const membership&) {},
      [](register_again_atom) {},
      [](drain_atom, const drain_order&) {},
      [=](const link_request& request) {
        auto end = self->spawn(link_behavior, link_options{context, runner, request.from,
                                                           transport::link_role::acceptor});
        return self->delegate(end, request);
      },
      [](report_atom) { return node_report{}; },
      [](const call_request&) { return call_reply{}; },
  };
}

/// A session with something in flight, which records what happens to its link.
session_actor::behavior_type waiting(session_actor::pointer, inbox_ptr<std::string> heard) {
  return {[heard](session_event& event) {
    if (const auto* lost = std::get_if<link_is_lost>(&event.what)) {
      heard->put(to_string(lost->why));
    } else if (std::holds_alternative<link_is_back>(event.what)) {
      heard->put("made again");
    }
  }};
}

/// Occupies a thread of the scheduler.
void idler(caf::event_based_actor* self, std::chrono::milliseconds time) {
  std::this_thread::sleep_for(time);
  self->quit();
}

class stalled_actors : public ::testing::TestWithParam<transport::backend_kind> {
 protected:
  static constexpr std::uint64_t life = 9;
  actor_host there{{.threads = 2}}, here;
  inbox_ptr<link_handle> ready = std::make_shared<inbox<link_handle>>();
  inbox_ptr<std::string> heard = std::make_shared<inbox<std::string>>();

  static context_ptr furnished(const std::string& name, std::uint64_t incarnation_number) {
    auto context = context_of(name);
    context->settings.backend = GetParam();
    context->self.incarnation = incarnation_number;
    transport::endpoint_options place;
    place.self = incarnation{incarnation_number};
    auto endpoint = transport::endpoint::create(std::move(place));
    EXPECT_TRUE(endpoint);
    if (endpoint) context->endpoint = std::move(*endpoint);
    return context;
  }
};

TEST_P(stalled_actors, are_no_silent_peer) {
  const auto theirs = furnished("prefill-0", life);
  const auto ours = furnished("decode-0", 7);
  const auto their_runner =
      there.system().spawn(remembering_runner, std::make_shared<inbox<link_handle>>());
  there.own(their_runner);
  const auto port_number =
      there.publish(there.system().spawn(accepting, theirs, their_runner), "127.0.0.1", 0);
  ASSERT_TRUE(port_number) << to_string(port_number.error());
  const auto our_runner = here.system().spawn(remembering_runner, ready);
  here.own(our_runner);
  const auto link = here.system().spawn(
      link_behavior,
      link_options{ours, our_runner, request_of("prefill-0", life, *port_number).node,
                   transport::link_role::initiator});
  here.own(link);
  ASSERT_TRUE(ready->at(0)) << "the link does not come up";
  const auto session = here.system().spawn(waiting, heard);
  here.own(session);
  caf::anon_send(link, link_command{attach_session{transfer_id{1}, session, 0}});
  // More idlers than the scheduler has threads.
  for (int i = 0; i < 4; ++i) there.system().spawn(idler, 1500ms);
  std::this_thread::sleep_for(3s);
  EXPECT_EQ(heard->size(), 0u) << *heard->at(0);
  // A process that is really gone is noticed.
  theirs->endpoint->stop();
  for (int i = 0; i < 4; ++i) there.system().spawn(idler, 5s);
  EXPECT_TRUE(heard->at(0)) << "nobody watches";
  caf::anon_send(link, link_command{close_link{{errc::aborted, "the test is over"}}});
  caf::anon_send(link, link_command{detach_session{transfer_id{1}}});
}

INSTANTIATE_TEST_SUITE_P(every_backend, stalled_actors,
                         ::testing::Values(transport::backend_kind::tcp,
                                           transport::backend_kind::shm),
                         [](const auto& which) { return std::string{to_string(which.param)}; });

}  // namespace
}  // namespace troupe::actors::testing
