#include <string>

#include <gtest/gtest.h>

#include "troupe/transport/rdma/device_events.hpp"

// How asynchronous events of devices are interpreted.
namespace troupe::transport::rdma {

TEST(device_events, what_ends_something_says_what_happened_and_has_its_name) {
  for (int i = IBV_EVENT_CQ_ERR; i <= IBV_EVENT_WQ_FATAL; ++i) {
    const auto meaning = meaning_of(static_cast<ibv_event_type>(i));
    EXPECT_TRUE(meaning.name.starts_with("IBV_EVENT_")) << i;
    EXPECT_EQ(meaning.effect == event_effect::ends, !meaning.what_happened.empty()) << meaning.name;
    if (meaning.effect == event_effect::ends) {
      EXPECT_NE(meaning.about, event_subject::other) << meaning.name;
    }
  }
}

TEST(device_events, errors_of_queues_and_devices_end_them_and_the_rest_ends_nothing) {
  for (const auto what : {IBV_EVENT_QP_FATAL, IBV_EVENT_QP_REQ_ERR, IBV_EVENT_QP_ACCESS_ERR,
                          IBV_EVENT_CQ_ERR, IBV_EVENT_DEVICE_FATAL}) {
    EXPECT_EQ(meaning_of(what).effect, event_effect::ends) << what;
  }
  for (const auto what : {IBV_EVENT_PATH_MIG, IBV_EVENT_PATH_MIG_ERR, IBV_EVENT_PORT_ERR,
                          IBV_EVENT_GID_CHANGE, IBV_EVENT_SRQ_ERR, IBV_EVENT_COMM_EST}) {
    EXPECT_NE(meaning_of(what).effect, event_effect::ends) << what;
  }
}

TEST(device_events, what_a_later_library_says_is_told_and_ends_nothing) {
  const auto meaning = meaning_of(static_cast<ibv_event_type>(31));
  EXPECT_EQ(meaning.effect, event_effect::told);
  EXPECT_EQ(meaning.about, event_subject::other);
}

}  // namespace troupe::transport::rdma
