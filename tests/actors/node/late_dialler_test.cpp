// A node that reaches a peer's data port after the peer has given up the attempt.

#include <functional>
#include <memory>

#include <caf/sec.hpp>

#include "dialling_node.hpp"

namespace troupe::actors::testing {
namespace {

using transport::backend_kind;

/// Ignores every event of a link.
class deaf final : public transport::link_sink {
 public:
  void on_up() override {}
  void on_completion(transport::completion) override {}
  void on_frame(std::span<const std::byte>) override {}
  void on_quiescent(transfer_id) override {}
  void on_broken(troupe::error) override {}
};

/// Answers the second and later requests at the peer's end.
using second_answer = std::function<void(link_actor::pointer, const link_actor& dialler,
                                         caf::typed_response_promise<link_reply>)>;

/// The messages that a peer received.
struct heard_by_peer {
  second_answer second;  ///< if empty, the peer makes another offer
  inbox<link_request> by_node, by_end;
  inbox<link_notice> notices;
};
using ear_of_peer = std::shared_ptr<heard_by_peer>;

/// The peer's end of a link, which stops waiting for the dialler as soon as it has made its offer;
/// to a dialler whose connection was lost, it looks as if the end were up. It ends at any command.
link_actor::behavior_type impatient_end(link_actor::pointer self,
                                        std::shared_ptr<transport::endpoint> endpoint,
                                        ear_of_peer ear) {
  return {
      [self](link_command&) { self->quit(); },
      [](link_event&) {},
      [self, endpoint, ear](const link_request& request) {
        // The promise takes the sender out of the current message.
        const auto dialler = caf::actor_cast<link_actor>(self->current_sender());
        auto answer = self->make_response_promise<link_reply>();
        ear->by_end.put(request);
        if (ear->second && ear->by_end.size() >= 2) {
          ear->second(self, dialler, answer);
          return answer;
        }
        transport::link_options options;
        options.role = transport::link_role::acceptor;
        options.peer = incarnation{request.from.incarnation};
        auto link = endpoint->open(backend_kind::tcp, options, std::make_shared<deaf>());
        if (!link) return answer;
        link_reply reply;
        for (const auto byte : (*link)->offer().payload) {
          reply.offer.push_back(std::to_integer<std::uint8_t>(byte));
        }
        (*link)->close();
        answer.deliver(std::move(reply));
        return answer;
      },
      [ear](const link_notice& notice) { ear->notices.put(notice); },
      [](report_atom) { return link_report{}; },
  };
}

/// A peer whose links all have that one end.
node_actor::behavior_type listening_node(node_actor::pointer self, link_actor end,
                                         ear_of_peer ear) {
  return {
      [](members_atom, const membership&) {},
      [](register_again_atom) {},
      [](drain_atom, const drain_order&) {},
      [self, end, ear](const link_request& request) {
        ear->by_node.put(request);
        return self->delegate(end, request);
      },
      [](report_atom) { return node_report{}; },
      [](const call_request&) { return call_reply{}; },
  };
}

/// The peer's end of a link, which makes its offer and ends before this side's transport can
/// notice.
link_actor::behavior_type parting_end(
    link_actor::pointer self, std::shared_ptr<transport::endpoint> endpoint,
    inbox_ptr<link_request> requests,
    std::shared_ptr<std::vector<std::shared_ptr<transport::link>>> open) {
  return {
      [](link_command&) {},
      [](link_event&) {},
      [self, endpoint, requests, open](const link_request& request) {
        const auto dialler = caf::actor_cast<link_actor>(self->current_sender());
        auto answer = self->make_response_promise<link_reply>();
        transport::link_options options;
        options.role = transport::link_role::acceptor;
        options.peer = incarnation{request.from.incarnation};
        options.connect_timeout = 10 * troupe::testing::wait_limit;
        auto link = endpoint->open(backend_kind::tcp, options, std::make_shared<deaf>());
        if (!link) return answer;
        link_reply reply;
        for (const auto byte : (*link)->offer().payload) {
          reply.offer.push_back(std::to_integer<std::uint8_t>(byte));
        }
        open->push_back(std::move(*link));
        requests->put(request);
        answer.deliver(std::move(reply));
        self->send(dialler, link_notice{link_fate::ended, "it cannot be joined"});
        return answer;
      },
      [](const link_notice&) {},
      [](report_atom) { return link_report{}; },
  };
}

link_reply refused(errc code, std::string sentence) {
  return {static_cast<std::uint8_t>(code), std::move(sentence), {}, {}, {}};
}

class late_dialler : public dialling_node {
 protected:
  ear_of_peer ear = std::make_shared<heard_by_peer>();
  link_actor end;

  void SetUp() override {
    transport::endpoint_options options;
    options.self = incarnation{9};
    std::shared_ptr<transport::endpoint> peer = transport::endpoint::create(options).value();
    end = there.system().spawn(impatient_end, peer, ear);
    there.own(end);
    start(there.system().spawn(listening_node, end, ear));
    show(9);
  }
};

TEST_F(late_dialler, asks_the_same_end_for_another_offer_which_may_be_up_and_have_sessions) {
  need();
  EXPECT_TRUE(ear->by_end.at(2)) << "a refusal of what nobody waits for any more is no answer";
  EXPECT_EQ(ear->by_node.size(), 1u) << "the peer would make another end";
  EXPECT_EQ(ear->notices.size(), 0u) << "the end would be lost, and its sessions with it";
}

TEST_F(late_dialler, asks_the_node_for_another_end_where_the_first_has_ended) {
  need();
  ASSERT_TRUE(ear->by_end.at(1));
  caf::anon_send(end, link_command{dial_again{}});
  EXPECT_TRUE(ear->by_node.at(1));
}

// Like an end that refuses the request: it has ended before its answer is delivered.
TEST_F(late_dialler, hears_why_the_end_refuses_it_and_not_only_that_it_ended) {
  context->settings.max_reconnects = 1;
  ear->second = [](link_actor::pointer self, const link_actor& dialler, auto answer) {
    self->send(dialler, link_notice{link_fate::ended, "it cannot be joined"});
    answer.deliver(refused(errc::layout_mismatch, "it has other heads"));
    self->quit();
  };
  need();
  const auto told = gone->at(0);
  ASSERT_TRUE(told);
  EXPECT_EQ(told->why.code, errc::layout_mismatch) << to_string(told->why);
}

// Like an end that waits for the fences of its sessions after the dialler was silent.
TEST_F(late_dialler, loses_no_attempt_where_the_end_was_ending_when_it_was_asked) {
  context->settings.max_reconnects = 1;
  ear->second = [](link_actor::pointer self, const link_actor& dialler, auto answer) {
    self->send(dialler, link_notice{link_fate::ended, "the dialler is silent"});
    answer.deliver(refused(errc::peer_lost, "the dialler is silent"));
  };
  need();
  EXPECT_TRUE(ear->by_node.at(1)) << "the node was not asked for another end";
}

// The network layer does not return a message to an actor that it knows to be gone.
TEST_F(late_dialler, waits_for_no_answer_of_an_end_that_is_gone) {
  context->settings.max_reconnects = 1;
  context->settings.connect_timeout = 10 * troupe::testing::wait_limit;
  ear->second = [](link_actor::pointer self, const link_actor& dialler, auto) {
    self->send(dialler, link_notice{link_fate::ended, "it is over"});
    self->quit();
  };
  need();
  EXPECT_TRUE(ear->by_node.at(1)) << "the node was not asked for another end";
}

// Like the end of a frozen process. A link that was never up has nothing that is worth waiting for.
TEST_F(late_dialler,
       asks_an_end_that_does_not_answer_once_more_and_not_as_often_as_a_wire_is_tried) {
  context->settings.max_reconnects = 1'000'000;
  context->settings.connect_timeout = 3s;
  ear->second = [](link_actor::pointer, const link_actor&, auto) {};
  need();
  const auto told = gone->at(0);
  ASSERT_TRUE(told);
  EXPECT_EQ(told->why.code, errc::peer_unreachable) << to_string(told->why);
  EXPECT_EQ(ear->by_end.size(), 3u);
}

TEST_F(late_dialler, asks_the_end_again_that_answered_late_once) {
  context->settings.connect_timeout = 3s;
  ear->second = [number = 0](link_actor::pointer, const link_actor&, auto answer) mutable {
    if (++number == 1) return;
    answer.deliver(refused(errc::layout_mismatch, "it has other heads"));
  };
  need();
  const auto told = gone->at(0);
  ASSERT_TRUE(told);
  EXPECT_EQ(told->why.code, errc::layout_mismatch) << to_string(told->why);
  EXPECT_EQ(ear->by_node.size(), 1u) << "the sessions of the end would be lost";
}

TEST_F(late_dialler, loses_no_attempt_where_the_end_had_ended_before_it_was_asked) {
  context->settings.max_reconnects = 1;
  // The network layer's answer for an actor that is gone.
  ear->second = [](link_actor::pointer self, const link_actor&, auto answer) {
    answer.deliver(caf::make_error(caf::sec::request_receiver_down));
    self->quit();
  };
  need();
  EXPECT_TRUE(ear->by_node.at(1)) << "the node was not asked for another end";
}

TEST_F(late_dialler, says_what_the_last_attempt_came_to_at_both_sides) {
  context->settings.max_reconnects = 1;
  need();
  const auto told = gone->at(0);
  ASSERT_TRUE(told);
  EXPECT_EQ(told->why.code, errc::peer_unreachable);
  EXPECT_NE(told->why.message.find("the peer refused the link"), std::string::npos)
      << told->why.message;
  const auto notice = ear->notices.at(0);
  ASSERT_TRUE(notice) << "the other end waits";
  EXPECT_EQ(notice->fate, link_fate::ended);
  EXPECT_EQ(ear->by_end.size(), 2u);
}

class left_dialler : public dialling_node {
 protected:
  inbox_ptr<link_request> requests = std::make_shared<inbox<link_request>>();
  std::shared_ptr<transport::endpoint> peer;
  std::shared_ptr<std::vector<std::shared_ptr<transport::link>>> open =
      std::make_shared<std::vector<std::shared_ptr<transport::link>>>();

  void SetUp() override {
    transport::endpoint_options options;
    options.self = incarnation{9};
    peer = transport::endpoint::create(options).value();
    const auto end = there.system().spawn(parting_end, peer, requests, open);
    there.own(end);
    start(there.system().spawn(accepting_node, end));
    show(9);
  }
  void TearDown() override {
    for (const auto& link : *open) link->close();
    dialling_node::TearDown();
  }
};

TEST_F(left_dialler, takes_it_for_the_end_of_the_attempt_and_not_of_the_peer) {
  context->settings.max_reconnects = 1;
  need();
  const auto told = gone->at(0);
  ASSERT_TRUE(told);
  EXPECT_EQ(told->why.code, errc::peer_unreachable);
  EXPECT_NE(told->why.message.find("it cannot be joined"), std::string::npos) << told->why.message;
  EXPECT_EQ(requests->size(), 2u);
}

}  // namespace
}  // namespace troupe::actors::testing
