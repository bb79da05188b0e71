#include "troupe/kvcache/lease.hpp"

#include <map>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "random_layouts.hpp"

namespace troupe::kvcache {
namespace {

using std::chrono::seconds;
using testing::dice;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

lease_table::time_point at(int s) {
  return lease_table::time_point{} + seconds{s};
}
constexpr incarnation alice{1};
constexpr incarnation bob{2};

TEST(lease, is_over_at_its_end_whether_collected_or_not) {
  lease_table table;
  ASSERT_TRUE(table.grant(lease_id{1}, alice, at(0), seconds{10}));
  EXPECT_THAT(table.expire(at(9)), IsEmpty());
  EXPECT_EQ(table.renew(lease_id{1}, alice, at(10), seconds{10}).error().code, errc::lease_expired);
  EXPECT_EQ(table.renew_all(alice, at(10), seconds{10}), 0U);
  EXPECT_THAT(table.expire(at(10)), ElementsAre(lease_id{1}));
  EXPECT_EQ(table.renew(lease_id{1}, alice, at(10), seconds{10}).error().code, errc::not_found);
  EXPECT_EQ(table.size(), 0U);
}

TEST(lease, a_renewal_never_shortens_it) {
  lease_table table;
  ASSERT_TRUE(table.grant(lease_id{1}, alice, at(0), seconds{100}));
  EXPECT_EQ(table.renew(lease_id{1}, alice, at(5), seconds{1}).value(), at(100));
  EXPECT_EQ(table.next_end(), at(100));
  EXPECT_EQ(table.renew(lease_id{1}, alice, at(50), seconds{100}).value(), at(150));
  EXPECT_THAT(table.expire(at(149)), IsEmpty());
}

TEST(lease, heartbeats_keep_all_of_a_live_holder_s_leases_however_long_it_queues) {
  lease_table table;
  ASSERT_TRUE(table.grant(lease_id{1}, alice, at(0), seconds{10}));
  ASSERT_TRUE(table.grant(lease_id{2}, alice, at(0), seconds{10}));
  ASSERT_TRUE(table.grant(lease_id{3}, bob, at(0), seconds{10}));
  for (int now = 5; now <= 1000; now += 5) {
    EXPECT_EQ(table.renew_all(alice, at(now), seconds{10}), 2U);
    if (now == 10) {
      EXPECT_THAT(table.expire(at(now)), ElementsAre(lease_id{3}));
    } else {
      EXPECT_THAT(table.expire(at(now)), IsEmpty());
    }
  }
}

TEST(lease, another_life_can_neither_renew_nor_end_it) {
  lease_table table;
  ASSERT_TRUE(table.grant(lease_id{1}, alice, at(0), seconds{10}));
  EXPECT_EQ(table.renew(lease_id{1}, bob, at(1), seconds{10}).error().code,
            errc::stale_incarnation);
  EXPECT_EQ(table.end(lease_id{1}, bob).error().code, errc::stale_incarnation);
  EXPECT_EQ(table.holder_of(lease_id{1}), alice);
  ASSERT_TRUE(table.end(lease_id{1}, alice));
  EXPECT_EQ(table.end(lease_id{1}, alice).error().code, errc::not_found);
}

TEST(lease, death_ends_all_that_the_holder_has_and_nothing_else) {
  lease_table table;
  ASSERT_TRUE(table.grant(lease_id{2}, alice, at(0), seconds{10}));
  ASSERT_TRUE(table.grant(lease_id{1}, alice, at(0), seconds{20}));
  ASSERT_TRUE(table.grant(lease_id{3}, bob, at(0), seconds{10}));
  EXPECT_THAT(table.end_holder(alice), ElementsAre(lease_id{1}, lease_id{2}));
  EXPECT_THAT(table.end_holder(alice), IsEmpty());
  EXPECT_THAT(table.expire(at(100)), ElementsAre(lease_id{3}));
}

TEST(lease, cannot_be_granted_twice_nor_to_nobody_nor_for_no_time) {
  lease_table table;
  ASSERT_TRUE(table.grant(lease_id{1}, alice, at(0), seconds{10}));
  EXPECT_EQ(table.grant(lease_id{1}, bob, at(0), seconds{10}).error().code, errc::already_exists);
  EXPECT_EQ(table.grant(lease_id{2}, incarnation{}, at(0), seconds{1}).error().code,
            errc::invalid_config);
  EXPECT_EQ(table.grant(lease_id{2}, alice, at(0), seconds{0}).error().code, errc::invalid_config);
}

TEST(lease, a_length_past_the_end_of_time_ends_there) {
  lease_table table;
  ASSERT_TRUE(table.grant(lease_id{1}, alice, at(100), lease_table::duration::max()));
  EXPECT_EQ(table.next_end(), lease_table::time_point::max());
}

TEST(lease, agrees_with_a_plain_map) {
  dice d{3};
  lease_table table;
  std::map<std::uint64_t, std::pair<std::uint64_t, int>> model;  // id -> holder, end
  for (int now = 0; now < 60'000; ++now) {
    const auto id = d.roll<std::uint64_t>(1, 30);
    const auto holder = d.roll<std::uint64_t>(1, 4);
    const int length = d.roll<int>(1, 60);
    const auto found = model.find(id);
    switch (d.roll(0, 4)) {
      case 0:
        ASSERT_EQ(
            table.grant(lease_id{id}, incarnation{holder}, at(now), seconds{length}).has_value(),
            found == model.end());
        model.try_emplace(id, holder, now + length);
        break;
      case 1: {
        const bool legal =
            found != model.end() && found->second.first == holder && found->second.second > now;
        ASSERT_EQ(
            table.renew(lease_id{id}, incarnation{holder}, at(now), seconds{length}).has_value(),
            legal);
        if (legal) found->second.second = std::max(found->second.second, now + length);
        break;
      }
      case 2:
        table.renew_all(incarnation{holder}, at(now), seconds{length});
        for (auto& [_, held] : model) {
          if (held.first == holder && held.second > now) {
            held.second = std::max(held.second, now + length);
          }
        }
        break;
      case 3:
        if (d.one_in(10)) {
          std::vector<lease_id> expected;
          for (const auto& [key, held] : model) {
            if (held.first == holder) expected.push_back(lease_id{key});
          }
          ASSERT_EQ(table.end_holder(incarnation{holder}), expected);
          std::erase_if(model, [&](const auto& entry) { return entry.second.first == holder; });
        }
        break;
      default: {
        const auto over = table.expire(at(now));
        for (const auto gone : over) {
          ASSERT_LE(model.at(gone.value).second, now);
          model.erase(gone.value);
        }
        for (const auto& [_, held] : model) ASSERT_GT(held.second, now);
      }
    }
    ASSERT_EQ(table.size(), model.size());
  }
}

}  // namespace
}  // namespace troupe::kvcache
