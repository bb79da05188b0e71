#include "troupe/kvcache/store.hpp"

#include <map>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "random_layouts.hpp"

namespace troupe::kvcache {
namespace {

using std::chrono::seconds;
using testing::dice;
using ::testing::HasSubstr;

keyed_store::time_point at(int s) {
  return keyed_store::time_point{} + seconds{s};
}

std::string letter(std::uint32_t number) {
  return std::string(1, static_cast<char>('a' + number));
}

void put(keyed_store& store, std::string_view key, std::uint64_t size, int now = 0,
         std::optional<seconds> ttl = std::nullopt) {
  const auto slot = store.begin_put(key, size, at(now));
  ASSERT_TRUE(slot) << slot.error().message;
  ASSERT_TRUE(store.commit(slot->put, at(now), ttl));
}

TEST(store, a_value_is_found_only_after_it_is_complete) {
  keyed_store store{{.size = 1024}};
  const auto slot = store.begin_put("key", 100, at(0)).value();
  EXPECT_EQ(store.get("key", at(0)).error().code, errc::not_found);
  EXPECT_FALSE(store.query("key", at(0)));
  ASSERT_TRUE(store.commit(slot.put, at(0)));
  const auto view = store.get("key", at(0)).value();
  EXPECT_EQ(view.offset, slot.offset);
  EXPECT_EQ(view.size, 100U);
  EXPECT_EQ(store.query("key", at(0))->views, 1U);
  EXPECT_TRUE(store.release(view.view));
  EXPECT_EQ(store.release(view.view).error().code, errc::not_found);
}

TEST(store, an_aborted_put_leaves_nothing) {
  keyed_store store{{.size = 128}};
  const auto slot = store.begin_put("key", 128, at(0)).value();
  EXPECT_EQ(store.begin_put("key", 1, at(0)).error().code, errc::already_exists);
  ASSERT_TRUE(store.abort(slot.put));
  EXPECT_EQ(store.abort(slot.put).error().code, errc::not_found);
  EXPECT_EQ(store.commit(slot.put, at(0)).error().code, errc::not_found);
  EXPECT_EQ(store.counters().memory.used, 0U);
  put(store, "key", 128);
}

TEST(store, a_removed_value_stays_where_it_is_until_its_last_view_ends) {
  keyed_store store{{.size = 128}};
  put(store, "key", 128);
  const auto one = store.get("key", at(0)).value();
  const auto two = store.get("key", at(0)).value();
  ASSERT_TRUE(store.remove("key", at(0)));
  EXPECT_EQ(store.get("key", at(0)).error().code, errc::not_found);
  EXPECT_EQ(store.remove("key", at(0)).error().code, errc::not_found);
  EXPECT_EQ(store.begin_put("key", 128, at(0)).error().code, errc::pool_exhausted);
  EXPECT_EQ(store.counters().detached, 1U);
  ASSERT_TRUE(store.release(one.view));
  EXPECT_FALSE(store.begin_put("key", 128, at(0)));
  ASSERT_TRUE(store.release(two.view));
  EXPECT_TRUE(store.begin_put("key", 128, at(0)));
}

TEST(store, a_value_past_its_time_is_not_found_but_one_being_read_is_not_reclaimed) {
  keyed_store store{{.size = 128}};
  put(store, "key", 128, 0, seconds{10});
  EXPECT_EQ(store.next_expiry(), at(10));
  const auto view = store.get("key", at(9)).value();
  EXPECT_FALSE(store.get("key", at(10)));
  EXPECT_FALSE(store.query("key", at(10)));
  EXPECT_EQ(store.expire(at(10)), 1U);
  EXPECT_EQ(store.counters().memory.used, 128U);
  EXPECT_FALSE(store.begin_put("other", 128, at(11)));
  ASSERT_TRUE(store.release(view.view));
  EXPECT_EQ(store.counters().memory.used, 0U);
}

TEST(store, the_time_to_live_begins_when_the_value_is_complete) {
  keyed_store store{{.size = 128}};
  const auto slot = store.begin_put("key", 8, at(0)).value();
  EXPECT_FALSE(store.commit(slot.put, at(0), seconds{0}));
  ASSERT_TRUE(store.commit(slot.put, at(100), seconds{10}));
  EXPECT_TRUE(store.query("key", at(109)));
  EXPECT_EQ(store.query("key", at(109))->expires, at(110));
}

TEST(store, an_expired_value_does_not_stand_in_the_way_of_its_key_or_its_room) {
  keyed_store store{{.size = 128}};
  put(store, "key", 128, 0, seconds{1});
  EXPECT_EQ(store.begin_put("key", 1, at(0)).error().code, errc::already_exists);
  put(store, "key", 128, 1, seconds{1});
  put(store, "other", 128, 2);
  EXPECT_EQ(store.counters().expired, 2U);
}

TEST(store, a_full_store_fails_when_told_to_and_keeps_what_it_has) {
  keyed_store store{{.size = 128, .policy = on_full::fail}};
  put(store, "a", 64);
  put(store, "b", 64);
  const auto refused = store.begin_put("c", 64, at(0));
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, errc::pool_exhausted);
  EXPECT_THAT(refused.error().message, HasSubstr("64 bytes"));
  EXPECT_TRUE(store.query("a", at(0)));
}

TEST(store, a_full_store_evicts_the_least_recently_used_that_nobody_reads) {
  keyed_store store{{.size = 192, .policy = on_full::evict}};
  put(store, "a", 64);
  put(store, "b", 64);
  put(store, "c", 64);
  const auto reading = store.get("a", at(0)).value();
  ASSERT_TRUE(store.release(store.get("b", at(0)).value().view));
  put(store, "d", 64);
  EXPECT_TRUE(store.query("a", at(0)));
  EXPECT_TRUE(store.query("b", at(0)));
  EXPECT_FALSE(store.query("c", at(0)));
  put(store, "e", 128);  // evicts b and d, which are adjacent
  EXPECT_TRUE(store.query("a", at(0)));
  EXPECT_FALSE(store.query("b", at(0)));
  EXPECT_EQ(store.counters().evicted, 3U);
  EXPECT_EQ(store.begin_put("f", 192, at(0)).error().code, errc::pool_exhausted);
  EXPECT_TRUE(store.release(reading.view));
}

TEST(store, what_can_never_fit_evicts_nothing) {
  keyed_store store{{.size = 128, .policy = on_full::evict}};
  put(store, "a", 64);
  EXPECT_FALSE(store.begin_put("b", 129, at(0)));
  EXPECT_TRUE(store.query("a", at(0)));
}

TEST(store, keys_have_bounds_and_so_has_their_number) {
  keyed_store store{{.size = 1024, .max_keys = 2}};
  EXPECT_EQ(store.begin_put("", 1, at(0)).error().code, errc::invalid_config);
  EXPECT_EQ(store.begin_put(std::string(513, 'k'), 1, at(0)).error().code, errc::invalid_config);
  put(store, std::string(512, 'k'), 1);
  put(store, "b", 1);
  EXPECT_EQ(store.begin_put("c", 1, at(0)).error().code, errc::overloaded);
  ASSERT_TRUE(store.remove("b", at(0)));
  EXPECT_TRUE(store.begin_put("c", 1, at(0)));
}

TEST(store, an_empty_value_is_a_value) {
  keyed_store store{{.size = 0}};
  put(store, "empty", 0);
  EXPECT_EQ(store.get("empty", at(0)).value().size, 0U);
  EXPECT_FALSE(store.begin_put("full", 1, at(0)));
}

TEST(store, no_two_live_values_ever_share_a_byte_and_none_is_lost) {
  struct live {
    std::uint64_t offset;
    std::uint64_t size;
  };
  for (const auto policy : {on_full::fail, on_full::evict}) {
    dice d{11};
    keyed_store store{{.size = 400, .policy = policy, .alignment = 4}};
    std::map<std::uint64_t, live> puts;
    std::map<std::uint64_t, live> views;
    std::map<std::string, live> stored;  // by key, as last committed
    std::map<std::uint64_t, std::string> put_keys;
    for (int now = 0; now < 60'000; ++now) {
      const std::string key = letter(d.roll(0, 11));
      switch (d.roll(0, 6)) {
        case 0:
        case 1: {
          const auto slot = store.begin_put(key, d.roll<std::uint64_t>(1, 90), at(now));
          if (!slot) break;
          for (const auto& held : {puts, views}) {
            for (const auto& [_, other] : held) {
              ASSERT_TRUE(slot->offset + slot->size <= other.offset ||
                          other.offset + other.size <= slot->offset);
            }
          }
          ASSERT_LE(slot->offset + slot->size, 400U);
          puts[slot->put.value] = {slot->offset, slot->size};
          put_keys[slot->put.value] = key;
          break;
        }
        case 2:
          if (!puts.empty()) {
            const auto [id, where] = *puts.begin();
            if (d.one_in(4)) {
              ASSERT_TRUE(store.abort(put_id{id}));
            } else {
              std::optional<seconds> ttl;
              if (d.one_in(2)) ttl = seconds{d.roll<int>(1, 50)};
              ASSERT_TRUE(store.commit(put_id{id}, at(now), ttl));
              stored[put_keys[id]] = where;
            }
            puts.erase(puts.begin());
          }
          break;
        case 3:
          if (const auto view = store.get(key, at(now))) {
            ASSERT_EQ(view->offset, stored.at(key).offset);
            ASSERT_EQ(view->size, stored.at(key).size);
            views[view->view.value] = {view->offset, view->size};
          }
          break;
        case 4:
          if (!views.empty()) {
            ASSERT_TRUE(store.release(view_id{views.begin()->first}));
            views.erase(views.begin());
          }
          break;
        case 5: static_cast<void>(store.remove(key, at(now))); break;
        default: store.expire(at(now));
      }
      const auto counters = store.counters();
      ASSERT_EQ(counters.in_flight, puts.size());
      ASSERT_EQ(counters.views, views.size());
    }
    for (const auto& [id, _] : puts) ASSERT_TRUE(store.abort(put_id{id}));
    for (const auto& [id, _] : views) ASSERT_TRUE(store.release(view_id{id}));
    for (std::uint32_t k = 0; k < 12; ++k) {
      static_cast<void>(store.remove(letter(k), at(60'000)));
    }
    store.expire(at(1'000'000));
    EXPECT_EQ(store.counters().memory.used, 0U);
    EXPECT_EQ(store.counters().values, 0U);
    EXPECT_EQ(store.counters().detached, 0U);
    EXPECT_EQ(store.counters().memory.gaps, 1U);
    EXPECT_GT(store.counters().hits, 1000U);
    EXPECT_EQ(store.counters().evicted > 0, policy == on_full::evict);
  }
}

}  // namespace
}  // namespace troupe::kvcache
