// Which stranger is evicted when a door has too many, and which offenders are remembered.
#include "troupe/actors/door/door_eviction.hpp"

#include <chrono>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace troupe::actors {
namespace {

using namespace std::chrono_literals;

constexpr door_offenders::time_point start{};

door_seat seat(std::string_view address, door_stage stage, std::chrono::milliseconds since) {
  return {address, address.substr(0, 8), stage, start + since};
}

std::size_t who_goes(const std::vector<door_seat>& seats) {
  return choose_who_goes(seats, door_offenders{}, start);
}

void fail_often(door_offenders& offenders, std::string_view network) {
  for (int i = 0; i < 20; ++i) offenders.add(network, start);
}

TEST(door_eviction, the_address_that_most_come_from_displaces_its_own) {
  EXPECT_EQ(who_goes({seat("aaaa", door_stage::challenged, 0ms),
                      seat("bbbb", door_stage::challenged, 1ms),
                      seat("bbbb", door_stage::challenged, 2ms)}),
            1u);
}

TEST(door_eviction, hellos_without_a_proof_do_not_displace_who_has_not_yet_said_hello) {
  EXPECT_EQ(
      who_goes({seat("aaaa", door_stage::silent, 0ms), seat("aaaa", door_stage::challenged, 1ms),
                seat("aaaa", door_stage::challenged, 2ms)}),
      1u);
}

TEST(door_eviction, silence_does_not_displace_who_has_said_hello) {
  EXPECT_EQ(
      who_goes({seat("aaaa", door_stage::challenged, 0ms), seat("aaaa", door_stage::silent, 1ms),
                seat("aaaa", door_stage::silent, 2ms)}),
      1u);
}

TEST(door_eviction, the_one_goes_that_came_to_its_stage_first_not_the_one_that_came_first) {
  EXPECT_EQ(who_goes({seat("aaaa", door_stage::challenged, 9ms),
                      seat("aaaa", door_stage::challenged, 3ms),
                      seat("aaaa", door_stage::challenged, 5ms)}),
            1u);
}

TEST(door_eviction, who_was_refused_goes_before_all_others_of_its_address) {
  EXPECT_EQ(who_goes({seat("aaaa", door_stage::silent, 0ms), seat("aaaa", door_stage::silent, 1ms),
                      seat("aaaa", door_stage::refused, 2ms)}),
            2u);
}

TEST(door_eviction, an_offender_has_a_smaller_share) {
  door_offenders offenders;
  fail_often(offenders, "bbbb");
  const std::vector<door_seat> seats{
      seat("aaaa", door_stage::challenged, 0ms), seat("aaaa", door_stage::challenged, 1ms),
      seat("aaaa", door_stage::challenged, 2ms), seat("bbbb", door_stage::challenged, 3ms)};
  EXPECT_EQ(choose_who_goes(seats, offenders, start), 3u);
  EXPECT_EQ(choose_who_goes(seats, offenders, start + 1min), 0u) << "it is forgiven";
}

TEST(door_eviction, a_network_of_ipv6_is_one_party_only_where_it_offends) {
  // Three addresses of one network, and two strangers of one address of another.
  const std::vector<door_seat> seats{
      seat("network1 host 01", door_stage::challenged, 0ms),
      seat("network1 host 02", door_stage::challenged, 1ms),
      seat("network1 host 03", door_stage::challenged, 2ms),
      seat("network2 host 01", door_stage::challenged, 3ms),
      seat("network2 host 01", door_stage::challenged, 4ms),
  };
  EXPECT_EQ(who_goes(seats), 3u);
  door_offenders offenders;
  fail_often(offenders, "network1");
  EXPECT_EQ(choose_who_goes(seats, offenders, start), 0u);
}

TEST(door_eviction, who_answers_before_as_many_have_come_as_there_are_seats_stays) {
  std::vector<door_seat> seats(64, seat("aaaa", door_stage::challenged, 0ms));
  for (std::size_t i = 0; i < seats.size(); ++i) seats[i].since = start + 1ms * (i + 1);
  const auto honest = start + 100ms;
  seats[who_goes(seats)] = seat("aaaa", door_stage::challenged, 100ms);
  for (int others = 1; others < 64; ++others) {
    auto& gone = seats[who_goes(seats)];
    ASSERT_NE(gone.since, honest) << others;
    gone = seat("aaaa", door_stage::challenged, 100ms + 1ms * others);
  }
  EXPECT_EQ(seats[who_goes(seats)].since, honest);
}

TEST(door_eviction, a_failure_now_and_then_makes_no_offender) {
  door_offenders offenders;
  for (int i = 0; i < 1000; ++i) offenders.add("aaaa", start + 1s * i);
  EXPECT_FALSE(offenders.has("aaaa", start + 1000s));
}

TEST(door_eviction, what_is_remembered_is_bounded_and_keeps_who_failed_last) {
  door_offenders offenders;
  fail_often(offenders, "first");
  fail_often(offenders, "second");
  fail_often(offenders, "first");
  for (std::size_t i = 0; i + 1 < door_offenders::capacity; ++i)
    offenders.add("another " + std::to_string(i), start);
  EXPECT_EQ(offenders.size(), door_offenders::capacity);
  EXPECT_TRUE(offenders.has("first", start));
  EXPECT_FALSE(offenders.has("second", start));
}

}  // namespace
}  // namespace troupe::actors
