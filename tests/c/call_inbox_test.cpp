#include "troupe/deploy/c/call_inbox.hpp"

#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

namespace troupe::c {

namespace {

using namespace std::chrono_literals;
using clock = std::chrono::steady_clock;

/// A call that counts the answers which fail with `how`.
call made(clock::time_point deadline, int& count, errc how = errc::overloaded) {
  return {"method", {}, deadline, [&count, how](result<std::vector<std::uint8_t>> answer) {
            if (!answer && answer.error().code == how) ++count;
          }};
}

TEST(call_inbox, calls_that_nobody_waits_for_any_more_do_not_keep_others_out) {
  const auto inbox = call_inbox::make().value();
  int refused = 0;
  for (std::size_t i = 0; i < call_inbox::max_open; ++i) {
    inbox->put(made(clock::time_point::max(), refused));
  }
  EXPECT_EQ(inbox->take(2).size(), 2U);
  inbox->put(made(clock::time_point::max(), refused));
  EXPECT_EQ(refused, 1) << "all of them are waited for";

  const auto other = call_inbox::make().value();
  const auto deadline = clock::now() + 20ms;
  for (std::size_t i = 0; i < call_inbox::max_open; ++i) other->put(made(deadline, refused));
  (void)other->take(2);  // taken by an engine that never answers
  std::this_thread::sleep_until(deadline);
  other->put(made(clock::time_point::max(), refused));
  EXPECT_EQ(refused, 1);
  const auto left = other->take(call_inbox::max_open);
  ASSERT_EQ(left.size(), 1U) << "nobody waits for the others";
  EXPECT_TRUE(other->reply(left[0].id, std::vector<std::uint8_t>{}));
}

TEST(call_inbox, has_nothing_to_be_taken_where_all_that_waited_is_overdue) {
  const auto inbox = call_inbox::make().value();
  int refused = 0;
  int late = 0;
  inbox->put(made(clock::now() - 1ms, late, errc::deadline));
  EXPECT_TRUE(inbox->take(1).empty());
  EXPECT_EQ(late, 1) << "nobody gave it up";
  inbox->put(made(clock::time_point::max(), refused));
  EXPECT_EQ(inbox->take(1).size(), 1U);
  EXPECT_TRUE(inbox->take(1).empty());
}

}  // namespace

}  // namespace troupe::c
