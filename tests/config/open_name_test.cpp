#include "troupe/config/open_name.hpp"

#include <cstdint>
#include <limits>
#include <string>

#include <gtest/gtest.h>

namespace troupe::config {
namespace {

TEST(open_name, says_the_place_that_it_was_made_of) {
  const std::string longest_stage(32, 's');
  const std::string longest_replica(64, 'r');
  for (const open_place& place :
       {open_place{"engines", "a", 0}, open_place{"e-1_x", "0b9c-4f_2", 7},
        open_place{"0", "9", 4095}, open_place{longest_stage, longest_replica, 12},
        open_place{"e", "tp1", std::numeric_limits<std::uint32_t>::max()}}) {
    const auto name = open_node_name(place);
    EXPECT_EQ(open_place_of(name), place) << name;
  }
  EXPECT_EQ(open_node_name({"engines", "a", 0}), "engines.a.0");
}

TEST(open_name, is_none_that_a_file_gives) {
  for (const auto* name : {"supervisor", "decode-0", "decode-0-tp1", "e", ""})
    EXPECT_FALSE(open_place_of(name)) << name;
}

TEST(open_name, has_one_rank_in_one_spelling) {
  EXPECT_TRUE(open_place_of("e.a.7"));
  for (const auto* rank : {"007", "00", "+1", "-1", " 1", "1 ", "1x", "x", "0x1", "1e3", "1_0",
                           "4294967296", "18446744073709551616", "99999999999999999999999"})
    EXPECT_FALSE(open_place_of(std::string{"e.a."} + rank)) << rank;
}

TEST(open_name, lacks_no_part_and_has_none_too_many) {
  for (const auto* name : {".", "..", "...", "e", "e.a", "e.a.", "e..0", ".a.0", "..0", "e.0",
                           "e.a.b.0", "e.a..0", ".e.a.0", "e.a.0.", "e.a.0.0"})
    EXPECT_FALSE(open_place_of(name)) << name;
}

TEST(open_name, keeps_the_rules_of_its_parts) {
  for (const auto* name : {"E.a.0", "e.A.0", "-e.a.0", "e.-a.0", "_e.a.0", "e._a.0", "e/f.a.0",
                           "e.a b.0", "e.a:b.0", "e.\xc3\xa4.0", "e.a\n.0"})
    EXPECT_FALSE(open_place_of(name)) << name;
  EXPECT_FALSE(open_place_of(std::string(33, 's') + ".a.0"));
  EXPECT_FALSE(open_place_of("e." + std::string(65, 'r') + ".0"));
  EXPECT_FALSE(open_place_of(std::string{"e.a\0.0", 6}));
}

}  // namespace
}  // namespace troupe::config
