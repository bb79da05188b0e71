#include "troupe/transport/grant_table.hpp"

#include <atomic>
#include <set>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

namespace troupe::transport {

namespace {

struct tables {
  region_table regions{4};
  region_id region = regions.allocate(10'000, "kv").value();
  grant_table grants{incarnation{1}};
  result<remote_grant> give(std::vector<extent> extents, transfer_id transfer = transfer_id{1},
                            access rights = access::write) {
    return grants.give(regions.use(region).value(), std::move(extents), rights, transfer);
  }
};

TEST(grant_table_test, what_is_given_names_region_owner_and_sorted_extents) {
  tables t;
  const auto given = t.give({{500, 10, 0, 1}, {0, 100, 0, 1}});
  ASSERT_TRUE(given);
  EXPECT_EQ(given->region, t.region);
  EXPECT_EQ(given->owner, incarnation{1});
  EXPECT_EQ(given->region_size, 10'000U);
  ASSERT_EQ(given->permitted.extents().size(), 2U);
  EXPECT_EQ(given->permitted.extents()[0].offset, 0U);
}

TEST(grant_table_test, ids_are_not_to_be_guessed_from_each_other) {
  tables t;
  std::set<std::uint64_t> seen;
  std::uint64_t previous = 0;
  for (int i = 0; i < 100; ++i) {
    const auto id = t.give({{0, 1, 0, 1}})->id;
    EXPECT_TRUE(seen.insert(id).second);
    EXPECT_GT(id > previous ? id - previous : previous - id, 1'000'000U);
    previous = id;
  }
}

TEST(grant_table_test, the_check_covers_rights_transfer_and_every_byte) {
  tables t;
  const auto id = t.give({{100, 100, 0, 1}, {1000, 10, 100, 20}})->id;
  const auto grant = t.grants.find(id);
  ASSERT_TRUE(grant);
  const auto code = [&](extent range, access wanted = access::write,
                        transfer_id transfer = transfer_id{1}) {
    auto ok = grant->check_use(wanted, transfer);
    if (ok) ok = grant->check_place(range);
    return ok ? errc{} : ok.error().code;
  };
  EXPECT_EQ(code({100, 100, 0, 1}), errc{});
  EXPECT_EQ(code({1000, 10, 100, 20}), errc{});
  EXPECT_EQ(code({100, 100, 0, 1}, access::read), errc::unauthorized);
  EXPECT_EQ(code({100, 100, 0, 1}, access::write, transfer_id{2}), errc::unauthorized);
  EXPECT_EQ(code({99, 2, 0, 1}), errc::out_of_range);
  EXPECT_EQ(code({199, 2, 0, 1}), errc::out_of_range);
  EXPECT_EQ(code({1000, 11, 100, 20}), errc::out_of_range);
  EXPECT_EQ(code({1000, 10, 100, 21}), errc::out_of_range);
  EXPECT_EQ(code({UINT64_MAX, 2, 0, 1}), errc::out_of_range);
}

TEST(grant_table_test, revoking_one_transfer_ends_its_grants_and_frees_the_region) {
  tables t;
  const auto a = t.give({{0, 1, 0, 1}}, transfer_id{1})->id;
  const auto b = t.give({{0, 1, 0, 1}}, transfer_id{2})->id;
  const auto held = t.grants.find(a);
  EXPECT_EQ(t.grants.revoke(transfer_id{1}), 1U);
  EXPECT_EQ(t.grants.revoke(transfer_id{1}), 0U);
  EXPECT_FALSE(t.grants.find(a));
  EXPECT_FALSE(held->guard.pin());
  EXPECT_TRUE(t.grants.find(b));
  EXPECT_FALSE(t.regions.remove(t.region));
  EXPECT_EQ(t.grants.revoke_all(), 1U);
  EXPECT_TRUE(t.regions.remove(t.region));
}

TEST(grant_table_test, a_full_table_is_overloaded) {
  region_table regions{1};
  const auto region = regions.allocate(10, "kv").value();
  grant_table grants{incarnation{1}, 2};
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(
        grants.give(regions.use(region).value(), {{0, 1, 0, 1}}, access::read, transfer_id{1}));
  }
  const auto third =
      grants.give(regions.use(region).value(), {{0, 1, 0, 1}}, access::read, transfer_id{1});
  ASSERT_FALSE(third);
  EXPECT_EQ(third.error().code, errc::overloaded);
}

TEST(revocable_test, after_revoke_nobody_is_inside_a_pin) {
  for (int round = 0; round < 200; ++round) {
    revocable guard;
    std::atomic<int> value{0};
    std::atomic<bool> late{false};
    std::atomic<bool> revoked{false};
    std::vector<std::thread> users;
    for (int i = 0; i < 3; ++i) {
      users.emplace_back([&] {
        while (true) {
          const scoped_pin pin{guard};
          if (!pin) return;
          ++value;
          if (revoked.load()) late = true;
        }
      });
    }
    while (value < 10) std::this_thread::yield();
    EXPECT_TRUE(guard.revoke());
    revoked = true;
    for (auto& user : users) user.join();
    EXPECT_FALSE(late) << "a pin outlived the revocation";
    EXPECT_FALSE(guard.revoke());
  }
}

}  // namespace

}  // namespace troupe::transport
