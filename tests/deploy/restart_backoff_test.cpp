#include "troupe/deploy/cli/restart_backoff.hpp"

#include <chrono>
#include <optional>
#include <vector>

#include <gtest/gtest.h>

namespace {

using namespace std::chrono_literals;
using troupe::actors::restart_intensity;
using troupe::deploy::cli::restart_backoff;
using delay = std::optional<std::chrono::milliseconds>;

const restart_intensity::clock::time_point begin{1h};

TEST(restart_intensity, allows_so_many_ends_within_the_time_and_not_one_more) {
  restart_intensity limit{3, 10s};
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(limit.allows(begin + i * 1s)) << i;
  EXPECT_FALSE(limit.allows(begin + 9s));
  EXPECT_EQ(limit.ends(), 4u);
}

TEST(restart_intensity, forgets_what_is_longer_ago) {
  restart_intensity limit{3, 10s};
  for (int i = 0; i < 100; ++i) {
    ASSERT_TRUE(limit.allows(begin + i * 4s)) << i;
    EXPECT_LE(limit.ends(), 3u);
  }
}

TEST(restart_intensity, keeps_no_more_than_it_needs_however_often_it_is_asked) {
  restart_intensity limit{2, 10s};
  for (int i = 0; i < 1000; ++i) (void)limit.allows(begin);
  EXPECT_EQ(limit.ends(), 3u);
  EXPECT_TRUE(limit.allows(begin + 10s));
}

TEST(restart_intensity, of_zero_allows_nothing) {
  restart_intensity limit{0, 10s};
  EXPECT_FALSE(limit.allows(begin));
}

TEST(restart_backoff, doubles_its_delay_and_gives_up_at_the_sixth_end_within_a_minute) {
  restart_backoff backoff;
  auto now = begin;
  for (const auto wanted : {100ms, 200ms, 400ms, 800ms, 1600ms}) {
    EXPECT_EQ(backoff.ended(now), delay{wanted});
    now += wanted;
  }
  EXPECT_EQ(backoff.ended(now), std::nullopt);
}

TEST(restart_backoff, waits_ten_seconds_at_most) {
  restart_backoff backoff;
  auto now = begin;
  delay last;
  for (int i = 0; i < 50; ++i) {
    last = backoff.ended(now);
    ASSERT_TRUE(last) << i;
    EXPECT_LE(*last, 10s);
    now += *last + 13s;
  }
  EXPECT_EQ(last, delay{10s});
}

TEST(restart_backoff, begins_anew_after_a_life_of_a_minute_that_was_up) {
  restart_backoff backoff;
  EXPECT_EQ(backoff.ended(begin), delay{100ms});
  EXPECT_EQ(backoff.ended(begin + 1s), delay{200ms});
  backoff.up(begin + 2s);
  EXPECT_EQ(backoff.ended(begin + 61s), delay{400ms}) << "it was up for 59 s";
  backoff.up(begin + 62s);
  backoff.up(begin + 100s);  // a repeated report does not shorten the life
  EXPECT_EQ(backoff.ended(begin + 122s), delay{100ms});
}

TEST(restart_backoff, a_life_that_was_never_up_is_none_that_was_good) {
  restart_backoff backoff;
  EXPECT_EQ(backoff.ended(begin), delay{100ms});
  EXPECT_EQ(backoff.ended(begin + 10min), delay{200ms});
}

}  // namespace
