#include "troupe/kvcache/block_pool.hpp"

#include <algorithm>
#include <deque>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "random_layouts.hpp"
#include "sanitized.hpp"

namespace troupe::kvcache {
namespace {

using std::chrono::milliseconds;
using testing::dice;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

block_pool::time_point at(int ms) {
  return block_pool::time_point{} + milliseconds{ms};
}

std::vector<std::uint32_t> numbers(const std::vector<block_id>& blocks) {
  std::vector<std::uint32_t> values;
  for (const auto b : blocks) values.push_back(b.value);
  return values;
}

TEST(block_pool, prefers_the_smallest_contiguous_run_that_fits) {
  block_pool pool{20};
  const auto a = pool.allocate(4).value();  // 0..3
  const auto b = pool.allocate(2).value();  // 4..5
  const auto c = pool.allocate(3).value();  // 6..8
  const auto d = pool.allocate(2).value();  // 9..10
  ASSERT_TRUE(pool.free(a.owner, a.blocks));
  ASSERT_TRUE(pool.free(c.owner, c.blocks));
  EXPECT_THAT(numbers(pool.allocate(3).value().blocks), ElementsAre(6, 7, 8));
  EXPECT_THAT(numbers(pool.allocate(4).value().blocks), ElementsAre(0, 1, 2, 3));
  EXPECT_EQ(numbers(b.blocks).front(), 4U);
  EXPECT_EQ(numbers(d.blocks).front(), 9U);
}

TEST(block_pool, takes_several_runs_when_none_is_long_enough) {
  block_pool pool{6};
  const auto all = pool.allocate(6).value();
  ASSERT_TRUE(
      pool.free(all.owner, std::vector{block_id{0}, block_id{2}, block_id{3}, block_id{5}}));
  EXPECT_EQ(pool.longest_free_run(), 2U);
  EXPECT_THAT(numbers(pool.allocate(4).value().blocks),
              ::testing::UnorderedElementsAre(0, 2, 3, 5));
}

TEST(block_pool, too_few_blocks_are_exhausted_and_the_sentence_has_the_numbers) {
  block_pool pool{4};
  ASSERT_TRUE(pool.allocate(3));
  const auto refused = pool.allocate(2);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, errc::pool_exhausted);
  EXPECT_THAT(refused.error().message, HasSubstr("2 blocks wanted, 1 of 4 free"));
  EXPECT_EQ(pool.counters().refused, 1U);
  EXPECT_TRUE(pool.allocate(0).value().blocks.empty());
}

TEST(block_pool, a_second_free_is_an_error_and_changes_nothing) {
  block_pool pool{4};
  const auto a = pool.allocate(2).value();
  ASSERT_TRUE(pool.free(a.owner, a.blocks));
  const auto again = pool.free(a.owner, a.blocks);
  ASSERT_FALSE(again);
  EXPECT_EQ(again.error().code, errc::not_found);
  EXPECT_EQ(pool.counters().free, 4U);
  const auto b = pool.allocate(2).value();
  EXPECT_FALSE(pool.free(b.owner, std::vector{b.blocks[0], b.blocks[0]}));
  EXPECT_EQ(pool.counters().allocated, 2U);
  EXPECT_TRUE(pool.free(b.owner, b.blocks));
}

TEST(block_pool, a_stale_owner_cannot_free_pin_or_retain_what_is_now_another_s) {
  block_pool pool{2};
  const auto old = pool.allocate(2).value();
  ASSERT_TRUE(pool.free(old.owner, old.blocks));
  const auto now = pool.allocate(2).value();
  EXPECT_EQ(pool.free(old.owner, old.blocks).error().code, errc::not_found);
  EXPECT_EQ(pool.pin(old.owner, old.blocks).error().code, errc::not_found);
  EXPECT_EQ(pool.unpin(old.owner, old.blocks).error().code, errc::not_found);
  EXPECT_EQ(pool.retain(old.owner, old.blocks).error().code, errc::not_found);
  EXPECT_TRUE(pool.free(now.owner, now.blocks));
}

TEST(block_pool, a_block_that_is_not_in_the_pool_is_out_of_range_and_nothing_is_half_done) {
  block_pool pool{4};
  const auto a = pool.allocate(2).value();
  const auto bad = pool.free(a.owner, std::vector{a.blocks[0], block_id{7}});
  ASSERT_FALSE(bad);
  EXPECT_EQ(bad.error().code, errc::out_of_range);
  EXPECT_EQ(pool.counters().free, 2U);
  EXPECT_FALSE(pool.pin(a.owner, std::vector{a.blocks[0], block_id{7}}));
  EXPECT_EQ(pool.counters().pinned, 0U);
  ASSERT_TRUE(pool.pin(a.owner, a.blocks));
  EXPECT_FALSE(pool.unpin(a.owner, std::vector{a.blocks[0], a.blocks[0]}));
  EXPECT_EQ(pool.counters().pinned, 2U);
}

TEST(block_pool, a_pinned_block_that_is_freed_is_quarantined_until_the_last_unpin) {
  block_pool pool{3};
  const auto a = pool.allocate(3).value();
  ASSERT_TRUE(pool.pin(a.owner, a.blocks));
  ASSERT_TRUE(pool.pin(a.owner, std::vector{a.blocks[0]}));
  const auto freed = pool.free(a.owner, a.blocks).value();
  EXPECT_EQ(freed.quarantined, 3U);
  EXPECT_EQ(freed.freed, 0U);
  EXPECT_EQ(pool.counters().quarantined, 3U);
  EXPECT_EQ(pool.allocate(1).error().code, errc::pool_exhausted);
  EXPECT_THAT(pool.allocate(1).error().message, HasSubstr("3 in quarantine"));
  const auto unpinned = pool.unpin(a.owner, a.blocks).value();
  EXPECT_EQ(unpinned.freed, 2U);
  EXPECT_EQ(unpinned.quarantined, 1U);
  EXPECT_EQ(pool.unpin(a.owner, std::vector{a.blocks[0]}).value().freed, 1U);
  EXPECT_EQ(pool.counters().free, 3U);
  EXPECT_EQ(pool.counters().quarantined, 0U);
  EXPECT_EQ(pool.counters().pinned, 0U);
}

TEST(block_pool, a_quarantined_block_can_be_pinned_for_a_second_reader_but_not_freed_again) {
  block_pool pool{1};
  const auto a = pool.allocate(1).value();
  ASSERT_TRUE(pool.pin(a.owner, a.blocks));
  ASSERT_TRUE(pool.free(a.owner, a.blocks));
  EXPECT_FALSE(pool.free(a.owner, a.blocks));
  EXPECT_FALSE(pool.retain(a.owner, a.blocks));
  ASSERT_TRUE(pool.pin(a.owner, a.blocks));
  EXPECT_EQ(pool.unpin(a.owner, a.blocks).value().quarantined, 1U);
  EXPECT_EQ(pool.unpin(a.owner, a.blocks).value().freed, 1U);
}

TEST(block_pool, a_shared_block_is_free_when_its_last_holder_frees_it) {
  block_pool pool{2};
  const auto a = pool.allocate(2).value();
  ASSERT_TRUE(pool.retain(a.owner, a.blocks));
  EXPECT_EQ(pool.free(a.owner, a.blocks).value().kept, 2U);
  EXPECT_EQ(pool.free(a.owner, a.blocks).value().freed, 2U);
  EXPECT_FALSE(pool.free(a.owner, a.blocks));
}

TEST(block_pool, waiters_are_served_in_order_and_a_small_one_never_overtakes_a_big_one) {
  block_pool pool{4};
  const auto a = pool.allocate(4).value();
  const auto big = pool.wait(3, at(100)).value();
  const auto small = pool.wait(1, at(100)).value();
  ASSERT_TRUE(pool.free(a.owner, std::vector{a.blocks[0], a.blocks[1]}));
  EXPECT_THAT(pool.serve(at(1)), IsEmpty());
  EXPECT_EQ(pool.allocate(1).error().code, errc::pool_exhausted);
  ASSERT_TRUE(pool.free(a.owner, std::vector{a.blocks[2], a.blocks[3]}));
  const auto served = pool.serve(at(2));
  ASSERT_EQ(served.size(), 2U);
  EXPECT_EQ(served[0].waiter, big);
  EXPECT_EQ(served[0].outcome.value().blocks.size(), 3U);
  EXPECT_EQ(served[1].waiter, small);
  EXPECT_EQ(served[1].outcome.value().blocks.size(), 1U);
}

TEST(block_pool, a_waiter_whose_deadline_passes_is_told_and_no_longer_holds_up_those_behind_it) {
  block_pool pool{4};
  const auto a = pool.allocate(3).value();
  const auto big = pool.wait(4, at(10)).value();
  const auto small = pool.wait(1, at(100)).value();
  EXPECT_EQ(pool.next_deadline(), at(10));
  EXPECT_THAT(pool.serve(at(9)), IsEmpty());
  const auto served = pool.serve(at(10));
  ASSERT_EQ(served.size(), 2U);
  EXPECT_EQ(served[0].waiter, big);
  EXPECT_EQ(served[0].outcome.error().code, errc::deadline);
  EXPECT_EQ(served[1].waiter, small);
  EXPECT_TRUE(served[1].outcome);
  EXPECT_EQ(pool.next_deadline(), std::nullopt);
}

TEST(block_pool, a_cancelled_waiter_is_gone_and_cannot_be_cancelled_again) {
  block_pool pool{2};
  const auto a = pool.allocate(2).value();
  const auto first = pool.wait(2, at(100)).value();
  const auto second = pool.wait(1, at(100)).value();
  EXPECT_EQ(pool.counters().waited_blocks, 3U);
  ASSERT_TRUE(pool.cancel(first));
  EXPECT_EQ(pool.cancel(first).error().code, errc::not_found);
  ASSERT_TRUE(pool.free(a.owner, std::vector{a.blocks[0]}));
  const auto served = pool.serve(at(1));
  ASSERT_EQ(served.size(), 1U);
  EXPECT_EQ(served[0].waiter, second);
  EXPECT_EQ(pool.counters().waiters, 0U);
  EXPECT_EQ(pool.counters().waited_blocks, 0U);
}

TEST(block_pool, what_can_never_be_served_and_too_many_waiters_are_refused_at_once) {
  block_pool pool{2, 1};
  EXPECT_EQ(pool.wait(3, at(1)).error().code, errc::pool_exhausted);
  ASSERT_TRUE(pool.wait(1, at(1)));
  EXPECT_EQ(pool.wait(1, at(1)).error().code, errc::overloaded);
}

/// The simplest possible pool: an array that is scanned from one end to the other.
struct naive_pool {
  struct block {
    std::uint64_t owner{0};
    int references{0};
    int pins{0};
  };
  std::vector<block> blocks;

  [[nodiscard]] std::uint32_t free_count() const {
    return static_cast<std::uint32_t>(
        std::count_if(blocks.begin(), blocks.end(),
                      [](const block& b) { return b.references == 0 && b.pins == 0; }));
  }
  [[nodiscard]] std::uint32_t quarantined() const {
    return static_cast<std::uint32_t>(
        std::count_if(blocks.begin(), blocks.end(),
                      [](const block& b) { return b.references == 0 && b.pins > 0; }));
  }
  [[nodiscard]] bool mine(std::uint64_t owner, std::uint32_t id) const {
    return id < blocks.size() && blocks[id].owner == owner &&
           (blocks[id].references > 0 || blocks[id].pins > 0);
  }
  [[nodiscard]] std::uint32_t longest_run() const {
    std::uint32_t best = 0;
    std::uint32_t here = 0;
    for (const auto& b : blocks) {
      here = b.references == 0 && b.pins == 0 ? here + 1 : 0;
      best = std::max(best, here);
    }
    return best;
  }
};

TEST(block_pool, agrees_with_a_naive_model_over_half_a_million_operations) {
  constexpr std::uint32_t size = 48;
  dice d{42};
  block_pool pool{size};
  naive_pool model;
  model.blocks.resize(size);
  std::vector<allocation> known;  // live and stale
  for (int step = 0; step < troupe::testing::tries(500'000); ++step) {
    SCOPED_TRACE(step);
    const auto what = d.roll(0, 9);
    if (what < 3) {
      const auto count = d.roll(0, 12);
      const auto run = model.longest_run();
      const auto got = pool.allocate(count);
      ASSERT_EQ(got.has_value(), count <= model.free_count());
      if (!got) continue;
      ASSERT_EQ(got->blocks.size(), count);
      for (std::size_t i = 0; i < got->blocks.size(); ++i) {
        auto& b = model.blocks.at(got->blocks[i].value);
        ASSERT_TRUE(b.references == 0 && b.pins == 0);
        b = {got->owner.value, 1, 0};
        if (i > 0 && count <= run) {
          ASSERT_EQ(got->blocks[i].value, got->blocks[i - 1].value + 1);
        }
      }
      known.push_back(*got);
      if (known.size() > 24) known.erase(known.begin() + d.roll(0, 23));
      // Blocks forgotten here stay taken for ever, so give such blocks back now and then.
      if (d.one_in(20)) {
        for (std::uint32_t id = 0; id < size; ++id) {
          auto& b = model.blocks[id];
          const std::vector<block_id> one{block_id{id}};
          for (; b.pins > 0 && (b.references > 0 || b.pins > 0); --b.pins) {
            ASSERT_TRUE(pool.unpin(block_owner{b.owner}, one));
          }
          for (; b.references > 0; --b.references) {
            ASSERT_TRUE(pool.free(block_owner{b.owner}, one));
          }
        }
        ASSERT_EQ(pool.counters().free, size);
      }
      continue;
    }
    if (known.empty()) continue;
    const auto& a = known[d.roll<std::size_t>(0, known.size() - 1)];
    std::vector<block_id> some;
    for (const auto id : a.blocks) {
      if (!d.one_in(3)) some.push_back(id);
    }
    if (d.one_in(30)) some.push_back(block_id{d.roll(0, size + 2)});
    const auto every = [&](auto test) {
      auto copy = model.blocks;  // a call that names a block twice must be able to do it twice
      return std::all_of(some.begin(), some.end(), [&](block_id id) {
        return model.mine(a.owner.value, id.value) && test(copy[id.value]);
      });
    };
    switch (what) {
      case 3: {
        const bool legal = every([](auto& b) { return b.references > 0; });
        ASSERT_EQ(pool.retain(a.owner, some).has_value(), legal);
        if (legal)
          for (const auto id : some) ++model.blocks[id.value].references;
        break;
      }
      case 4:
      case 5: {
        const bool legal = every([](auto&) { return true; });
        ASSERT_EQ(pool.pin(a.owner, some).has_value(), legal);
        if (legal)
          for (const auto id : some) ++model.blocks[id.value].pins;
        break;
      }
      case 6:
      case 7: {
        const bool legal = every([](auto& b) { return b.pins-- > 0; });
        ASSERT_EQ(pool.unpin(a.owner, some).has_value(), legal);
        if (legal)
          for (const auto id : some) --model.blocks[id.value].pins;
        break;
      }
      default: {
        const bool legal = every([](auto& b) { return b.references-- > 0; });
        ASSERT_EQ(pool.free(a.owner, some).has_value(), legal);
        if (legal)
          for (const auto id : some) --model.blocks[id.value].references;
        break;
      }
    }
    const auto counters = pool.counters();
    ASSERT_EQ(counters.free, model.free_count());
    ASSERT_EQ(counters.quarantined, model.quarantined());
    ASSERT_EQ(counters.total, counters.free + counters.allocated + counters.quarantined);
    ASSERT_EQ(counters.pinned, std::count_if(model.blocks.begin(), model.blocks.end(),
                                             [](const auto& b) { return b.pins > 0; }));
    ASSERT_EQ(pool.longest_free_run(), model.longest_run());
  }
}

TEST(block_pool, serves_waiters_as_a_plain_queue_would) {
  dice d{7};
  struct entry {
    waiter_id id;
    std::uint32_t count;
    int deadline;
  };
  block_pool pool{32};
  std::deque<entry> queue;
  std::vector<allocation> held;
  int served_count = 0;
  for (int now = 0; now < 100'000; ++now) {
    switch (d.roll(0, 3)) {
      case 0: {
        const auto count = d.roll(1, 16);
        const int deadline = now + d.roll<int>(0, 40);
        queue.push_back({pool.wait(count, at(deadline)).value(), count, deadline});
        break;
      }
      case 1:
        if (!queue.empty() && d.one_in(4)) {
          const auto victim = d.roll<std::size_t>(0, queue.size() - 1);
          ASSERT_TRUE(pool.cancel(queue[victim].id));
          queue.erase(queue.begin() + static_cast<std::ptrdiff_t>(victim));
        }
        break;
      default:
        if (!held.empty()) {
          const auto which = d.roll<std::size_t>(0, held.size() - 1);
          ASSERT_TRUE(pool.free(held[which].owner, held[which].blocks));
          held.erase(held.begin() + static_cast<std::ptrdiff_t>(which));
        }
    }
    auto served = pool.serve(at(now));
    std::size_t next = 0;
    const auto expired = static_cast<std::size_t>(std::count_if(
        queue.begin(), queue.end(), [now](const entry& e) { return e.deadline <= now; }));
    for (; next < expired; ++next) ASSERT_EQ(served.at(next).outcome.error().code, errc::deadline);
    std::erase_if(queue, [now](const entry& e) { return e.deadline <= now; });
    for (; next < served.size(); ++next) {
      ASSERT_EQ(served[next].waiter, queue.front().id);
      ASSERT_EQ(served[next].outcome.value().blocks.size(), queue.front().count);
      held.push_back(*served[next].outcome);
      queue.pop_front();
      ++served_count;
    }
    if (!queue.empty()) {
      ASSERT_GT(queue.front().count, pool.counters().free);
    }
  }
  EXPECT_GT(served_count, troupe::testing::tries(5000));
}

}  // namespace
}  // namespace troupe::kvcache
