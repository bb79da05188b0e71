#include "troupe/config/units.hpp"

#include <chrono>
#include <random>

#include <gtest/gtest.h>

#include "troupe/config/automatic_host.hpp"
#include "troupe/config/hosts.hpp"

namespace troupe::config {
namespace {

using std::chrono::milliseconds;

TEST(units, a_duration_is_a_whole_number_and_a_unit) {
  EXPECT_EQ(parse_duration("100ms"), milliseconds{100});
  EXPECT_EQ(parse_duration("1s"), milliseconds{1000});
  EXPECT_EQ(parse_duration("5 min"), milliseconds{300'000});
  EXPECT_EQ(parse_duration("2h"), milliseconds{7'200'000});
  EXPECT_EQ(parse_duration("0s"), milliseconds{0});
}

TEST(units, what_is_no_duration_is_refused) {
  for (const auto* text :
       {"", "1", "s", "1.5s", "-1s", "+1s", " 1s", "1s ", "1  s", "1m", "1S", "1us", "0x10s",
        "1e3s", "9999999999h", "18446744073709551616ms", "1sec"}) {
    EXPECT_FALSE(parse_duration(text)) << "'" << text << "'";
  }
}

TEST(units, a_size_is_binary_or_decimal_by_its_unit) {
  EXPECT_EQ(parse_size("512B"), 512U);
  EXPECT_EQ(parse_size("64KiB"), 65'536U);
  EXPECT_EQ(parse_size("64KB"), 64'000U);
  EXPECT_EQ(parse_size("1 GiB"), std::uint64_t{1} << 30U);
  EXPECT_EQ(parse_size("2TB"), 2'000'000'000'000U);
  EXPECT_EQ(parse_size("1048576TiB"), max_size);
}

TEST(units, what_is_no_size_is_refused) {
  for (const auto* text : {"", "1", "GiB", "1G", "1K", "1.5GiB", "-1B", "1gib", "1GIB", "1 GiB ",
                           "1048577TiB", "18446744073709551615TiB", "12 parsecs", "0x1B"}) {
    EXPECT_FALSE(parse_size(text)) << "'" << text << "'";
  }
}

TEST(units, what_is_formatted_is_parsed_to_the_same_value) {
  std::mt19937_64 random{7};
  for (int i = 0; i < 10'000; ++i) {
    const std::uint64_t bytes = (random() >> (random() % 64U)) % (max_size + 1);
    ASSERT_EQ(parse_size(format_size(bytes)), bytes) << format_size(bytes);
    const milliseconds time{static_cast<std::int64_t>(random() % 100'000'000U)};
    ASSERT_EQ(parse_duration(format_duration(time)), time) << format_duration(time);
  }
  EXPECT_EQ(format_size(std::uint64_t{3} << 30U), "3GiB");
  EXPECT_EQ(format_size(1000), "1000B");
  EXPECT_EQ(format_duration(milliseconds{1500}), "1500ms");
  EXPECT_EQ(format_duration(milliseconds{60'000}), "1min");
  EXPECT_EQ(format_duration(milliseconds{0}), "0ms");
}

TEST(hosts, addresses_and_names_are_told_from_what_is_neither) {
  for (const auto* text :
       {"127.0.0.1", "10.1.2.3", "::1", "fe80::1", "localhost", "a", "node-7.example.org"}) {
    EXPECT_TRUE(is_host(text)) << text;
  }
  for (const auto* text : {"", "127.0.0.256", "1.2.3", "[::1]", "host:80", "a..b", "-a", "a-",
                           "a b", "a_b", "tcp://a", "::g", "a/b"}) {
    EXPECT_FALSE(is_host(text)) << "'" << text << "'";
  }
  EXPECT_FALSE(is_host(std::string(64, 'a')));
  EXPECT_FALSE(is_host(std::string{"a\0b", 3}));
}

TEST(hosts, loopback_is_what_no_other_machine_can_reach) {
  for (const auto* text :
       {"127.0.0.1", "127.8.9.10", "::1", "0:0:0:0:0:0:0:1", "localhost", "LocalHost"}) {
    EXPECT_TRUE(is_loopback(text)) << text;
  }
  for (const auto* text :
       {"128.0.0.1", "10.0.0.1", "::", "0.0.0.0", "::2", "localhost.example.org"}) {
    EXPECT_FALSE(is_loopback(text)) << text;
  }
}

TEST(hosts, auto_is_no_address_and_nothing_else_is_auto) {
  EXPECT_TRUE(is_automatic("auto"));
  for (const auto* other : {"", "Auto", "automatic", "127.0.0.1"})
    EXPECT_FALSE(is_automatic(other));
  EXPECT_FALSE(is_loopback("auto"));
}

TEST(hosts, one_address_has_one_spelling) {
  EXPECT_EQ(canonical_host("localhost"), "127.0.0.1");
  EXPECT_EQ(canonical_host("0:0:0:0:0:0:0:1"), "::1");
  EXPECT_EQ(canonical_host("Node-A"), "node-a");
  EXPECT_NE(canonical_host("127.0.0.1"), canonical_host("127.0.0.2"));
}

TEST(hosts, this_machine_has_its_loopback_address) {
  EXPECT_TRUE(this_host().contains("127.0.0.1"));
}

}  // namespace
}  // namespace troupe::config
