#include <optional>

#include <gtest/gtest.h>

#include "troupe/actors/operations/operation_table.hpp"

#include "starving.hpp"

namespace troupe::actors {
namespace {

TEST(starved_operations, that_could_not_begin_can_begin_again) {
  operation_table operations{1};
  std::optional<result<operation_id>> begun;
  troupe::testing::starve(
      [&] {
        begun = operations.begin({operation_kind::send, std::string(100, 'r'), 16, false});
      },
      [] {});
  ASSERT_TRUE(begun);
  EXPECT_TRUE(*begun) << to_string(begun->error());
}

}  // namespace
}  // namespace troupe::actors
