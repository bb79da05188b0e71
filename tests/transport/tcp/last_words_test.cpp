// Frames that a peer sent before it went count, whichever lane first shows that it has gone.

#include <array>
#include <vector>

#include <netinet/tcp.h>

#include "hostile_fixture.hpp"

namespace troupe::transport::tcp {

namespace {

constexpr std::size_t said = 10;

/// A peer on two lanes. The victim's thread is inside the callback for the first frame of lane 0,
/// so it holds that lane and reads no other.
class last_words : public hostile {
 protected:
  static link_options two_lanes() {
    link_options options;
    options.lanes = 2;
    return options;
  }
  last_words() : peer{become_peer(incarnation{98}, two_lanes())} {
    peer.sink->held = true;
    say_frames(1);
    EXPECT_TRUE(comes_true([&] { return peer.sink->frames == 1; }));
  }
  ~last_words() override {
    peer.sink->held = false;
    peer.wire->close();
  }
  void say_frames(std::size_t count) const {
    std::vector<std::byte> bytes(header_size + 3, std::byte{7});
    encode(frame_header{.type = frame_type::session, .session_size = 3}, bytes.data());
    for (std::size_t i = 0; i < count; ++i) send(peer.fd, bytes);
  }
  /// Sends as real lanes do, without waiting for acknowledgements.
  void send_at_once() const {
    const int on = 1;
    EXPECT_EQ(::setsockopt(peer.fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on), 0);
  }
  static void say_goodbye(const owned_fd& over) {
    std::array<std::byte, header_size> head{};
    encode(frame_header{.type = frame_type::goodbye}, head.data());
    send(over, head);
  }
  void expect_all_frames() {
    peer.sink->held = false;
    EXPECT_TRUE(comes_true([&] { return peer.sink->broken.load(); })) << "the link did not end";
    EXPECT_EQ(peer.sink->frames, said);
  }

  liar peer;
};

}  // namespace

TEST_F(last_words, are_heard_where_another_lane_says_goodbye_first) {
  say_frames(said - 1);  // most are sent once the first is acknowledged: until then lane 0 is empty
  say_goodbye(peer.fd);
  say_goodbye(peer.others[0]);
  EXPECT_TRUE(comes_true([&] { return peer.wire->poll(); }));  // the other lane, on this thread
  EXPECT_FALSE(peer.wire->poll()) << "and lane 0 is another thread's";
  expect_all_frames();
}

TEST_F(last_words, are_not_waited_for_without_end) {
  say_frames(said - 1);
  say_goodbye(peer.others[0]);
  expect_all_frames();  // lane 0 never says it
}

TEST_F(last_words, are_heard_where_the_connection_of_another_lane_has_ended) {
  send_at_once();
  say_frames(said - 1);
  peer.others[0].reset();
  EXPECT_TRUE(comes_true([&] { return peer.wire->poll(); }));
  expect_all_frames();  // lane 0 itself never ends
}

TEST_F(last_words, are_heard_where_it_shows_first_that_nothing_can_be_sent) {
  say_frames(said - 1);
  peer.fd.reset();
  const std::array<std::byte, 3> answer{};
  for (int i = 0; i < 3; ++i) static_cast<void>(peer.wire->send_frame(answer));
  expect_all_frames();
}

TEST_F(last_words, are_not_waited_for_where_a_lane_breaks_the_protocol) {
  say_frames(said - 1);
  send(peer.others[0], std::array<std::byte, header_size>{});
  EXPECT_TRUE(comes_true([&] { return peer.wire->poll(); }));
  const std::array<std::byte, 3> answer{};
  EXPECT_FALSE(peer.wire->send_frame(answer)) << "the link goes on";
}

}  // namespace troupe::transport::tcp
