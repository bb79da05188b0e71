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

TEST(starved_operations, that_could_not_end_go_on_and_end_once) {
  operation_table operations{1};
  const std::string request(100, 'r');
  const auto begun = operations.begin({operation_kind::receive, request, 16, false});
  ASSERT_TRUE(begun);
  bool ended = false;
  troupe::testing::starve([&] { ended = operations.end(*begun, std::nullopt); },
                          [&] { EXPECT_EQ(operations.find(*begun).value().request, request); });
  EXPECT_TRUE(ended);
  EXPECT_FALSE(operations.end(*begun, std::nullopt));
  operations.last_event_taken({*begun});
  EXPECT_TRUE(operations.begin({operation_kind::receive, request, 16, false}));
}

}  // namespace
}  // namespace troupe::actors
