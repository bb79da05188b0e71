// The bytes that a send is told to have moved.

#include <gtest/gtest.h>

#include "listening_link.hpp"
#include "waiting.hpp"

namespace troupe::actors::testing {
namespace {

constexpr std::uint32_t tokens = 16;
/// Two layers, K and V, two heads of eight elements of two bytes.
constexpr std::uint64_t bytes_of_all = tokens * 2U * 2U * 2U * 8U * 2U;

class sent_bytes : public listened_runner {
 protected:
  session_actor session;

  /// A send of 16 tokens that is computed and sealed, and that its peer has requested. It has
  /// posted them.
  void SetUp() override {
    context->layout = small_layout();
    context->regions.push_back(region_id{1});
    meet("there-0", small_layout());
    send_spec spec;
    spec.request = "r";
    spec.blocks = {block_id{0}};
    spec.deadline = 10 * troupe::testing::wait_limit;
    const auto operation = context->operations.begin({operation_kind::send, "r", tokens, false});
    caf::anon_send(runner, engine_command{start_send{*operation, std::move(spec)}});
    caf::anon_send(runner, engine_command{send_progress{*operation, {0, 2, tokens}}});
    caf::anon_send(runner, engine_command{send_sealed{*operation, {tokens, {}}}});
    transfer_request request;
    request.transfer = transfer_id{7};
    request.request = "r";
    request.token_end = tokens;
    request.blocks.push_back({block_id{3}, 1});
    request.grants.emplace_back();
    request.deadline_ms = 600'000;
    comes(std::move(request));
    ASSERT_TRUE(heard->batches.at(0)) << "nothing was posted";
    session = heard->sessions.at(0).value();
  }
  void posted_is_done() {
    const auto id = heard->batches.at(0)->first;
    caf::anon_send(session,
                   session_event{transport::completion{id, transfer_id{7}, {}, bytes_of_all, {}}});
  }
  void peer_has_it_all() {
    caf::anon_send(session, session_event{session_message{transfer_release{transfer_id{7}}}});
  }
  void expect_all_told() {
    const auto events = context->events.wait(troupe::testing::wait_limit, 1);
    ASSERT_EQ(events.size(), 1U);
    const auto* done = std::get_if<event_done>(&events.front().what);
    ASSERT_NE(done, nullptr);
    EXPECT_EQ(done->bytes, bytes_of_all);
  }
};

TEST_F(sent_bytes, are_all_when_the_link_has_told_of_them_first) {
  posted_is_done();
  peer_has_it_all();
  expect_all_told();
}

TEST_F(sent_bytes, are_all_though_the_peer_is_heard_before_the_link) {
  peer_has_it_all();
  posted_is_done();
  expect_all_told();
}

TEST_F(sent_bytes, are_all_though_the_link_broke_before_it_told_of_them) {
  caf::anon_send(session, session_event{link_is_back{2, "tcp"}});
  peer_has_it_all();
  expect_all_told();
}

}  // namespace
}  // namespace troupe::actors::testing
