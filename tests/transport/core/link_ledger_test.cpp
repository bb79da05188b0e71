#include "troupe/transport/link_ledger.hpp"

#include <gtest/gtest.h>

namespace troupe::transport {

TEST(link_ledger_test, a_fenced_transfer_gets_no_batch_in_but_others_do) {
  link_ledger ledger{10};
  ledger.fence(transfer_id{1});
  const auto refused = ledger.admit(transfer_id{1});
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, errc::grant_revoked);
  EXPECT_TRUE(ledger.admit(transfer_id{2}));
  EXPECT_EQ(ledger.in_flight(), 1U);
}

TEST(link_ledger_test, no_more_batches_than_the_limit_are_in_flight) {
  link_ledger ledger{2};
  EXPECT_TRUE(ledger.admit(transfer_id{1}));
  EXPECT_TRUE(ledger.admit(transfer_id{1}));
  const auto refused = ledger.admit(transfer_id{1});
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, errc::overloaded);
  ledger.ended(false);
  EXPECT_TRUE(ledger.admit(transfer_id{1}));
  ledger.ended(true);
  const auto now = ledger.stats();
  EXPECT_EQ(now.batches_posted, 3U);
  EXPECT_EQ(now.batches_failed, 1U);
  EXPECT_EQ(now.batches_completed, 1U);
  EXPECT_EQ(now.in_flight, 1U);
}

TEST(link_ledger_test, the_latest_fences_are_remembered_and_the_memory_of_them_is_bounded) {
  link_ledger ledger{10};
  for (std::uint64_t i = 0; i <= recent_transfers::capacity; ++i) {
    ledger.fence(transfer_id{i});
    ledger.fence(transfer_id{i});
  }
  EXPECT_TRUE(ledger.admit(transfer_id{0}));
  EXPECT_FALSE(ledger.admit(transfer_id{1}));
  EXPECT_FALSE(ledger.admit(transfer_id{recent_transfers::capacity}));
}

}  // namespace troupe::transport
