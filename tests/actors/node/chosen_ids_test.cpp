// Peers choose the ids of their requests and holds, and say which life they are: none of that may
// touch what another peer has begun.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "listening_link.hpp"

namespace troupe::actors::testing {
namespace {

using ::testing::HasSubstr;

constexpr transfer_id chosen{9};

/// Two decode nodes, each with a link of its own.
class peers_with_one_id : public listened_runner {
 protected:
  std::shared_ptr<heard_words> other_heard = std::make_shared<heard_words>();
  link_handle other;
  operation_id source;

  void SetUp() override {
    context->layout = small_layout();
    context->settings.edges.emplace(std::pair{context->self.stage, std::string{"there"}},
                                    transfer_mode::write);
    context->settings.nodes["there-0"] = {"there", 0, 0, 1};
    context->settings.nodes["there-1"] = {"there", 1, 0, 1};
    meet("there-0", small_layout());
    meet_other(incarnation{6}, small_layout());
  }
  void meet_other(incarnation life, layout_ptr its_layout) {
    other = {"there-1", life, std::move(its_layout),
             host.system().spawn(listening_link, other_heard), 1};
    other.id = other.actor.id();
    host.own(other.actor);
    caf::anon_send(runner, runner_event{link_ready{other}});
  }
  operation_id offer(const std::string& request = "r") {
    source = context->operations.begin({}).value();
    send_spec spec;
    spec.request = request;
    spec.blocks = {block_id{1}};
    caf::anon_send(runner, engine_command{start_send{source, std::move(spec)}});
    return source;
  }
  void asks(const link_handle& over, const std::string& wanted = "r",
            std::optional<std::uint32_t> park_ms = std::nullopt, transfer_id id = chosen) {
    transfer_request request;
    request.transfer = id;
    request.request = wanted;
    request.token_end = 16;
    request.blocks = {{{2}, 1}};
    request.grants.resize(1);
    request.deadline_ms = 60'000;
    request.park_ms = park_ms;
    comes_over(over, std::move(request));
  }
  void comes_over(const link_handle& over, session_message message) {
    caf::anon_send(runner, runner_event{unrouted_message{over, std::move(message)}});
  }
  static std::optional<transfer_abort> refusal(const std::shared_ptr<heard_words>& at,
                                               std::size_t index = 0) {
    const auto message = at->said.at(index);
    if (!message || !std::holds_alternative<transfer_abort>(*message)) return std::nullopt;
    return std::get<transfer_abort>(*message);
  }
};

TEST_F(peers_with_one_id, of_which_one_gives_up_leave_the_others_request_parked) {
  asks(link);
  comes_over(other, transfer_abort{chosen, errc::aborted, "not mine"});
  offer();
  EXPECT_TRUE(heard->sessions.at(0)) << "nobody serves the request";
}

TEST_F(peers_with_one_id, of_which_one_does_not_wait_leave_the_other_its_time) {
  asks(link);
  asks(other, "another", 1);
  const auto refused = refusal(other_heard);
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->code, errc::not_found) << refused->reason;
  offer();
  EXPECT_TRUE(heard->sessions.at(0)) << "nobody serves the request";
}

TEST_F(peers_with_one_id, are_told_that_it_is_taken) {
  asks(link);
  offer("another");
  asks(other, "another");
  ASSERT_TRUE(other_heard->sessions.at(0));
  offer();
  const auto refused = refusal(heard);
  ASSERT_TRUE(refused) << "it waits until its deadline";
  EXPECT_EQ(refused->code, errc::already_exists) << refused->reason;
}

TEST_F(peers_with_one_id, cannot_hold_by_the_id_of_a_transfer) {
  offer();
  asks(link);
  ASSERT_TRUE(heard->sessions.at(0));
  comes_over(other, transfer_hold{chosen, "r", 0});
  const auto refused = refusal(other_heard);
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->code, errc::already_exists) << refused->reason;
}

TEST_F(peers_with_one_id, cannot_ask_by_the_id_of_a_hold) {
  offer();
  comes_over(other, transfer_hold{chosen, "r", 0});
  asks(link);
  const auto refused = refusal(heard);
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->code, errc::already_exists) << refused->reason;
}

TEST_F(peers_with_one_id, cannot_use_the_id_that_stands_for_none) {
  offer();
  comes_over(other, transfer_hold{{}, "r", 0});
  const auto refused = refusal(other_heard);
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->code, errc::out_of_range);
  EXPECT_THAT(refused->reason, HasSubstr("must not be 0"));
}

TEST_F(peers_with_one_id, are_each_judged_by_their_own_layout_though_they_claim_one_life) {
  offer();
  asks(link);
  ASSERT_TRUE(heard->sessions.at(0));
  kvcache::cache_shape shape;
  shape.layers = kvcache::attention_layers(2, 2, 16);
  shape.blocks = 4;
  meet_other(link.peer_incarnation, std::make_shared<const kvcache::cache_layout>(
                                        kvcache::make_layout(shape, {}).value()));
  offer("another");
  asks(other, "another", std::nullopt, transfer_id{10});
  const auto refused = refusal(other_heard);
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->code, errc::layout_mismatch) << refused->reason;
}

}  // namespace
}  // namespace troupe::actors::testing
