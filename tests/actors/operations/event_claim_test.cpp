// A thread that waits for one operation takes all events of that operation and of no other: every
// event is taken once, whichever thread takes it and whenever a wait is given up.

#include <algorithm>
#include <array>
#include <atomic>
#include <limits>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>

#include <gtest/gtest.h>
#include <poll.h>

#include "troupe/actors/operations/event_queue.hpp"
#include "troupe/actors/operations/operation_outcome.hpp"

namespace troupe::actors {
namespace {

using namespace std::chrono_literals;
using steady = std::chrono::steady_clock;

constexpr auto every_event = std::numeric_limits<std::size_t>::max();

class claims : public ::testing::Test {
 protected:
  operation_table operations{100'000};
  event_queue queue{operations};

  operation_id begin() { return operations.begin({operation_kind::value, {}, 0, false}).value(); }
  void layers(operation_id id, std::uint32_t layer, std::uint32_t end) {
    queue.push({id, event_layers{{layer, layer + 1, end - 16, end}}});
  }
  void conclude(operation_id id, std::uint64_t bytes = 0) {
    EXPECT_TRUE(operations.end(id));
    queue.push({id, event_done{{}, bytes}});
  }
  void unpin(operation_id id) { queue.push_last({id, event_unpinned{}}); }
  [[nodiscard]] bool readable() const {
    pollfd shown{queue.fd(), POLLIN, 0};
    return ::poll(&shown, 1, 0) == 1;
  }
  [[nodiscard]] errc refused(operation_id id) {
    const auto mine = queue.claim_events(id);
    EXPECT_FALSE(mine);
    return mine ? errc::internal : mine.error().code;
  }
};

TEST_F(claims, take_all_of_one_operation_and_leave_the_others_in_their_order) {
  const auto first = begin();
  const auto mine = begin();
  const auto third = begin();
  layers(first, 0, 16);
  layers(mine, 0, 16);
  layers(third, 0, 16);
  conclude(third);
  auto claim = queue.claim_events(mine).value();
  EXPECT_FALSE(claim->is_over());
  EXPECT_FALSE(claim->take());
  conclude(mine, 7);
  EXPECT_FALSE(claim->is_over()) << "its blocks are pinned";
  conclude(first);
  unpin(mine);
  ASSERT_TRUE(claim->is_over());
  const auto told = claim->take();
  ASSERT_TRUE(told && *told);
  ASSERT_EQ((*told)->size(), 3u);
  EXPECT_EQ(outcome_of(**told, nullptr)->bytes, 7u);
  claim = nullptr;
  const auto rest = queue.take(every_event);
  ASSERT_EQ(rest.size(), 4u);
  for (const std::size_t i : {0u, 3u}) EXPECT_EQ(rest[i].operation, first);
  for (const std::size_t i : {1u, 2u}) EXPECT_EQ(rest[i].operation, third);
  EXPECT_EQ(operations.open(), 2u);
  EXPECT_EQ(refused(mine), errc::not_found);
}

TEST_F(claims, hide_events_from_take_and_from_the_descriptor_until_they_are_given_up) {
  const auto mine = begin();
  const auto other = begin();
  layers(mine, 0, 16);
  EXPECT_TRUE(readable());
  {
    const auto claim = queue.claim_events(mine).value();
    EXPECT_FALSE(readable());
    EXPECT_TRUE(queue.empty());
    EXPECT_TRUE(queue.take(every_event).empty());
    layers(mine, 1, 16);
    EXPECT_FALSE(readable());
    conclude(other);
    EXPECT_TRUE(readable());
    EXPECT_EQ(queue.size(), 1u);
    EXPECT_EQ(queue.take(every_event).at(0).operation, other);
    EXPECT_FALSE(readable());
  }
  EXPECT_TRUE(readable());
  EXPECT_EQ(queue.take(every_event).size(), 2u);
  EXPECT_FALSE(readable());
}

TEST_F(claims, are_for_one_thread_and_for_operations_whose_outcome_nobody_took) {
  EXPECT_EQ(refused(operation_id{99}), errc::not_found);
  const auto id = begin();
  {
    const auto claim = queue.claim_events(id).value();
    EXPECT_EQ(refused(id), errc::already_exists);
  }
  layers(id, 0, 16);
  EXPECT_EQ(queue.take(every_event).size(), 1u);
  EXPECT_TRUE(queue.claim_events(id)) << "its outcome is still to come";
  conclude(id);
  EXPECT_EQ(queue.take(every_event).size(), 1u);
  EXPECT_EQ(refused(id), errc::not_found);
  unpin(id);
  EXPECT_EQ(refused(id), errc::not_found);
  EXPECT_EQ(queue.take(every_event).size(), 1u);
  EXPECT_EQ(operations.open(), 0u);
}

TEST_F(claims, are_for_what_has_no_outcome_yet_whatever_else_was_taken) {
  const auto id = begin();
  queue.push({id, event_wanted{"decode-0", 0, 1, 1, 0, 16}});
  layers(id, 0, 16);
  queue.push({id, event_allocated{}});
  EXPECT_EQ(queue.take(every_event).size(), 3U);
  const auto mine = queue.claim_events(id);
  ASSERT_TRUE(mine) << to_string(mine.error());
  conclude(id);
  unpin(id);
  EXPECT_TRUE((*mine)->is_over());
}

TEST_F(claims, of_layers_that_nobody_takes_stay_bounded) {
  const auto mine = begin();
  const auto claim = queue.claim_events(mine).value();
  for (std::uint32_t token = 16; token <= 16 * 10'000; token += 16) {
    for (std::uint32_t layer = 0; layer < 8; ++layer) layers(mine, layer, token);
  }
  EXPECT_TRUE(queue.empty());
  const auto other = begin();
  layers(other, 0, 16);
  EXPECT_EQ(queue.size(), 1u);
  conclude(mine);
  unpin(mine);
  EXPECT_LE((*claim->take())->size(), 1024u + 2 * 8);
}

TEST_F(claims, given_up_give_their_events_back_in_order_before_those_of_others) {
  const auto mine = begin();
  const auto other = begin();
  layers(other, 0, 16);
  layers(mine, 0, 16);
  {
    const auto claim = queue.claim_events(mine).value();
    layers(mine, 1, 16);
    layers(other, 1, 16);
  }
  const auto told = queue.take(every_event);
  ASSERT_EQ(told.size(), 4u);
  for (const std::uint32_t i : {0u, 1u}) {
    EXPECT_EQ(told[i].operation, mine);
    EXPECT_EQ(std::get<event_layers>(told[i].what).slice.layer_begin, i);
    EXPECT_EQ(told[i + 2].operation, other);
    EXPECT_EQ(std::get<event_layers>(told[i + 2].what).slice.layer_begin, i);
  }
}

/// A claim that searched the events of other operations would exceed this test's time limit a
/// thousandfold.
TEST(one_claim, of_very_many_operations_costs_what_waits_of_its_own) {
  constexpr std::uint32_t many = 400'000;
  operation_table operations{many};
  event_queue queue{operations};
  std::vector<operation_id> ids;
  for (std::uint32_t i = 0; i < many; ++i) {
    ids.push_back(operations.begin({operation_kind::value, {}, 0, false}).value());
    ASSERT_TRUE(operations.end(ids.back()));
    queue.push_last({ids.back(), event_done{}});
  }
  std::ranges::reverse(ids);
  for (const auto id : ids) {
    const auto claim = queue.claim_events(id).value();
    ASSERT_EQ((*claim->take())->size(), 1u);
  }
  EXPECT_TRUE(queue.empty());
  EXPECT_EQ(operations.open(), 0u);
}

TEST_F(claims, end_with_the_reason_when_the_queue_closes_and_what_is_there_is_not_lost) {
  const auto mine = begin();
  const auto whole = begin();
  auto claim = queue.claim_events(mine).value();
  conclude(mine);
  conclude(whole);
  unpin(whole);
  std::thread closes{[&] {
    std::this_thread::sleep_for(2ms);
    queue.close({errc::internal, "it crashed"}, {errc::internal, "it crashed and left it pinned"});
    queue.close({errc::aborted, "the node was stopped"}, {errc::aborted, "the node was stopped"});
  }};
  claim->wait_until(steady::now() + 10min);
  closes.join();
  ASSERT_TRUE(claim->is_over());
  const auto told = claim->take();
  ASSERT_TRUE(told);
  ASSERT_FALSE(*told);
  EXPECT_EQ(told->error().message, "it crashed and left it pinned");
  claim = nullptr;
  const auto later = queue.claim_events(whole).value();
  EXPECT_TRUE(later->is_over());
  EXPECT_EQ((*later->take())->size(), 2u);
  EXPECT_EQ(queue.take(every_event).size(), 1u) << "the outcome that nobody could wait for";
}

TEST(outcome_of_events, has_what_each_of_them_said_and_a_failure_gives_blocks_back) {
  cache_pool pool{8};
  auto given = pool.allocate(3).value();
  const operation_id id{1};
  const auto failed = outcome_of(
      {{id, event_allocated{given}}, {id, event_failed{{errc::peer_lost, "gone"}}}}, &pool);
  ASSERT_FALSE(failed);
  EXPECT_EQ(failed.error().code, errc::peer_lost);
  EXPECT_EQ(pool.counters().free, 8u);
  given = pool.allocate(3).value();
  const auto done = outcome_of({{id, event_allocated{given}},
                                {id, event_layers{{0, 1, 0, 16}}},
                                {id, event_done{{std::byte{5}}, 12}},
                                {id, event_unpinned{}}},
                               &pool);
  ASSERT_TRUE(done);
  EXPECT_EQ(done->blocks.blocks, given.blocks);
  EXPECT_EQ(done->aux, std::vector{std::byte{5}});
  EXPECT_EQ(done->bytes, 12u);
  EXPECT_EQ(pool.counters().free, 5u);
  EXPECT_EQ(outcome_of({{id, event_info{9, 3ms}}}, nullptr)->size, 9u);
}

/// The events that several threads received, recorded in any order.
class told_book {
 public:
  void hear(const std::vector<event>& events) {
    const std::lock_guard lock{mutex_};
    std::map<std::uint64_t, bool> ended;
    for (const auto& e : events) {
      auto& of = told_[e.operation.value];
      if (const auto* slice = std::get_if<event_layers>(&e.what)) {
        EXPECT_FALSE(ended[e.operation.value]) << "layers after the outcome";
        of.tokens.emplace_back(slice->slice.token_begin, slice->slice.token_end);
      } else if (std::holds_alternative<event_done>(e.what)) {
        ended[e.operation.value] = true;
        ++of.outcomes;
      } else {
        ++of.unpinned;
      }
    }
  }
  void expect_all_of(operation_id id, std::uint32_t tokens) {
    const std::lock_guard lock{mutex_};
    auto& of = told_[id.value];
    std::ranges::sort(of.tokens);
    std::uint32_t known = 0;
    for (const auto& [begin, end] : of.tokens) {
      EXPECT_EQ(begin, known) << "twice or lost, of " << id.value;
      known = end;
    }
    EXPECT_EQ(known, tokens) << id.value;
    EXPECT_EQ(of.outcomes, 1) << id.value;
    EXPECT_EQ(of.unpinned, 1) << id.value;
  }

 private:
  struct told {
    std::vector<std::pair<std::uint32_t, std::uint32_t>> tokens;
    int outcomes{0}, unpinned{0};
  };
  std::mutex mutex_;
  std::map<std::uint64_t, told> told_;
};

TEST_F(claims, of_many_threads_beside_threads_that_take_leave_every_event_told_once) {
  constexpr std::uint32_t chunks = 5;
  constexpr int per_thread = 300;
  told_book book;
  std::mutex mutex;
  std::vector<operation_id> all;
  std::atomic<int> working{3};
  const auto tell = [&](operation_id id, std::mt19937& random) {
    for (std::uint32_t i = 1; i <= chunks; ++i) {
      layers(id, 0, 16 * i);
      if (random() % 4 == 0) std::this_thread::yield();
    }
    conclude(id);
    if (random() % 4 == 0) std::this_thread::yield();
    unpin(id);
  };
  const auto wait_for = [&](operation_id id, std::mt19937& random) {
    for (;;) {
      auto claim = queue.claim_events(id);
      if (!claim) {
        EXPECT_EQ(claim.error().code, errc::not_found) << "a taker had its outcome";
        return;
      }
      (*claim)->wait_until(steady::now() + std::chrono::microseconds{random() % 50});
      const auto events = (*claim)->take();
      if (!events) continue;
      book.hear(events->value());
      return;
    }
  };
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < 3; ++i) {
    threads.emplace_back([&, i] {
      std::mt19937 random{i};
      for (int k = 0; k < per_thread; ++k) {
        const auto id = begin();
        {
          const std::lock_guard lock{mutex};
          all.push_back(id);
        }
        std::thread teller{[&, seed = random()] {
          std::mt19937 own{static_cast<unsigned>(seed)};
          tell(id, own);
        }};
        wait_for(id, random);
        teller.join();
      }
      --working;
    });
  }
  for (unsigned i = 0; i < 2; ++i) {
    threads.emplace_back([&, i] {
      while (working > 0) book.hear(i == 0 ? queue.take(3) : queue.wait(1ms, 2));
    });
  }
  for (auto& one : threads) one.join();
  book.hear(queue.take(every_event));
  for (const auto id : all) book.expect_all_of(id, 16 * chunks);
  EXPECT_EQ(operations.open(), 0u);
}

TEST_F(claims, of_many_threads_are_each_woken_by_the_end_of_their_own) {
  constexpr std::size_t at_once = 6;
  for (int round = 0; round < 200; ++round) {
    std::array<operation_id, at_once> ids;
    for (auto& id : ids) id = begin();
    std::vector<std::thread> threads;
    std::atomic<int> woken{0};
    for (const auto id : ids) {
      threads.emplace_back([&, id] {
        const auto claim = queue.claim_events(id).value();
        if (id.value % 2 == 0) {
          pollfd shown{claim->fd(), POLLIN, 0};
          while (!claim->is_over()) (void)::poll(&shown, 1, 60'000);
        }
        claim->wait_until(steady::now() + 10min);
        woken += (*claim->take())->size() == 2 ? 1 : 0;
      });
    }
    std::ranges::reverse(ids);
    for (const auto id : ids) {
      conclude(id);
      unpin(id);
    }
    for (auto& one : threads) one.join();
    ASSERT_EQ(woken, static_cast<int>(at_once));
    ASSERT_TRUE(queue.empty());
    ASSERT_FALSE(readable());
  }
}

}  // namespace
}  // namespace troupe::actors
