// Where a door listens, and how strangers' addresses are grouped.
#include "troupe/actors/door/door_sockets.hpp"

#include <array>
#include <optional>

#include "troupe/actors/door/door_resolver.hpp"

#include "door_tls_fixture.hpp"

namespace troupe::actors {
namespace {

using namespace testing;

socket_address address(const std::string& number) {
  const auto all = addresses_of_number(number, 7400);
  EXPECT_TRUE(all) << number;
  return all ? all->front() : socket_address{};
}

TEST(door_sockets, a_host_that_has_a_network_of_ipv6_counts_as_one) {
  const auto one = network_of(address("2001:db8:1:2::1"));
  EXPECT_EQ(one.size(), 8u);
  EXPECT_EQ(network_of(address("2001:db8:1:2:ffff:1234:5678:9abc")), one);
  EXPECT_NE(network_of(address("2001:db8:1:3::1")), one);
  EXPECT_NE(address_bytes(address("2001:db8:1:2::1")), address_bytes(address("2001:db8:1:2::2")));
}

TEST(door_sockets, a_host_of_ipv4_counts_by_its_whole_address_however_that_is_written) {
  const auto one = network_of(address("192.0.2.1"));
  EXPECT_EQ(network_of(address("::ffff:192.0.2.1")), one);
  EXPECT_NE(network_of(address("192.0.2.2")), one);
  EXPECT_NE(network_of(address("::ffff:192.0.2.2")), one);
}

TEST(door_sockets, a_name_that_is_a_loopback_address_is_spoken_of_and_what_says_so_is_not) {
  const auto said = loopback_notice("node-a", address("127.0.1.1"));
  EXPECT_EQ(said,
            "`node-a` is a loopback address on this machine (see /etc/hosts), so no other machine "
            "reaches this port; mend /etc/hosts or write the address");
  EXPECT_EQ(loopback_notice("node-a", address("::1")).substr(0, 8), "`node-a`");
  EXPECT_EQ(loopback_notice("node-a", address("192.0.2.1")), "");
  for (const auto* plain : {"", "127.0.0.1", "127.0.1.1", "::1", "localhost", "LocalHost",
                            "localhost.localdomain", "ip6-localhost"}) {
    EXPECT_EQ(loopback_notice(plain, address("127.0.0.1")), "") << plain;
  }
}

/// A name of this machine that resolves to a loopback address there.
std::optional<std::string> loopback_name() {
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0) return {};
  const auto all = addresses_of(name.data(), 0);
  if (!all || loopback_notice(name.data(), all->front()).empty()) return {};
  return name.data();
}

TEST(door_sockets, in_mode_tls_a_door_says_once_that_nobody_reaches_such_a_name) {
  const auto name = loopback_name();
  if (!name) GTEST_SKIP() << "this machine's name is no loopback address";
  const auto authority = make_authority("test", lasting(24h * 365));
  ASSERT_TRUE(authority);
  const node_files files{*authority, node_of(*authority, "test", 24h * 30)};
  listening_door at{files.options()};
  EXPECT_TRUE(at.notices().empty()) << "it listens at a number";
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(at.it->listen(*name, 0, [](door_socket) {}));
  ASSERT_EQ(at.notices().size(), 1u);
  EXPECT_NE(at.notices().front().find("`" + *name + "` is a loopback address"), std::string::npos);
}

}  // namespace
}  // namespace troupe::actors
