// A receive from several ranks succeeds or fails as a whole: no rank is released before.

#include <string>
#include <vector>

#include <gmock/gmock.h>

#include "listening_link.hpp"
#include "waiting.hpp"

namespace troupe::actors::testing {
namespace {

using troupe::testing::wait_limit;

/// A receive from two ranks that needs only their seals, since the prefix covers all tokens.
class receive_of_two : public listened_runner {
 protected:
  /// By rank: messages to different ranks are not ordered.
  const std::vector<std::shared_ptr<heard_words>> heard_by{heard, std::make_shared<heard_words>()};
  operation_id operation;
  std::vector<transfer_id> transfers;
  std::vector<session_actor> sessions;

  void SetUp() override {
    context->layout = small_layout();
    meet("there-0", small_layout(0, 2));
    other_link = {"there-1", incarnation{6}, small_layout(1, 2),
                  host.system().spawn(listening_link, heard_by.at(1)), 1};
    other_link.id = other_link.actor.id();
    host.own(other_link.actor);
    caf::anon_send(runner, runner_event{link_ready{other_link}});
    receive_spec spec;
    spec.request = "r";
    spec.sources = {"there-0", "there-1"};
    spec.tokens = 16;
    spec.prefix_tokens = 16;
    spec.blocks = {block_id{0}};
    spec.deadline = 10 * wait_limit;
    operation = context->operations.begin({}).value();
    caf::anon_send(runner, engine_command{start_receive{operation, spec}});
    for (const auto& words : heard_by) {
      const auto request = words->said.at(0);
      ASSERT_TRUE(request && std::holds_alternative<transfer_request>(*request));
      transfers.push_back(std::get<transfer_request>(*request).transfer);
      const auto session = words->sessions.at(0);
      ASSERT_TRUE(session);
      sessions.push_back(*session);
    }
  }
  void seals(std::size_t rank, std::vector<std::byte> aux = {}) {
    caf::anon_send(
        sessions.at(rank),
        session_event{session_message{transfer_sealed{transfers.at(rank), 16, 0, std::move(aux)}}});
  }
  /// The message that follows the request to that rank.
  template <class Message>
  std::optional<Message> told(std::size_t rank) {
    const auto word = heard_by.at(rank)->said.at(1);
    if (!word || !std::holds_alternative<Message>(*word)) return std::nullopt;
    return std::get<Message>(*word);
  }
  std::optional<event> next_event() {
    auto events = context->events.wait(wait_limit, 1);
    if (events.empty()) return std::nullopt;
    return std::move(events.front());
  }

 private:
  link_handle other_link;
};

TEST_F(receive_of_two, releases_both_once_both_are_here) {
  seals(0, {std::byte{7}});
  seals(1);
  const auto outcome = next_event();
  ASSERT_TRUE(outcome);
  const auto* done = std::get_if<event_done>(&outcome->what);
  ASSERT_NE(done, nullptr);
  EXPECT_EQ(done->aux, std::vector{std::byte{7}});
  EXPECT_TRUE(told<transfer_release>(0));
  EXPECT_TRUE(told<transfer_release>(1));
}

TEST_F(receive_of_two, gives_back_what_is_here_when_the_other_fails) {
  seals(0);
  EXPECT_TRUE(context->events.wait(std::chrono::milliseconds{100}, 1).empty());
  caf::anon_send(sessions.at(1), session_event{session_message{transfer_abort{
                                     transfers.at(1), errc::aborted, "its engine gives up"}}});
  const auto outcome = next_event();
  ASSERT_TRUE(outcome);
  EXPECT_TRUE(std::holds_alternative<event_failed>(outcome->what));
  const auto given_back = told<transfer_abort>(0);
  ASSERT_TRUE(given_back);
  EXPECT_FALSE(given_back->refused);
  const auto answer = heard_by.at(1)->said.at(1);
  EXPECT_TRUE(answer && !std::holds_alternative<transfer_release>(*answer));
}

TEST_F(receive_of_two, fails_no_send_at_the_one_when_the_other_refuses) {
  caf::anon_send(sessions.at(1), session_event{session_message{transfer_abort{
                                     transfers.at(1), errc::out_of_range, "it holds less", true}}});
  const auto outcome = next_event();
  ASSERT_TRUE(outcome);
  const auto* failed = std::get_if<event_failed>(&outcome->what);
  ASSERT_NE(failed, nullptr);
  EXPECT_EQ(failed->why.code, errc::out_of_range);
  const auto given_back = told<transfer_abort>(0);
  ASSERT_TRUE(given_back);
  EXPECT_TRUE(given_back->refused);
}

using asked_actor = caf::typed_actor<caf::reacts_to<node_command>>;
asked_actor::behavior_type deaf(asked_actor::pointer) {
  return {[](node_command&) {}};
}

/// A receive from two sources. The test decides when the link with the second one comes.
class receive_as_links_come : public listened_runner {
 protected:
  static layout_ptr part(std::uint32_t first, std::uint32_t end) {
    kvcache::cache_shape shape;
    shape.layers = kvcache::attention_layers(end - first, 2, 8);
    shape.blocks = 4;
    shape.first_layer = first;
    shape.total_layers = 4;
    return std::make_shared<const kvcache::cache_layout>(kvcache::make_layout(shape, {}).value());
  }
  void begin(layout_ptr ours, layout_ptr first, std::vector<std::uint64_t> lives = {}) {
    context->layout = std::move(ours);
    meet("there-0", std::move(first));
    const auto node = host.system().spawn(deaf);
    host.own(node);
    caf::anon_send(runner, engine_command{connect_operations{node, {}}});
    receive_spec spec;
    spec.request = "r";
    spec.sources = {"there-0", "there-1"};
    spec.lives = std::move(lives);
    spec.tokens = 16;
    spec.prefix_tokens = 16;
    spec.blocks = {block_id{0}};
    spec.deadline = 10 * wait_limit;
    caf::anon_send(runner,
                   engine_command{start_receive{context->operations.begin({}).value(), spec}});
  }
  void begin_with_the_first_part() {
    begin(part(0, 4), part(0, 2));
    EXPECT_TRUE(context->events.wait(std::chrono::milliseconds{100}, 1).empty());
    EXPECT_EQ(heard->said.size(), 0u) << "nobody knows yet whether these are all the layers";
  }
  void second_link(layout_ptr its_layout) {
    other_link = {"there-1", incarnation{6}, std::move(its_layout),
                  host.system().spawn(listening_link, heard), 1};
    other_link.id = other_link.actor.id();
    host.own(other_link.actor);
    caf::anon_send(runner, runner_event{link_ready{other_link}});
  }
  void expect_failed(errc code, const ::testing::Matcher<const std::string&>& words) {
    auto events = context->events.wait(wait_limit, 1);
    ASSERT_EQ(events.size(), 1u);
    const auto* failed = std::get_if<event_failed>(&events.front().what);
    ASSERT_NE(failed, nullptr);
    EXPECT_EQ(failed->why.code, code);
    EXPECT_THAT(failed->why.message, words);
    EXPECT_EQ(heard->said.size(), 0u);
  }

 private:
  link_handle other_link;
};

TEST_F(receive_as_links_come, asks_parts_of_a_pipeline_once_all_are_there) {
  begin_with_the_first_part();
  second_link(part(2, 4));
  EXPECT_TRUE(said<transfer_request>(0));
  EXPECT_TRUE(said<transfer_request>(1));
}

TEST_F(receive_as_links_come, asks_nobody_where_two_parts_hold_a_layer) {
  begin_with_the_first_part();
  second_link(part(1, 4));
  expect_failed(errc::layout_mismatch,
                ::testing::AllOf(::testing::HasSubstr("layer 1 of the model's 4"),
                                 ::testing::HasSubstr("`there-0` and by `there-1`")));
}

TEST_F(receive_as_links_come, waits_for_no_part_where_one_lives_another_life) {
  begin(part(0, 4), part(0, 2), {4, 0});
  expect_failed(errc::stale_incarnation, ::testing::HasSubstr("there-0"));
}

TEST_F(receive_as_links_come, asks_ranks_that_have_all_layers_one_by_one) {
  begin(small_layout(), small_layout(0, 2));
  EXPECT_TRUE(said<transfer_request>(0));
  second_link(small_layout(1, 2));
  EXPECT_TRUE(said<transfer_request>(1));
}

}  // namespace
}  // namespace troupe::actors::testing
