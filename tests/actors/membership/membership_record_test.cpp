// The text of the state that survives a supervisor: it is read back exactly, and never misread.

#include "troupe/actors/membership/membership_record.hpp"

#include <array>
#include <cstdio>
#include <random>

#define XXH_INLINE_ALL
#include <gmock/gmock.h>
#include <xxhash.h>

namespace troupe::actors {
namespace {

using ::testing::HasSubstr;

membership_record three_nodes() {
  membership_record r{"demo", 0xFFFF'FFFF'FFFF'FFF0u, {}};
  r.nodes.push_back(
      {"prefill-0", node_state::up, 0xFFFF'FFFF'FFFF'FFFFu, "127.0.0.1", 65535, 77, {}});
  r.nodes.push_back({"decode-0", node_state::down, 1, "::1", 1, 0xFFFF'FFFFu, {5, 6, 7}, 31});
  r.nodes.push_back({"decode-1", node_state::joining, 2, "a \"host\"\\\n", 9, 1, {8}});
  return r;
}

TEST(a_record, is_read_back_as_it_was_written) {
  for (const auto& record : {three_nodes(), membership_record{"demo", 0, {}}}) {
    const auto read = parse_record(to_text(record));
    ASSERT_TRUE(read) << read.error().message;
    EXPECT_EQ(*read, record);
  }
}

TEST(a_record, of_a_release_that_did_not_keep_when_a_life_was_taken_in_is_read_all_the_same) {
  const std::string body =
      R"({"cluster":"demo","epoch_limit":9,"nodes":[{"former":[],"host":"::1","incarnation":5,)"
      R"("name":"decode-0","pid":1,"port":2,"state":1}]})";
  std::array<char, 17> sum{};
  std::snprintf(sum.data(), sum.size(), "%016llx",
                static_cast<unsigned long long>(XXH3_64bits(body.data(), body.size())));
  const auto read = parse_record(std::string{"troupe-membership 1 "} + sum.data() + "\n" + body);
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(read->nodes.at(0).incarnation, 5u);
  EXPECT_EQ(read->nodes.at(0).registered, 0u);
}

TEST(a_record, whose_host_is_no_utf8_is_written_all_the_same) {
  auto record = three_nodes();
  record.nodes[0].host = "\xff\xfe";
  const auto read = parse_record(to_text(record));
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(read->nodes[0].incarnation, record.nodes[0].incarnation);
}

TEST(a_record, that_is_cut_anywhere_or_has_any_byte_changed_is_refused) {
  const auto whole = to_text(three_nodes());
  for (std::size_t at = 0; at < whole.size(); ++at) {
    EXPECT_FALSE(parse_record(whole.substr(0, at))) << "cut at " << at;
    auto changed = whole;
    changed[at] = static_cast<char>(changed[at] ^ 1);
    EXPECT_FALSE(parse_record(changed)) << "changed at " << at;
  }
  EXPECT_FALSE(parse_record(whole + " "));
}

TEST(a_record, of_a_later_format_is_named_as_that) {
  const auto read = parse_record("troupe-membership 2 0000000000000000\n{}");
  ASSERT_FALSE(read);
  EXPECT_EQ(read.error().code, errc::version_mismatch);
  EXPECT_THAT(read.error().message, HasSubstr("format 2"));
}

TEST(a_record, is_not_taken_from_something_else) {
  for (const auto* text :
       {"", "\n", "{}", "troupe-membership", "troupe-membership \n", "troupe-membership 0 \n",
        "troupe-membership -1 x\n{}", "troupe-membership 99999999999999999999 x\n{}"}) {
    EXPECT_FALSE(parse_record(text)) << text;
  }
  std::mt19937 random{7};
  for (int i = 0; i < 2000; ++i) {
    std::string text = "troupe-membership 1 ";
    for (int n = 0; n < 40; ++n) text += static_cast<char>(random());
    EXPECT_FALSE(parse_record(text));
  }
}

}  // namespace
}  // namespace troupe::actors
