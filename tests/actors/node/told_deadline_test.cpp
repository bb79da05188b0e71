// Both sides of a transfer share the decode side's deadline: each message tells the time that is
// left.

#include <gmock/gmock.h>

#include "listening_link.hpp"
#include "waiting.hpp"

namespace troupe::actors::testing {
namespace {

using clock = std::chrono::steady_clock;

class told_deadline : public listened_runner {
 protected:
  void SetUp() override {
    context->layout = small_layout();
    meet("there-0", context->layout);
  }
  /// The peer requests `name` and waits for it for `deadline`.
  void ask(transfer_id transfer, const std::string& name, std::chrono::milliseconds deadline) {
    transfer_request request;
    request.transfer = transfer;
    request.request = name;
    request.deadline_ms = static_cast<std::uint32_t>(deadline.count());
    comes(request);
  }
  void offer(const std::string& request) {
    send_spec spec;
    spec.request = request;
    spec.deadline = 10 * troupe::testing::wait_limit;
    const auto operation = context->operations.begin({});
    ASSERT_TRUE(operation);
    offered = *operation;
    caf::anon_send(runner, engine_command{start_send{*operation, spec}});
  }
  operation_id offered;  ///< the last offered send
};

TEST_F(told_deadline, is_what_is_left_when_a_request_is_said_again_over_the_next_link) {
  receive_spec spec;
  spec.request = "r";
  spec.sources = {link.peer};
  spec.deadline = 60s;
  const auto operation = context->operations.begin({});
  ASSERT_TRUE(operation);
  caf::anon_send(runner, engine_command{start_receive{*operation, spec}});
  const auto first = heard->said.at(0);
  ASSERT_TRUE(first && std::holds_alternative<transfer_request>(*first));
  EXPECT_LE(std::get<transfer_request>(*first).deadline_ms, 60'000u);
  std::this_thread::sleep_for(300ms);
  const auto session = heard->sessions.at(0);
  ASSERT_TRUE(session);
  caf::anon_send(*session, session_event{link_is_back{2, "tcp"}});
  const auto again = heard->said.at(1);
  ASSERT_TRUE(again && std::holds_alternative<transfer_request>(*again));
  EXPECT_LE(std::get<transfer_request>(*again).deadline_ms, 59'700u);
  caf::anon_send(*session, session_event{abort_session{{errc::aborted, "enough"}}});
}

// Seed 27 of the engine fuzzer: released at the last moment, done there and failed here.
TEST_F(told_deadline, leaves_time_for_the_last_word_of_who_told_it) {
  const auto deadline = 100ms;
  offer("r");
  ask(transfer_id{9}, "r", deadline);
  ASSERT_TRUE(heard->sessions.at(0));
  caf::anon_send(runner, engine_command{send_sealed{offered, {16, {}}}});
  ASSERT_TRUE(said<transfer_sealed>(0));
  std::this_thread::sleep_for(deadline + 200ms);
  comes(transfer_release{transfer_id{9}});
  const auto events = context->events.wait(troupe::testing::wait_limit, 1);
  ASSERT_EQ(events.size(), 1u);
  EXPECT_TRUE(std::holds_alternative<event_done>(events.front().what));
}

TEST_F(told_deadline, runs_on_while_a_request_waits_for_its_source) {
  const auto deadline = 1200ms * troupe::testing::slowness;
  const auto asked = clock::now();
  ask(transfer_id{9}, "r", deadline);
  std::this_thread::sleep_for(deadline / 2);
  offer("r");
  // The deadline of this request, whose source is there at once, is later than that of the first,
  // and earlier than the first's would be if it restarted when the source came.
  ask(transfer_id{10}, "between", deadline * 3 / 4);
  offer("between");
  auto said = heard->said.at(0);
  for (std::size_t next = 1; said && !std::holds_alternative<transfer_abort>(*said); ++next) {
    said = heard->said.at(next);
  }
  const auto took = clock::now() - asked;
  ASSERT_TRUE(said) << "it has no end";
  EXPECT_EQ(std::get<transfer_abort>(*said).transfer, transfer_id{9})
      << "counted again since the source came";
  EXPECT_EQ(std::get<transfer_abort>(*said).code, errc::deadline);
  EXPECT_GE(took, deadline);
  const auto other = heard->sessions.at(1);
  ASSERT_TRUE(other);
  caf::anon_send(*other, session_event{abort_session{{errc::aborted, "enough"}}});
}

}  // namespace
}  // namespace troupe::actors::testing
