#include "troupe/config/transfer_mode.hpp"

#include <gtest/gtest.h>

namespace troupe::config {
namespace {

TEST(mode_of_a_transfer, has_one_word_and_no_other_word_is_a_mode) {
  for (const auto mode : {transfer_mode::write, transfer_mode::read}) {
    EXPECT_EQ(transfer_mode_of(to_string(mode)), mode);
    EXPECT_TRUE(is_transfer_mode(static_cast<std::uint8_t>(mode)));
  }
  EXPECT_EQ(transfer_mode_of("Write"), std::nullopt);
  EXPECT_EQ(transfer_mode_of(""), std::nullopt);
  EXPECT_FALSE(is_transfer_mode(0));
  EXPECT_FALSE(is_transfer_mode(3));
}

}  // namespace
}  // namespace troupe::config
