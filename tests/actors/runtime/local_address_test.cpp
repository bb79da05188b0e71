// Which address of this machine leads to another host.

#include "troupe/actors/runtime/local_address.hpp"

#include <gmock/gmock.h>

#include "troupe/config/hosts.hpp"

namespace troupe::actors {
namespace {

using ::testing::HasSubstr;

TEST(address_towards, a_loopback_address_is_one) {
  const auto found = address_towards("127.0.0.1", 7400);
  ASSERT_TRUE(found) << found.error().message;
  EXPECT_EQ(*found, "127.0.0.1");
  const auto named = address_towards("localhost", 0);
  ASSERT_TRUE(named) << named.error().message;
  EXPECT_TRUE(config::is_loopback(*named)) << *named;
}

TEST(address_towards, an_address_of_this_machine_is_that) {
  for (const auto& host : config::this_host()) {
    if (!host.starts_with("10.") && !host.starts_with("172.") && !host.starts_with("192.168."))
      continue;
    const auto found = address_towards(host, 7400);
    ASSERT_TRUE(found) << found.error().message;
    EXPECT_EQ(*found, host);
  }
}

TEST(address_towards, a_host_that_nothing_leads_to_is_an_error_that_says_what_to_do) {
  const auto found = address_towards("no-such-host.invalid", 7400);
  ASSERT_FALSE(found);
  EXPECT_EQ(found.error().code, errc::peer_unreachable);
  EXPECT_THAT(found.error().message, HasSubstr("supervisor's host no-such-host.invalid"));
  EXPECT_THAT(found.error().message, HasSubstr("check supervisor.host"));
}

TEST(address_of, a_host_that_is_named_is_itself_and_auto_is_what_leads_to_the_supervisor) {
  config::supervisor_config supervisor;
  supervisor.host = "127.0.0.1";
  EXPECT_EQ(*address_of("10.9.8.7", supervisor), "10.9.8.7");
  EXPECT_EQ(*address_of("auto", supervisor), "127.0.0.1");
}

}  // namespace
}  // namespace troupe::actors
