#include "troupe/transport/rdma/port_record.hpp"

#include <gtest/gtest.h>

// The record of a port that goes down and up again.
namespace troupe::transport::rdma {

namespace {
constexpr port_record::clock::time_point start{std::chrono::hours{1}};
constexpr auto after(int ms) {
  return start + std::chrono::milliseconds{ms};
}
}  // namespace

TEST(port_record, a_port_is_up_until_it_says_otherwise) {
  const port_record record;
  EXPECT_TRUE(record.now().up);
  EXPECT_EQ(record.now().downs, 0U);
  EXPECT_EQ(record.trouble_since(start, after(10)), "");
}

TEST(port_record, what_a_driver_says_twice_counts_once) {
  port_record record;
  EXPECT_TRUE(record.note(IBV_EVENT_PORT_ERR, after(0)));
  EXPECT_FALSE(record.note(IBV_EVENT_PORT_ERR, after(1)));
  EXPECT_TRUE(record.note(IBV_EVENT_PORT_ACTIVE, after(2)));
  EXPECT_FALSE(record.note(IBV_EVENT_PORT_ACTIVE, after(3)));
  EXPECT_TRUE(record.now().up);
  EXPECT_EQ(record.now().downs, 1U);
}

TEST(port_record, changes_of_addresses_are_counted_and_are_no_reason_for_a_link_to_break) {
  port_record record;
  for (const auto what : {IBV_EVENT_GID_CHANGE, IBV_EVENT_LID_CHANGE, IBV_EVENT_PKEY_CHANGE}) {
    EXPECT_TRUE(record.note(what, after(0)));
    EXPECT_FALSE(port_event_text(what).empty());
  }
  EXPECT_EQ(record.now().changes, 3U);
  EXPECT_TRUE(record.now().up);
  EXPECT_EQ(record.trouble_since(start, after(10)), "");
}

TEST(port_record, what_is_no_event_of_a_port_changes_nothing) {
  port_record record;
  for (const auto what : {IBV_EVENT_QP_FATAL, IBV_EVENT_SM_CHANGE, IBV_EVENT_DEVICE_FATAL}) {
    EXPECT_FALSE(record.note(what, after(0)));
    EXPECT_EQ(port_event_text(what), "");
  }
  EXPECT_EQ(record.now().changes, 0U);
}

TEST(port_record, a_link_may_have_broken_of_a_port_that_is_down_or_was_while_the_link_was_there) {
  port_record record;
  record.note(IBV_EVENT_PORT_ERR, after(100));
  EXPECT_EQ(record.trouble_since(after(0), after(350)), "down for 250 ms");
  EXPECT_EQ(record.trouble_since(after(200), after(350)), "down for 250 ms");
  record.note(IBV_EVENT_PORT_ACTIVE, after(400));
  EXPECT_EQ(record.trouble_since(after(0), after(500)), "down 400 ms ago and up again");
  EXPECT_EQ(record.trouble_since(after(450), after(500)), "") << "before it was made";
}

}  // namespace troupe::transport::rdma
