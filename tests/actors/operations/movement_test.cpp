// The report to an engine of how its bytes moved.

#include "troupe/actors/messages/movement.hpp"

#include <chrono>

#include <gtest/gtest.h>

namespace {

using namespace troupe::actors;
using namespace std::chrono_literals;

const time_point began{1h};

TEST(movement, of_one_transfer_is_its_wait_and_its_way) {
  seen_movement all;
  all.add({began + 20ms, began + 50ms, 7, "tcp"});
  const auto told = all.told(began, began + 60ms);
  EXPECT_EQ(told.waited, 20ms);
  EXPECT_EQ(told.moving, 30ms);
  EXPECT_EQ(told.segments, 7U);
  EXPECT_EQ(told.backend, "tcp");
}

TEST(movement, of_many_is_from_the_first_byte_of_all_to_the_last_one) {
  seen_movement all;
  all.backend = "shm";  // of the first rank, which ended last
  all.add({began + 20ms, began + 50ms, 7, "tcp"});
  all.add({began + 10ms, began + 30ms, 2, "rdma"});
  all.add({});  // a rank that had nothing to move
  all.add({began + 15ms, {}, 1, "shm"});
  const auto told = all.told(began, began + 60ms);
  EXPECT_EQ(told.waited, 10ms);
  EXPECT_EQ(told.moving, 40ms);
  EXPECT_EQ(told.segments, 10U);
  EXPECT_EQ(told.backend, "shm");
}

TEST(movement, of_nothing_is_all_wait) {
  seen_movement all;
  all.add({{}, {}, 0, "shm"});
  const auto told = all.told(began, began + 60ms);
  EXPECT_EQ(told.waited, 60ms);
  EXPECT_EQ(told.moving, 0ms);
}

TEST(movement, that_began_before_the_engine_asked_waited_for_nothing) {
  seen_movement all;
  all.add({began - 5ms, began + 5ms, 1, "shm"});
  EXPECT_EQ(all.told(began, began + 6ms).waited, 0ms);
}

}  // namespace
