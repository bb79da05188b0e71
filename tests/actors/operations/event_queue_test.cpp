// Events for the engine are never lost and never unbounded, whether or not the engine takes them.

#include "troupe/actors/operations/event_queue.hpp"

#include <limits>
#include <map>
#include <random>
#include <string>
#include <thread>

#include <gtest/gtest.h>
#include <poll.h>

namespace troupe::actors {
namespace {

using namespace std::chrono_literals;

constexpr auto everything = std::numeric_limits<std::size_t>::max();

operation_table::entry some_value() {
  return {operation_kind::value, {}, 0, false};
}

class events : public ::testing::Test {
 protected:
  static constexpr std::uint32_t bound = 8;
  operation_table operations{bound};
  event_queue queue{operations};

  operation_id begin() {
    auto id = operations.begin(some_value());
    EXPECT_TRUE(id) << to_string(id.error());
    return id.value_or(operation_id{});
  }
  void conclude(operation_id id) {
    EXPECT_TRUE(operations.end(id));
    queue.push_last({id, event_done{}});
  }
};

TEST_F(events, that_nobody_takes_keep_further_operations_out_and_none_is_lost) {
  std::vector<operation_id> begun;
  for (std::uint32_t i = 0; i < bound; ++i) {
    begun.push_back(begin());
    conclude(begun.back());
  }
  auto refused = operations.begin(some_value());
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, errc::overloaded);
  EXPECT_NE(refused.error().message.find("limits.max_operations"), std::string::npos);
  EXPECT_NE(refused.error().message.find("take events"), std::string::npos);
  const auto first = queue.take(1);
  ASSERT_EQ(first.size(), 1u);
  EXPECT_EQ(first.front().operation, begun.front());
  const auto another = begin();
  EXPECT_FALSE(operations.begin(some_value()));
  conclude(another);
  const auto rest = queue.take(everything);
  ASSERT_EQ(rest.size(), bound);
  for (std::size_t i = 0; i + 1 < bound; ++i) EXPECT_EQ(rest[i].operation, begun[i + 1]);
  EXPECT_EQ(rest.back().operation, another);
  EXPECT_EQ(operations.open(), 0u);
}

TEST_F(events, of_an_operation_before_its_last_leave_it_open) {
  const auto id = begin();
  queue.push({id, event_layers{{0, 1, 0, 16}}});
  ASSERT_TRUE(operations.end(id));
  queue.push({id, event_done{}});
  EXPECT_EQ(queue.take(everything).size(), 2u);
  EXPECT_EQ(operations.open(), 1u) << "its blocks are still pinned";
  queue.push_last({id, event_unpinned{}});
  EXPECT_EQ(queue.take(everything).size(), 1u);
  EXPECT_EQ(operations.open(), 0u);
}

/// The progress of one operation's layers as its events tell it; events must leave no gap.
class heard_layers {
 public:
  void hear(const cache_slice& slice) {
    for (auto layer = slice.layer_begin; layer < slice.layer_end; ++layer) {
      EXPECT_EQ(slice.token_begin, tokens_[layer]) << "layer " << layer;
      EXPECT_GT(slice.token_end, slice.token_begin);
      tokens_[layer] = slice.token_end;
    }
  }
  bool operator==(const heard_layers&) const = default;

 private:
  std::map<std::uint32_t, std::uint32_t> tokens_;
};

TEST_F(events, of_layers_that_nobody_takes_are_merged_and_say_the_same) {
  constexpr std::uint32_t layers = 40;
  constexpr std::size_t many = 300'000;
  std::mt19937 source{7};
  const auto random = [&] { return static_cast<std::uint32_t>(source()); };
  std::map<std::uint64_t, heard_layers> said;
  std::map<std::uint64_t, std::vector<std::uint32_t>> progress;
  std::vector<operation_id> ids;
  for (std::uint32_t i = 0; i < bound; ++i) ids.push_back(begin());
  std::size_t most = 0;
  for (std::size_t i = 0; i < many; ++i) {
    const auto id = ids[random() % bound];
    auto& tokens = progress[id.value];
    tokens.resize(layers);
    // Adjacent layers of equal progress, as the runner reports them.
    const std::uint32_t begin = random() % layers;
    auto end = begin + 1;
    const std::uint32_t longest = 1 + random() % 5;
    while (end < layers && end - begin < longest && tokens[end] == tokens[begin]) ++end;
    const cache_slice slice{begin, end, tokens[begin], tokens[begin] + 1 + random() % 16};
    std::fill(tokens.begin() + begin, tokens.begin() + end, slice.token_end);
    said[id.value].hear(slice);
    queue.push({id, event_layers{slice}});
    most = std::max(most, queue.size());
  }
  EXPECT_LE(most, 1024u + 2 * bound * layers);
  for (const auto id : ids) conclude(id);
  std::map<std::uint64_t, heard_layers> heard;
  std::map<std::uint64_t, int> outcomes;
  for (const auto& e : queue.take(everything)) {
    if (const auto* slice = std::get_if<event_layers>(&e.what)) {
      EXPECT_EQ(outcomes[e.operation.value], 0) << "layers after the outcome";
      heard[e.operation.value].hear(slice->slice);
    } else {
      ++outcomes[e.operation.value];
    }
  }
  EXPECT_EQ(heard, said);
  for (const auto id : ids) EXPECT_EQ(outcomes[id.value], 1);
}

TEST_F(events, wake_whoever_waits_in_either_way) {
  for (int i = 0; i < 2000; ++i) {
    const auto id = begin();
    std::thread other{[&] { conclude(id); }};
    if (i % 2 == 0) {
      EXPECT_EQ(queue.wait(10s, 64).size(), 1u);
    } else {
      pollfd readable{queue.fd(), POLLIN, 0};
      EXPECT_EQ(::poll(&readable, 1, 10'000), 1);
      EXPECT_EQ(queue.take(64).size(), 1u);
      EXPECT_EQ(::poll(&readable, 1, 0), 0) << "readable with nothing to take";
    }
    other.join();
  }
}

// -- of members

membership one_member(std::uint64_t epoch, std::uint64_t life, node_state state) {
  member m;
  m.node.name = "decode-0";
  m.node.incarnation = life;
  m.state = static_cast<std::uint8_t>(state);
  m.reason = "lost";
  return {"demo", 1, epoch, {m}};
}

TEST_F(events, of_members_are_told_only_to_who_watches) {
  queue.see(one_member(1, 7, node_state::up));
  EXPECT_TRUE(queue.empty());
  queue.watch_members("prefill-0");
  queue.see(one_member(2, 7, node_state::up));
  EXPECT_EQ(queue.size(), 1u);
}

TEST_F(events, of_members_come_before_those_of_operations_and_belong_to_none) {
  queue.watch_members("prefill-0");
  const auto id = begin();
  conclude(id);
  queue.see(one_member(1, 7, node_state::up));
  (void)queue.take(1);
  queue.see(one_member(2, 8, node_state::up));
  EXPECT_EQ(queue.size(), 3u);
  const auto first = queue.take(1);
  ASSERT_EQ(first.size(), 1u);
  EXPECT_EQ(first.front().operation, operation_id{});
  const auto& gone = std::get<event_member>(first.front().what);
  EXPECT_EQ(gone.incarnation, 7u);
  EXPECT_EQ(gone.state, member_state::gone);
  const auto rest = queue.take(everything);
  ASSERT_EQ(rest.size(), 2u);
  EXPECT_EQ(std::get<event_member>(rest.front().what).incarnation, 8u);
  EXPECT_EQ(rest.back().operation, id);
  EXPECT_EQ(operations.open(), 0u);
}

TEST_F(events, of_members_go_to_nobody_who_waits_for_an_operation) {
  queue.watch_members("prefill-0");
  const auto id = begin();
  {
    const auto mine = queue.claim_events(id);
    ASSERT_TRUE(mine);
    queue.see(one_member(1, 7, node_state::up));
    conclude(id);
    const auto taken = (*mine)->take();
    ASSERT_TRUE(taken && *taken);
    ASSERT_EQ((*taken)->size(), 1u);
    EXPECT_TRUE(std::holds_alternative<event_done>((*taken)->front().what));
  }
  const auto of_none = queue.claim_events(operation_id{});
  ASSERT_FALSE(of_none);
  EXPECT_EQ(of_none.error().code, errc::not_found);
  const auto rest = queue.take(everything);
  ASSERT_EQ(rest.size(), 1u);
  EXPECT_TRUE(std::holds_alternative<event_member>(rest.front().what));
}

TEST_F(events, of_members_wake_who_waits_and_are_seen_no_more_when_there_is_nothing_to_tell) {
  queue.watch_members("prefill-0");
  const auto readable = [this] {
    pollfd shown{queue.fd(), POLLIN, 0};
    return ::poll(&shown, 1, 0) == 1;
  };
  std::thread other{[&] { queue.see(one_member(1, 7, node_state::up)); }};
  EXPECT_EQ(queue.wait(10s, 64).size(), 1u);
  other.join();
  EXPECT_FALSE(readable());
  queue.see(one_member(2, 7, node_state::suspect));
  EXPECT_TRUE(readable());
  queue.see(one_member(3, 7, node_state::up));
  EXPECT_FALSE(readable()) << "it is as the engine knows it";
  EXPECT_TRUE(queue.empty());
}

TEST_F(events, of_members_end_with_the_watch_and_others_do_not) {
  queue.watch_members("prefill-0");
  conclude(begin());
  queue.see(one_member(1, 7, node_state::up));
  EXPECT_EQ(queue.size(), 2u);
  queue.end_watch();
  EXPECT_EQ(queue.size(), 1u);
  queue.see(one_member(2, 8, node_state::up));
  const auto rest = queue.take(everything);
  ASSERT_EQ(rest.size(), 1u);
  EXPECT_TRUE(std::holds_alternative<event_done>(rest.front().what));
}

TEST(operations, that_are_live_when_the_table_closes_are_named_and_no_other_begins) {
  operation_table table{4};
  const auto first = table.begin(some_value());
  const auto second = table.begin({operation_kind::send, "r", 16, false});
  ASSERT_TRUE(first && second);
  ASSERT_TRUE(table.end(*first));
  table.close();
  EXPECT_EQ(table.live(), std::vector<operation_id>{*second});
  EXPECT_EQ(table.begin(some_value()).error().code, errc::aborted);
  EXPECT_TRUE(table.end(*second));
  EXPECT_FALSE(table.end(*second));
}

TEST(operations, that_were_receives_are_known_by_how_they_ended) {
  operation_table table{4};
  const auto done = table.begin({operation_kind::receive, "done", 50, false});
  const auto failed = table.begin({operation_kind::receive, "failed", 60, false});
  const auto sent = table.begin({operation_kind::send, "sent", 70, false});
  ASSERT_TRUE(done && failed && sent);
  EXPECT_FALSE(table.ended(*done)) << "it is live";
  ASSERT_TRUE(table.end(*done, std::nullopt));
  ASSERT_TRUE(table.end(*failed, troupe::error{errc::peer_lost, "gone"}));
  ASSERT_TRUE(table.end(*sent, std::nullopt));
  EXPECT_FALSE(table.end(*failed, std::nullopt)) << "it has its outcome";
  table.last_event_taken({*done, *failed, *sent});
  ASSERT_TRUE(table.ended(*done));
  EXPECT_FALSE(table.ended(*done)->failure);
  EXPECT_EQ(table.ended(*done)->token_capacity, 50u);
  ASSERT_TRUE(table.ended(*failed) && table.ended(*failed)->failure);
  EXPECT_EQ(table.ended(*failed)->failure->message, "gone");
  EXPECT_FALSE(table.ended(*sent));
}

TEST(operations, that_were_receives_are_forgotten_when_many_have_ended_since) {
  operation_table table{4};
  std::vector<operation_id> all;
  constexpr int one_more_than_are_kept = 4097;
  for (int i = 0; i < one_more_than_are_kept; ++i) {
    const auto id = table.begin({operation_kind::receive, "r", 50, false});
    ASSERT_TRUE(id);
    ASSERT_TRUE(table.end(*id, std::nullopt));
    table.last_event_taken({*id});
    all.push_back(*id);
  }
  EXPECT_FALSE(table.ended(all.front()));
  EXPECT_TRUE(table.ended(all[1]));
  EXPECT_TRUE(table.ended(all.back()));
}

}  // namespace
}  // namespace troupe::actors
