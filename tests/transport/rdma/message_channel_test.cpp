#include "troupe/transport/rdma/message_channel.hpp"

#include <array>
#include <cerrno>
#include <utility>

#include <gtest/gtest.h>

#include "open_device.hpp"

// What the messages of a link do when their NIC refuses one. In the machine of tests/verbs.
namespace troupe::transport::rdma {

namespace {

constexpr std::array message{std::byte{1}, std::byte{2}};

int refuse(ibv_qp*, ibv_send_wr*, ibv_send_wr**) {
  return ENOMEM;
}

}  // namespace

// The receiver matches answers by number: a message sent after one that failed would be taken for
// the failed one.
TEST(rdma_message_channel, sends_nothing_behind_a_message_that_was_refused) {
  const auto a = open_device("rxe0a");
  const auto b = open_device("rxe0b");
  const auto completions_a = completion_queue::create(a, 256).value();
  const auto completions_b = completion_queue::create(b, 256).value();
  const auto from = message_channel::create(a, *completions_a).value();
  const auto to = message_channel::create(b, *completions_b).value();
  const auto start = [&] {
    ASSERT_TRUE(to->start({offer_of(*a), from->pair().offer(), 1}, message_channel::buffers, {}));
    ASSERT_TRUE(from->start({offer_of(*b), to->pair().offer(), 1}, message_channel::buffers, {}));
  };
  start();
  EXPECT_TRUE(from->send(message_kind::small, message, {}));
  auto& post_send = a->context()->ops.post_send;
  // Simulated: no NIC refuses a single request on demand.
  const auto real = std::exchange(post_send, refuse);
  EXPECT_FALSE(from->send(message_kind::small, message, {}));
  post_send = real;
  for (int i = 0; i < 2; ++i) {
    const auto sent = from->send(message_kind::small, message, {});
    ASSERT_FALSE(sent) << "the peer would count it as the one that was refused";
    EXPECT_EQ(sent.error().code, errc::link_broken);
  }
  from->put(message_kind::frame, message);
  EXPECT_FALSE(from->flush({}));
  start();
  EXPECT_TRUE(from->send(message_kind::small, message, {}));
}

// A peer makes us send messages (`revoke`, `keys`) as often as it likes, and need not take any of
// them.
TEST(rdma_message_channel,
     a_peer_that_takes_nothing_is_given_up_before_what_waits_fills_the_memory) {
  const auto a = open_device("rxe0a");
  const auto b = open_device("rxe0b");
  const auto completions_a = completion_queue::create(a, 256).value();
  const auto completions_b = completion_queue::create(b, 256).value();
  const auto from = message_channel::create(a, *completions_a).value();
  const auto to = message_channel::create(b, *completions_b).value();
  ASSERT_TRUE(from->start({offer_of(*b), to->pair().offer(), 1}, 0, {}));
  for (std::size_t i = 0; i < message_channel::max_waiting; ++i) {
    from->put(message_kind::revoke, message);
  }
  from->put(message_kind::frame, message);
  EXPECT_TRUE(from->flush({}));
  from->put(message_kind::revoke, message);
  const auto sent = from->flush({});
  ASSERT_FALSE(sent);
  EXPECT_EQ(sent.error().code, errc::link_broken);
  EXPECT_EQ(sent.error().message, "the peer takes no messages: 65537 wait for it to make room");
}

}  // namespace troupe::transport::rdma
