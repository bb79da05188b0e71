// A node that comes to a peer's data port after the peer has given the attempt up.

#include <memory>

#include "dialling_node.hpp"

namespace troupe::actors::testing {
namespace {

using transport::backend_kind;

/// Nobody listens to what happens on the link.
class deaf final : public transport::link_sink {
 public:
  void on_up() override {}
  void on_completion(transport::completion) override {}
  void on_frame(std::span<const std::byte>) override {}
  void on_quiescent(transfer_id) override {}
  void on_broken(troupe::error) override {}
};

/// The peer's end of a link, which stops waiting for the dialler as soon as it has made its offer.
link_actor::behavior_type impatient_end(link_actor::pointer self,
                                        std::shared_ptr<transport::endpoint> endpoint,
                                        inbox_ptr<link_request> requests) {
  return {
      [](link_command&) {},
      [](link_event&) {},
      [self, endpoint, requests](const link_request& request) {
        auto answer = self->make_response_promise<link_reply>();
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
        requests->put(request);
        answer.deliver(std::move(reply));
        return answer;
      },
      [](const link_notice&) {},
      [](report_atom) { return link_report{}; },
  };
}

/// The peer's end of a link, which makes its offer and ends at once, before this side's transport can
/// have noticed.
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

class late_dialler : public dialling_node {
 protected:
  inbox_ptr<link_request> requests = std::make_shared<inbox<link_request>>();

  void SetUp() override {
    transport::endpoint_options options;
    options.self = incarnation{9};
    std::shared_ptr<transport::endpoint> peer = transport::endpoint::create(options).value();
    const auto end = there.system().spawn(impatient_end, peer, requests);
    there.own(end);
    start(there.system().spawn(accepting_node, end));
    show(9);
  }
};

TEST_F(late_dialler, asks_for_another_offer) {
  need();
  ASSERT_TRUE(requests->at(0));
  EXPECT_TRUE(requests->at(1)) << "a refusal of what nobody waits for any more is no answer";
}

TEST_F(late_dialler, says_what_the_last_attempt_came_to) {
  context->settings.max_reconnects = 1;
  need();
  const auto told = gone->at(0);
  ASSERT_TRUE(told);
  EXPECT_EQ(told->why.code, errc::peer_unreachable);
  EXPECT_NE(told->why.message.find("the peer refused the link"), std::string::npos)
      << told->why.message;
  EXPECT_EQ(requests->size(), 2u);
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
