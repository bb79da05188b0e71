#include "troupe/config/printable.hpp"

#include <gtest/gtest.h>

namespace troupe::config {
namespace {

TEST(printable_text, spells_out_control_characters_of_one_byte_and_of_two) {
  EXPECT_EQ(printable("a\033[2Jb\nc\x7f"), R"(a\x1b[2Jb\x0ac\x7f)");
  EXPECT_EQ(printable(std::string_view{"\0", 1}), R"(\x00)");
  EXPECT_EQ(printable("\xc2\x9b"
                      "1m"),
            R"(\x9b1m)");
}

TEST(printable_text, spells_out_bytes_that_are_no_text) {
  EXPECT_EQ(printable("\x9b"
                      "1m"),
            R"(\x9b1m)")
      << "a terminal may take it for what introduces a sequence";
  EXPECT_EQ(printable("\xff\xfe"), R"(\xff\xfe)");
  EXPECT_EQ(printable("cut \xc3"), R"(cut \xc3)");
  EXPECT_EQ(printable("\xc0\x8a"), R"(\xc0\x8a)") << "a line break, written too long";
}

TEST(printable_text, leaves_text_of_any_language_as_it_is) {
  for (const auto* text : {"", "plain ~", "\xc3\xa4\xc3\xb6", "\xe2\x82\xac", "\xf0\x9f\x8e\xad"})
    EXPECT_EQ(printable(text), text);
}

}  // namespace
}  // namespace troupe::config
