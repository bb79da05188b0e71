// A receive from several ranks is done or not as a whole: none of them is released before.

#include <string>
#include <vector>

#include <gmock/gmock.h>

#include "listening_link.hpp"
#include "waiting.hpp"

namespace troupe::actors::testing {
namespace {

using troupe::testing::wait_limit;

/// Of two ranks, from each of which nothing is wanted but its seal: the prefix is all of the tokens.
class receive_of_two : public listened_port {
 protected:
  operation_id operation;
  std::vector<transfer_id> transfers;
  std::vector<session_actor> sessions;

  void SetUp() override {
    context->layout = small_layout();
    meet("there-0", small_layout(0, 2));
    other_link = {"there-1", incarnation{6}, small_layout(1, 2),
                  host.system().spawn(listening_link, heard), 1};
    host.own(other_link.actor);
    caf::anon_send(port, port_event{link_ready{other_link}});
    receive_spec spec;
    spec.request = "r";
    spec.sources = {"there-0", "there-1"};
    spec.tokens = 16;
    spec.prefix_tokens = 16;
    spec.blocks = {block_id{0}};
    spec.deadline = 10 * wait_limit;
    operation = context->operations.begin({}).value();
    caf::anon_send(port, engine_command{start_receive{operation, spec}});
    for (const std::size_t index : {0, 1}) {
      const auto request = said<transfer_request>(index);
      ASSERT_TRUE(request);
      transfers.push_back(request->transfer);
      const auto session = heard->sessions.at(index);
      ASSERT_TRUE(session);
      sessions.push_back(*session);
    }
  }
  void seals(std::size_t rank, std::vector<std::byte> aux = {}) {
    caf::anon_send(
        sessions.at(rank),
        session_event{session_message{transfer_sealed{transfers.at(rank), 16, 0, std::move(aux)}}});
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
  EXPECT_TRUE(said<transfer_release>(2));
  EXPECT_TRUE(said<transfer_release>(3));
}

TEST_F(receive_of_two, gives_back_what_is_here_when_the_other_fails) {
  seals(0);
  EXPECT_TRUE(context->events.wait(std::chrono::milliseconds{100}, 1).empty());
  caf::anon_send(sessions.at(1), session_event{session_message{transfer_abort{
                                     transfers.at(1), errc::aborted, "its engine gives up"}}});
  const auto outcome = next_event();
  ASSERT_TRUE(outcome);
  EXPECT_TRUE(std::holds_alternative<event_failed>(outcome->what));
  bool given_back = false;
  for (const std::size_t index : {2, 3}) {  // beside the answer to the abort
    const auto word = heard->said.at(index);
    ASSERT_TRUE(word);
    EXPECT_FALSE(std::holds_alternative<transfer_release>(*word));
    const auto* abort = std::get_if<transfer_abort>(&*word);
    given_back = given_back || (abort != nullptr && abort->transfer == transfers.at(0));
  }
  EXPECT_TRUE(given_back);
}

}  // namespace
}  // namespace troupe::actors::testing
