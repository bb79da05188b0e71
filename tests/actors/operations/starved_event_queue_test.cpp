// No event is lost, and none comes twice, when a call of the queue finds no memory.

#include <limits>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "troupe/actors/operations/event_queue.hpp"

#include "starving.hpp"

namespace troupe::actors {
namespace {

constexpr auto everything = std::numeric_limits<std::size_t>::max();

class starved_events : public ::testing::Test {
 protected:
  operation_table operations{16};
  event_queue queue{operations};

  operation_id begin() {
    return operations
        .begin({operation_kind::send, std::string(100, 'r') + std::to_string(++begun_)})
        .value();
  }
  /// Takes all events in calls that fail at every place where they can.
  std::vector<event> take_all() {
    std::vector<event> taken;
    taken.reserve(4096);
    while (!queue.empty()) {
      troupe::testing::starve(
          [&] {
            for (auto& e : queue.take(everything)) taken.push_back(std::move(e));
          },
          [] {});
    }
    return taken;
  }

 private:
  int begun_{0};
};

TEST_F(starved_events, that_could_not_be_taken_are_taken_later) {
  std::vector<operation_id> ids{begin(), begin(), begin()};
  for (const auto id : ids) {
    queue.push({id, event_layers{{0, 1, 0, 16}}});
    ASSERT_TRUE(queue.conclude({id, event_done{}}, false));
    queue.push_last({id, event_unpinned{}});
  }
  const auto taken = take_all();
  ASSERT_EQ(taken.size(), 3 * ids.size());
  for (std::size_t i = 0; i < taken.size(); ++i) EXPECT_EQ(taken[i].operation, ids[i / 3]);
  EXPECT_EQ(operations.open(), 0u);
}

TEST_F(starved_events, of_members_are_not_lost_with_those_of_operations) {
  queue.watch_members("self");
  membership list;
  list.supervisor_incarnation = 1;
  for (int i = 1; i <= 3; ++i) {
    member shown;
    shown.node.name = std::string(100, 'n') + std::to_string(i);
    shown.node.incarnation = static_cast<std::uint64_t>(i);
    shown.state = static_cast<std::uint8_t>(node_state::up);
    list.members.push_back(shown);
  }
  queue.see(list);
  const auto id = begin();
  ASSERT_TRUE(queue.conclude({id, event_done{}}, false));
  queue.push_last({id, event_unpinned{}});
  const auto taken = take_all();
  ASSERT_EQ(taken.size(), 5u);
  for (std::uint64_t i = 1; i <= 3; ++i) {
    EXPECT_EQ(std::get<event_member>(taken[i - 1].what).incarnation, i);
  }
  EXPECT_EQ(operations.open(), 0u);
}

TEST_F(starved_events, an_operation_ends_with_its_outcome_or_goes_on) {
  const auto id = begin();
  const event_failed outcome{{errc::aborted, std::string(100, 'w')}};
  bool ended = false;
  const event first{id, outcome};
  troupe::testing::starve([&] { ended = queue.conclude(first); },
                          [&] {
                            EXPECT_TRUE(operations.find(id));
                            EXPECT_TRUE(queue.empty());
                          });
  EXPECT_TRUE(ended);
  EXPECT_FALSE(queue.conclude(first)) << "it has ended";
  EXPECT_EQ(queue.take(everything).size(), 1u);
  EXPECT_EQ(operations.open(), 0u);
}

TEST_F(starved_events, a_thread_that_waits_for_an_operation_gets_all_of_them) {
  const auto id = begin();
  const auto other = begin();
  queue.push({id, event_layers{{0, 1, 0, 16}}});
  queue.push({other, event_layers{{0, 1, 0, 16}}});
  std::unique_ptr<event_queue::claim> mine;
  troupe::testing::starve([&] { mine = queue.claim_events(id).value(); },
                          [&] { EXPECT_EQ(queue.size(), 2u); });
  troupe::testing::starve([&] { (void)queue.conclude({id, event_done{}}, false); }, [] {});
  troupe::testing::starve([&] { queue.push_last({id, event_unpinned{}}); }, [] {});
  std::size_t taken = 0;
  troupe::testing::starve([&] { taken = mine->take().value().value().size(); },
                          [&] { EXPECT_TRUE(mine->is_over()); });
  EXPECT_EQ(taken, 3u);
  EXPECT_EQ(operations.open(), 1u);
}

TEST_F(starved_events, that_a_thread_gives_back_need_no_memory) {
  std::vector<operation_id> ids;
  for (int i = 0; i < 16; ++i) ids.push_back(begin());
  std::vector<std::unique_ptr<event_queue::claim>> claims;
  for (const auto id : ids) claims.push_back(queue.claim_events(id).value());
  for (const auto id : ids) queue.push({id, event_layers{{0, 1, 0, 16}}});
  for (auto& mine : claims) {
    troupe::testing::allocations.left = 0;
    mine.reset();
    troupe::testing::allocations.left.reset();
  }
  EXPECT_EQ(take_all().size(), ids.size());
}

TEST(starved_queue, that_closes_gives_every_live_operation_its_outcome_once_there_is_memory) {
  for (std::size_t made = 0;; ++made) {
    SCOPED_TRACE(made);
    operation_table operations{16};
    event_queue queue{operations};
    std::vector<operation_id> ids;
    for (int i = 0; i < 3; ++i) ids.push_back(operations.begin({}).value());
    const auto mine = queue.claim_events(ids[1]).value();
    troupe::error failure{errc::internal, std::string(100, 'f')};
    troupe::error unending{errc::internal, std::string(100, 'u')};
    troupe::testing::allocations.left = made;
    queue.close(std::move(failure), std::move(unending));
    const bool had_enough = *troupe::testing::allocations.left > 0;
    troupe::testing::allocations.left.reset();

    EXPECT_TRUE(mine->is_over());
    EXPECT_FALSE(queue.empty()) << "nobody would ask for them";
    std::vector<event> told;
    troupe::testing::starve([&] { told = mine->take().value().value(); }, [] {});
    for (auto& e : queue.take(everything)) told.push_back(std::move(e));
    ASSERT_EQ(told.size(), ids.size());
    for (const auto& e : told) {
      const auto* failed = std::get_if<event_failed>(&e.what);
      ASSERT_NE(failed, nullptr);
      EXPECT_EQ(failed->why.message, std::string(100, 'f'));
    }
    EXPECT_EQ(operations.open(), 0u);
    EXPECT_TRUE(queue.empty());
    if (had_enough) return;
  }
}

/// What a watch tells about `lists`, the last of which finds no memory after `made` allocations, and
/// comes again.
std::vector<std::string> told_of(const std::vector<membership>& lists, std::size_t made,
                                 bool& had_enough) {
  member_watch watch{"self"};
  std::vector<std::string> told;
  const auto pop_all = [&] {
    while (watch.size() != 0) {
      event_member next;
      troupe::testing::starve([&] { next = watch.pop(); }, [] {});
      told.push_back(next.node + " " + std::to_string(next.incarnation) + " " +
                     std::string{to_string(next.state)} + " " + next.reason);
    }
  };
  for (std::size_t i = 0; i + 1 < lists.size(); ++i) {
    watch.see(lists[i]);
    pop_all();
  }
  had_enough = true;
  troupe::testing::allocations.left = made;
  try {
    watch.see(lists.back());
  } catch (const std::bad_alloc&) {
    had_enough = false;
  }
  troupe::testing::allocations.left.reset();
  if (!had_enough) {
    pop_all();
    watch.see(lists.back());
  }
  pop_all();
  return told;
}

TEST(starved_watch, tells_each_change_once_when_a_list_that_found_no_memory_comes_again) {
  const auto shown = [](char name, std::uint64_t life, node_state state) {
    member one;
    one.node.name = std::string(100, name);
    one.node.incarnation = life;
    one.node.labels = {{"zone", std::string(100, 'z')}};
    one.state = static_cast<std::uint8_t>(state);
    one.reason = std::string(100, 'r');
    return one;
  };
  const membership before{"demo",
                          1,
                          1,
                          {shown('b', 1, node_state::up), shown('c', 2, node_state::up),
                           shown('d', 3, node_state::up)}};
  // `a` is new, `b` is another life, `c` is lost, `d` is forgotten.
  const membership after{"demo",
                         1,
                         2,
                         {shown('a', 4, node_state::up), shown('b', 5, node_state::up),
                          shown('c', 2, node_state::down)}};
  bool had_enough = true;
  const auto expected =
      told_of({before, after}, std::numeric_limits<std::size_t>::max(), had_enough);
  EXPECT_EQ(expected.size(), 8u);
  had_enough = false;
  for (std::size_t made = 0; !had_enough; ++made) {
    SCOPED_TRACE(made);
    EXPECT_EQ(told_of({before, after}, made, had_enough), expected);
  }
}

TEST_F(starved_events, that_could_not_be_merged_all_wait) {
  constexpr std::uint32_t layers = 2000;
  const auto id = begin();
  const auto other = begin();
  // No two of them follow each other: a layer's next event comes when all others have had theirs.
  for (std::uint32_t token = 0; token < 32; token += 16) {
    for (std::uint32_t layer = 0; layer < layers; ++layer) {
      const event next{layer % 2 == 0 ? id : other,
                       event_layers{{layer, layer + 1, token, token + 16}}};
      const auto before = queue.size();
      troupe::testing::starve([&] { queue.push(next); }, [&] { EXPECT_EQ(queue.size(), before); });
    }
  }
  std::vector<std::uint32_t> reached(layers);
  for (const auto& e : take_all()) {
    const auto& slice = std::get<event_layers>(e.what).slice;
    for (auto layer = slice.layer_begin; layer < slice.layer_end; ++layer) {
      EXPECT_EQ(reached[layer], slice.token_begin);
      reached[layer] = slice.token_end;
    }
  }
  EXPECT_EQ(reached, std::vector<std::uint32_t>(layers, 32));
}

}  // namespace
}  // namespace troupe::actors
