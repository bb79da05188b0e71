#include <optional>
#include <string>

#include <gtest/gtest.h>

#include "troupe/kvcache/store.hpp"

#include "starving.hpp"

// A store whose allocations fail: each call does its work completely or not at all.

namespace troupe::kvcache {
namespace {

using troupe::testing::allocations;
using troupe::testing::starve;

constexpr std::uint64_t whole = 1024;

keyed_store::time_point now() {
  return {};
}

TEST(starved_store, a_view_ends_without_memory) {
  keyed_store store{{.size = whole, .policy = on_full::evict}};
  const auto slot = store.begin_put("key", whole, now()).value();
  ASSERT_TRUE(store.commit(slot.put, now()));
  const auto first = store.get("key", now()).value();
  const auto second = store.get("key", now()).value();
  allocations.left = 0;
  const bool ended = store.release(first.view) && store.release(second.view);
  allocations.left.reset();
  EXPECT_TRUE(ended);
  EXPECT_EQ(store.counters().views, 0U);
  // The value has no reader any more, so it makes room.
  EXPECT_TRUE(store.begin_put("other", whole, now()));
  EXPECT_EQ(store.counters().evicted, 1U);
}

TEST(starved_store, a_put_that_finds_no_memory_leaves_nothing_behind) {
  keyed_store store{{.size = whole}};
  const std::string key(100, 'k');
  std::optional<put_slot> slot;
  starve([&] { slot = store.begin_put(key, whole, now()).value(); },
         [&] {
           EXPECT_EQ(store.counters().in_flight, 0U);
           EXPECT_EQ(store.counters().memory.used, 0U);
         });
  ASSERT_TRUE(slot);
  starve([&] { (void)store.commit(slot->put, now(), std::chrono::seconds{1}); },
         [&] { EXPECT_EQ(store.counters().in_flight, 1U); });
  EXPECT_TRUE(store.query(key, now()));
}

TEST(starved_store, a_get_that_finds_no_memory_pins_nothing) {
  keyed_store store{{.size = whole}};
  const auto slot = store.begin_put("key", whole, now()).value();
  ASSERT_TRUE(store.commit(slot.put, now()));
  std::optional<pinned_view> view;
  starve([&] { view = store.get("key", now()).value(); },
         [&] { EXPECT_EQ(store.query("key", now())->views, 0U); });
  ASSERT_TRUE(view);
  EXPECT_TRUE(store.release(view->view));
}

}  // namespace
}  // namespace troupe::kvcache
