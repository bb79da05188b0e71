// The conclusions drawn from a peer's silence, moment by moment, and the frames that ask the peer.

#include "troupe/actors/link/peer_liveness.hpp"

#include <vector>

#include <gtest/gtest.h>

#include "troupe/actors/messages/keep_alive.hpp"
#include "troupe/actors/messages/session_messages.hpp"

namespace troupe::actors {
namespace {

using namespace std::chrono_literals;
using advice = peer_liveness::advice;

class pulse : public ::testing::Test {
 protected:
  static constexpr peer_liveness::time_point start{std::chrono::hours{1}};

  pulse() { watched.begin(start); }
  /// The advice of every look up to `end`, one look per period.
  std::vector<advice> look_until(peer_liveness::time_point end) {
    std::vector<advice> said;
    while (at + watched.period() <= end) {
      at += watched.period();
      said.push_back(watched.look(at));
    }
    return said;
  }

  peer_liveness watched{1000ms};
  peer_liveness::time_point at{start};
};

TEST_F(pulse, of_a_peer_that_says_nothing_is_asked_for_each_quarter_then_otherwise_then_lost) {
  using enum advice;
  EXPECT_EQ(look_until(start + 800ms), (std::vector{nothing, nothing, ask, nothing, ask_both_ways,
                                                    ask_both_ways, ask_both_ways, peer_is_silent}));
  EXPECT_EQ(watched.silence(at), 800ms);
}

TEST_F(pulse, of_a_frozen_peer_ends_within_the_patience_wherever_between_two_looks_it_froze) {
  for (auto froze = 0ms; froze <= 100ms; froze += 10ms) {
    watched = peer_liveness{1000ms};
    at = start;
    watched.begin(start);
    EXPECT_EQ(watched.look(at += 100ms), advice::nothing);
    watched.sign(at);  // its last frames were sent at `froze` and read by this look
    auto said = advice::nothing;
    while (said != advice::peer_is_silent) said = watched.look(at += 100ms);
    EXPECT_LE(at - (start + froze), 1000ms);
    EXPECT_GE(at - (start + froze), 750ms);
  }
}

TEST_F(pulse, of_a_peer_that_answers_goes_on) {
  for (int i = 0; i < 100; ++i) {
    const auto said = look_until(at + 300ms);
    EXPECT_EQ(said.back(), advice::ask);
    watched.sign(at + 1ms);
  }
}

TEST_F(pulse, of_a_link_whose_process_answers_otherwise_says_that_the_link_is_silent) {
  look_until(start + 600ms);
  watched.word(at + 5ms);
  EXPECT_EQ(look_until(start + 800ms).back(), advice::link_is_silent);
}

TEST_F(pulse, does_not_take_an_old_word_of_the_process_for_an_answer) {
  watched.word(start + 100ms);
  EXPECT_EQ(look_until(start + 800ms).back(), advice::peer_is_silent);
}

TEST_F(pulse, begins_anew_where_it_was_not_looked_at_itself) {
  look_until(start + 700ms);
  at += 5s;  // this process was stopped and continued
  EXPECT_EQ(watched.look(at), advice::ask);
  EXPECT_EQ(watched.silence(at), 0ms);
  EXPECT_EQ(look_until(at + 700ms).back(), advice::ask_both_ways);
  EXPECT_EQ(look_until(at + 100ms).back(), advice::peer_is_silent);
}

TEST_F(pulse, forgives_looks_that_come_a_little_late) {
  for (const auto late : {150ms, 180ms, 120ms, 160ms}) {
    EXPECT_NE(watched.look(at += late), advice::peer_is_silent);
  }
  EXPECT_EQ(watched.look(at += 150ms), advice::peer_is_silent) << "they are no stall of ours";
}

// -- frames

TEST(keep_alive_frame, comes_back_as_it_was_said) {
  for (const auto word : {keep_alive::word::question, keep_alive::word::answer}) {
    const keep_alive said{word, word == keep_alive::word::answer};
    const auto frame = encode(said);
    ASSERT_TRUE(is_keep_alive(frame));
    const auto heard = decode_keep_alive(frame);
    ASSERT_TRUE(heard) << to_string(heard.error());
    EXPECT_EQ(*heard, said);
  }
}

TEST(keep_alive_frame, is_no_session_message_and_no_session_message_is_one) {
  EXPECT_FALSE(decode(encode(keep_alive{})));
  const auto message = encode(session_message{transfer_release{transfer_id{1}}});
  ASSERT_TRUE(message);
  EXPECT_FALSE(is_keep_alive(*message));
  EXPECT_FALSE(is_keep_alive({}));
}

TEST(keep_alive_frame, of_another_length_version_or_word_is_refused) {
  const auto good = encode(keep_alive{});
  std::vector<std::byte> frame{good.begin(), good.end()};
  frame.push_back({});
  EXPECT_EQ(decode_keep_alive(frame).error().code, errc::out_of_range);
  frame.resize(good.size() - 1);
  EXPECT_EQ(decode_keep_alive(frame).error().code, errc::out_of_range);
  frame.assign(good.begin(), good.end());
  frame[4] = std::byte{3};
  EXPECT_EQ(decode_keep_alive(frame).error().code, errc::out_of_range);
  frame.assign(good.begin(), good.end());
  frame[5] = std::byte{2};
  EXPECT_EQ(decode_keep_alive(frame).error().code, errc::out_of_range);
  frame.assign(good.begin(), good.end());
  frame[0] = std::byte{99};
  EXPECT_EQ(decode_keep_alive(frame).error().code, errc::version_mismatch);
}

}  // namespace
}  // namespace troupe::actors
