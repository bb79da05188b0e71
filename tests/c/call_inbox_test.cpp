#include "troupe/deploy/c/call_inbox.hpp"

#include <chrono>
#include <cstdint>
#include <new>
#include <thread>
#include <vector>

#include <gtest/gtest.h>
#include <poll.h>

#include "starving.hpp"

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

/// Whether there is something to take.
bool is_readable(const call_inbox& inbox) {
  pollfd readable{inbox.descriptor(), POLLIN, 0};
  return ::poll(&readable, 1, 0) == 1;
}

TEST(call_inbox, without_memory_for_a_call_goes_on_with_the_next) {
  const auto inbox = call_inbox::make().value();
  int refused = 0;
  call next;
  const auto made_again = [&] { next = made(clock::time_point::max(), refused); };
  made_again();
  testing::starve([&] { inbox->put(std::move(next)); },
                  [&] {
                    EXPECT_FALSE(is_readable(*inbox));
                    made_again();
                  });
  EXPECT_TRUE(is_readable(*inbox));
  const auto taken = inbox->take(2);
  ASSERT_EQ(taken.size(), 1U);
  EXPECT_TRUE(inbox->reply(taken[0].id, std::vector<std::uint8_t>{}));
}

TEST(call_inbox, loses_no_call_that_could_not_be_taken) {
  const auto inbox = call_inbox::make().value();
  int refused = 0;
  for (int i = 0; i < 5; ++i) inbox->put(made(clock::time_point::max(), refused));
  std::size_t taken = 0;
  testing::starve([&] { taken += inbox->take(5).size(); },
                  [&] { EXPECT_TRUE(is_readable(*inbox)); });
  EXPECT_EQ(taken, 5U);
}

TEST(call_inbox, keeps_a_call_open_whose_answer_found_no_memory) {
  const auto inbox = call_inbox::make().value();
  int answered = 0;
  bool starves = true;
  inbox->put(
      {"method", {}, clock::time_point::max(), [&](result<std::vector<std::uint8_t>> answer) {
         if (starves) throw std::bad_alloc{};
         if (answer && answer->size() == 3) ++answered;
       }});
  const auto id = inbox->take(1).at(0).id;
  EXPECT_THROW((void)inbox->reply(id, std::vector<std::uint8_t>(3)), std::bad_alloc);
  EXPECT_EQ(answered, 0);
  starves = false;
  EXPECT_TRUE(inbox->reply(id, std::vector<std::uint8_t>(3)));
  EXPECT_EQ(answered, 1);
  EXPECT_EQ(inbox->reply(id, std::vector<std::uint8_t>(3)).error().code, errc::not_found);
}

}  // namespace

}  // namespace troupe::c
