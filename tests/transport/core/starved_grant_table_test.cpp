#include <optional>

#include <gtest/gtest.h>

#include "troupe/transport/grant_table.hpp"

#include "starving.hpp"

namespace troupe::transport {
namespace {

TEST(starved_grant_table, has_whole_grants_or_none) {
  region_table regions{1};
  const auto region = regions.allocate(4096, "kv").value();
  grant_table grants{incarnation{1}};
  const transfer_id transfer{1};
  std::optional<result<remote_grant>> given;
  troupe::testing::starve(
      [&] {
        given = grants.give(regions.use(region).value(), std::vector<extent>{{0, 100, 0, 1}},
                            access::read, transfer);
      },
      [&] { EXPECT_EQ(grants.size(), 0U); });
  ASSERT_TRUE(given && *given);
  EXPECT_EQ(grants.revoke(transfer), 1U);
  EXPECT_TRUE(regions.remove(region)) << "nothing uses it any more";
}

}  // namespace
}  // namespace troupe::transport
