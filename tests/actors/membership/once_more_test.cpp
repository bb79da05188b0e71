// A request that is placed again because nodes of its former placement were lost.

#include "routing_fixture.hpp"

namespace troupe::actors {
namespace {

using ::testing::HasSubstr;
using testing::routed_cluster;
using testing::routes_of;

struct once_more : ::testing::Test {
  routed_cluster c{routes_of({3, 1}, {3, 2})};

  once_more() { c.all_up(); }

  result<std::variant<placement, ticket_id>> again(const placement& before,
                                                   std::vector<std::string> failed,
                                                   bool keep_source = false,
                                                   std::uint32_t timeout_ms = 0) {
    placement_request r;
    r.request = before.request;
    r.failed = std::move(failed);
    r.keep_source = keep_source ? 1 : 0;
    r.timeout_ms = timeout_ms;
    return c.routes.place(r, c.now);
  }
  placement placed_again(const placement& before, std::vector<std::string> failed,
                         bool keep_source = false) {
    const auto outcome = again(before, std::move(failed), keep_source);
    EXPECT_TRUE(outcome) << outcome.error().message;
    return outcome ? std::get<placement>(*outcome) : placement{};
  }
};

TEST_F(once_more, counts_its_attempts_and_says_by_whom_and_when_it_was_placed) {
  c.members.supervisor_incarnation = 77;
  c.tell();
  const auto first = c.place();
  EXPECT_EQ(first.attempt, 1u);
  EXPECT_EQ(first.same_source, 0);
  EXPECT_EQ(first.supervisor_incarnation, 77u);
  EXPECT_EQ(first.epoch, c.members.epoch);
  const auto second = placed_again(first, {first.decode.front().name});
  EXPECT_EQ(second.attempt, 2u);
  EXPECT_EQ(second.request, first.request);
}

TEST_F(once_more, avoids_who_was_lost_though_the_membership_shows_him_up) {
  for (int i = 0; i < 6; ++i) {
    const auto first = c.place();
    const auto second = placed_again(first, {first.prefill.front().name});
    EXPECT_NE(second.prefill.front().replica, first.prefill.front().replica);
    EXPECT_EQ(second.decode.front().replica, first.decode.front().replica)
        << "the decode replica lost nobody";
    const auto third = placed_again(second, {second.decode.back().name});
    EXPECT_NE(third.decode.front().replica, second.decode.front().replica);
  }
}

TEST_F(once_more, goes_back_to_who_was_lost_where_nobody_else_is_up) {
  const auto first = c.place();
  for (std::uint32_t replica = 0; replica < 3; ++replica) {
    if (replica == first.prefill.front().replica) continue;
    c.set("prefill-" + std::to_string(replica) + "-0", node_state::down);
  }
  const auto second = placed_again(first, {first.prefill.front().name});
  EXPECT_EQ(second.prefill.front().replica, first.prefill.front().replica);
}

TEST_F(once_more, keeps_the_source_while_it_is_up_in_the_same_life) {
  const auto first = c.place();
  const auto source = first.prefill.front();
  auto second = placed_again(first, {first.decode.front().name}, true);
  EXPECT_EQ(second.prefill.front().replica, source.replica);
  EXPECT_EQ(second.same_source, 1);
  // A restarted source has lost its blocks.
  c.set(source.name, node_state::up, 2);
  second = placed_again(second, {second.decode.front().name}, true);
  EXPECT_EQ(second.same_source, 0);
}

TEST_F(once_more, keeps_no_source_that_was_lost_itself_or_was_out_of_the_cluster) {
  auto first = c.place();
  auto second = placed_again(first, {first.prefill.front().name}, true);
  EXPECT_EQ(second.same_source, 0);
  EXPECT_NE(second.prefill.front().replica, first.prefill.front().replica);

  first = c.place();
  c.find(first.prefill.front().name)->registered = c.members.epoch + 1;
  c.tell();
  second = placed_again(first, {first.decode.front().name}, true);
  EXPECT_EQ(second.same_source, 0) << "it was taken in again since: what was placed there is void";
}

TEST_F(once_more, gives_its_places_back) {
  c.routes = router{routes_of({1, 1}, {1, 1}, placement_policy::least_queue_length)};
  c.members.members.clear();
  c.options = routes_of({1, 1}, {1, 1});
  c.all_up();
  const auto first = c.place();
  EXPECT_EQ(c.routes.queue_length("decode", 0), 1u);
  const auto second = placed_again(first, {"decode-0-0"});
  EXPECT_EQ(c.routes.queue_length("decode", 0), 1u);
  EXPECT_EQ(c.routes.queue_length("prefill", 0), 1u);
  EXPECT_EQ(c.routes.unfinished("decode", 0), 1u);
  // A request in line has no places.
  c.set("decode-0-0", node_state::down);
  ASSERT_TRUE(again(second, {"decode-0-0"}, false, 1000));
  EXPECT_EQ(c.routes.queue_length("prefill", 0), 0u);
  EXPECT_EQ(c.routes.unfinished("prefill", 0), 0u);
  c.routes.finished(second.request);
  EXPECT_EQ(c.routes.queue_length("prefill", 0), 0u) << "given back twice";
}

TEST_F(once_more, is_refused_beyond_the_budget_and_says_why) {
  auto where = c.place();
  for (std::uint32_t attempt = 2; attempt <= 3; ++attempt) {
    where = placed_again(where, {where.prefill.front().name});
    EXPECT_EQ(where.attempt, attempt);
  }
  for (int i = 0; i < 2; ++i) {  // asking again changes nothing
    const auto refused = again(where, {"prefill-2-0"});
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, errc::peer_lost);
    for (const char* part : {"'r1'", "3 times", "prefill-2-0", "limits.retry_budget (2)"}) {
      EXPECT_THAT(refused.error().message, HasSubstr(part));
    }
  }
  EXPECT_EQ(c.routes.unfinished("decode", where.decode.front().replica), 0u);
  c.routes.finished(where.request);
  EXPECT_EQ(placed_again(where, {"prefill-0-0"}).attempt, 2u) << "forgotten: a second attempt";
}

TEST_F(once_more, is_refused_at_once_with_a_budget_of_none) {
  auto options = routes_of({1, 1}, {1, 1});
  options.retry_budget = 0;
  c.routes = router{options};
  c.tell();
  placement never;
  never.request = "forgotten";
  EXPECT_EQ(again(never, {"prefill-0-0"}).error().code, errc::peer_lost);
}

TEST_F(once_more, that_nobody_could_take_costs_nothing) {
  auto where = c.place();
  for (std::uint32_t replica = 0; replica < 3; ++replica) {
    c.set("prefill-" + std::to_string(replica) + "-0", node_state::down);
  }
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(again(where, {"prefill-0-0"}).error().code, errc::peer_unreachable);
  }
  c.set("prefill-1-0", node_state::up);
  EXPECT_EQ(placed_again(where, {"prefill-0-0"}).attempt, 2u);
}

TEST_F(once_more, keeps_its_number_and_its_source_while_it_waits_in_line) {
  const auto first = c.place();
  for (std::uint32_t replica = 0; replica < 3; ++replica) {
    c.set("decode-" + std::to_string(replica) + "-0", node_state::down);
  }
  const auto waits = again(first, {"decode-0-0"}, true, 1000);
  ASSERT_TRUE(waits && std::holds_alternative<ticket_id>(*waits));
  c.set("decode-2-0", node_state::up);
  const auto served = c.routes.serve(c.now);
  ASSERT_EQ(served.size(), 1u);
  ASSERT_TRUE(served[0].outcome);
  EXPECT_EQ(served[0].outcome->attempt, 2u);
  EXPECT_EQ(served[0].outcome->same_source, 1);
  EXPECT_EQ(served[0].outcome->prefill.front().replica, first.prefill.front().replica);
  EXPECT_EQ(placed_again(*served[0].outcome, {"decode-2-0"}).attempt, 3u);
}

TEST_F(once_more, asked_again_since_the_answer_was_lost_is_answered_the_same_and_counts_once) {
  const auto first = c.place();
  const auto second = placed_again(first, {first.decode.front().name}, true);
  for (int i = 0; i < 5; ++i) {
    const auto same = placed_again(first, {first.decode.front().name}, true);
    EXPECT_EQ(same.attempt, 2u);
    EXPECT_EQ(same.same_source, 1);
    EXPECT_EQ(same.mode, second.mode);
    EXPECT_EQ(same.prefill.front().name, second.prefill.front().name);
    EXPECT_EQ(same.decode.front().name, second.decode.front().name);
  }
  std::size_t unfinished = 0;
  for (std::uint32_t replica = 0; replica < 3; ++replica) {
    unfinished += c.routes.unfinished("decode", replica);
  }
  EXPECT_EQ(unfinished, 1u);
  // That placement is lost as well, so the next one counts as a new attempt.
  c.set(second.decode.front().name, node_state::up, 2);
  EXPECT_EQ(placed_again(second, {first.decode.front().name}, true).attempt, 3u);
}

TEST_F(once_more, lost_again_at_the_only_node_that_is_up_is_counted_each_time) {
  for (std::uint32_t replica = 1; replica < 3; ++replica) {
    c.set("prefill-" + std::to_string(replica) + "-0", node_state::down);
  }
  const auto first = c.place();
  EXPECT_EQ(placed_again(first, {"prefill-0-0"}).attempt, 2u);
  EXPECT_EQ(placed_again(first, {"prefill-0-0"}).attempt, 3u);
  EXPECT_EQ(again(first, {"prefill-0-0"}).error().code, errc::peer_lost);
}

TEST_F(once_more, asked_again_while_it_waits_in_line_counts_once) {
  const auto first = c.place();
  for (std::uint32_t replica = 0; replica < 3; ++replica) {
    c.set("decode-" + std::to_string(replica) + "-0", node_state::down);
  }
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(again(first, {"decode-0-0"}, true, 1000));
  c.set("decode-2-0", node_state::up);
  const auto served = c.routes.serve(c.now);
  ASSERT_EQ(served.size(), 4u);
  for (const auto& one : served) {
    ASSERT_TRUE(one.outcome);
    EXPECT_EQ(one.outcome->attempt, 2u);
  }
  EXPECT_EQ(c.routes.unfinished("decode", 2), 1u);
}

TEST_F(once_more, moves_its_affinity_with_it) {
  placement_request r;
  r.request = "a";
  r.affinity = "talk";
  const auto first = std::get<placement>(*c.routes.place(r, c.now));
  r.failed = {first.decode.front().name};
  const auto second = std::get<placement>(*c.routes.place(r, c.now));
  EXPECT_NE(second.decode.front().replica, first.decode.front().replica);
  EXPECT_THAT(second.sentence, HasSubstr("lost to a request"));
  r = {};
  r.request = "b";
  r.affinity = "talk";
  EXPECT_EQ(std::get<placement>(*c.routes.place(r, c.now)).decode.front().replica,
            second.decode.front().replica);
}

TEST_F(once_more, needs_an_id) {
  placement_request r;
  r.failed = {"prefill-0-0"};
  EXPECT_EQ(c.routes.place(r, c.now).error().code, errc::invalid_config);
}

}  // namespace
}  // namespace troupe::actors
