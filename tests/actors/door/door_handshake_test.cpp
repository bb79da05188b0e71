// The handshake at the door, byte by byte: a message that is cut, changed, replayed or reflected
// convinces no side, and a stranger learns nothing from it.
#include "troupe/actors/door/door_handshake.hpp"

#include <algorithm>
#include <string>

#include <gtest/gtest.h>

#include "troupe/transport/random.hpp"

namespace troupe::actors {
namespace {

using role = door_handshake::role;
using state = door_handshake::state;
using mode = door_security::mode;
using bytes = std::vector<std::byte>;

const door_key ours = door_key_of("0123456789abcdef0123456789abcdef");
const door_key other = door_key_of("fedcba9876543210fedcba9876543210");

door_nonce fresh() {
  door_nonce nonce{};
  transport::random_bytes(nonce);
  return nonce;
}

constexpr std::uint16_t port = 7400;

door_handshake end(role who, std::vector<door_key> keys = {ours}, mode how = mode::secret,
                   std::uint16_t at = port) {
  return {who, how, std::move(keys), fresh(), at};
}

bytes all_of(door_handshake& from) {
  const auto out = from.to_send();
  bytes copy{out.begin(), out.end()};
  from.sent(out.size());
  return copy;
}

/// The messages of one greeting, in the order they were sent.
struct talk {
  bytes hello, challenge, proof, verdict;
};

talk converse(door_handshake& client, door_handshake& server) {
  talk said;
  said.hello = all_of(client);
  server.take(said.hello);
  said.challenge = all_of(server);
  client.take(said.challenge);
  said.proof = all_of(client);
  server.take(said.proof);
  said.verdict = all_of(server);
  client.take(said.verdict);
  return said;
}

TEST(door_handshake, two_ends_with_one_key_prove_themselves_in_four_messages) {
  for (const auto how : {mode::open, mode::secret, mode::tls}) {
    const auto key = how == mode::open ? open_door_key() : ours;
    auto client = end(role::client, {key}, how);
    auto server = end(role::server, {key}, how);
    const auto said = converse(client, server);
    EXPECT_EQ(client.where(), state::proven);
    EXPECT_EQ(server.where(), state::proven);
    EXPECT_EQ(said.hello.size(), 48u);
    EXPECT_EQ(said.challenge.size(), 48u);
    EXPECT_EQ(said.proof.size(), 40u);
    EXPECT_EQ(said.verdict.size(), 40u);
    EXPECT_EQ(client.wants(), 0u);
    EXPECT_EQ(server.wants(), 0u);
  }
}

TEST(door_handshake, pieces_of_any_size_make_the_same_greeting) {
  auto client = end(role::client);
  auto server = end(role::server);
  for (int turn = 0; turn < 1000; ++turn) {
    for (auto* from : {&client, &server}) {
      auto& to = from == &client ? server : client;
      if (from->to_send().empty()) continue;
      ASSERT_GT(to.wants(), 0u);
      to.take(from->to_send().first(1));
      from->sent(1);
    }
  }
  EXPECT_EQ(client.where(), state::proven);
  EXPECT_EQ(server.where(), state::proven);
}

TEST(door_handshake, a_server_never_sends_more_than_it_got_and_no_proof_before_it_saw_one) {
  auto client = end(role::client);
  auto server = end(role::server);
  const auto hello = all_of(client);
  std::size_t got = 0;
  for (const auto one : hello) {
    server.take({&one, 1});
    ++got;
    EXPECT_LE(server.to_send().size(), got);
    EXPECT_TRUE(got == hello.size() || server.to_send().empty());
  }
  EXPECT_EQ(server.to_send().size(), 48u);  // head and nonce
}

TEST(door_handshake, another_secret_is_refused_and_both_ends_can_say_why) {
  auto client = end(role::client, {other});
  auto server = end(role::server, {ours});
  const auto said = converse(client, server);
  EXPECT_EQ(server.where(), state::refused);
  EXPECT_EQ(client.where(), state::refused);
  EXPECT_EQ(said.verdict.size(), 8u);  // nothing that was made with the key
  EXPECT_EQ(client.why().code, errc::unauthorized);
  EXPECT_EQ(server.why().code, errc::unauthorized);
  EXPECT_NE(client.why().message.find("the peer has another secret"), std::string::npos);
  EXPECT_NE(server.why().message.find("the peer has another secret"), std::string::npos);
}

TEST(door_handshake, a_server_accepts_each_of_its_secrets_and_answers_with_the_clients) {
  for (const auto& key : {ours, other}) {
    auto client = end(role::client, {key});
    auto server = end(role::server, {other, ours});
    (void)converse(client, server);
    EXPECT_EQ(client.where(), state::proven);
    EXPECT_EQ(server.where(), state::proven);
  }
  // A client sends the first of its keys.
  auto client = end(role::client, {other, ours});
  auto server = end(role::server, {ours});
  (void)converse(client, server);
  EXPECT_EQ(server.where(), state::refused);
}

TEST(door_handshake, another_mode_is_refused_and_both_ends_name_both) {
  for (const auto asked : {mode::open, mode::secret, mode::tls}) {
    for (const auto had : {mode::open, mode::secret, mode::tls}) {
      if (asked == had) continue;
      auto client = end(role::client, {ours}, asked);
      auto server = end(role::server, {ours}, had);
      const auto said = converse(client, server);
      EXPECT_EQ(said.challenge.size(), 16u);
      ASSERT_EQ(server.where(), state::refused);
      ASSERT_EQ(client.where(), state::refused);
      EXPECT_EQ(client.why().code, errc::unauthorized);
      EXPECT_NE(client.why().message.find("security.mode is "), std::string::npos);
      EXPECT_NE(client.why().message.find("give every node the same"), std::string::npos);
      EXPECT_EQ(server.why().code, errc::unauthorized);
    }
  }
}

TEST(door_handshake, one_that_was_dialled_at_another_port_is_refused_but_in_mode_open) {
  const std::uint16_t others[]{0, 1, 7401, 7400 ^ 0x100};
  for (const auto how : {mode::secret, mode::tls}) {
    for (const auto dialled : others) {
      auto client = end(role::client, {ours}, how, dialled);
      auto server = end(role::server, {ours}, how);
      client.take((server.take(all_of(client)), all_of(server)));
      EXPECT_EQ(server.where(), state::refused) << dialled;
      ASSERT_EQ(client.where(), state::refused) << dialled;
      EXPECT_EQ(client.why().code, errc::unauthorized);
      EXPECT_NE(client.why().message.find("use the same port at both ends"), std::string::npos);
    }
    // A client with port 0 (listening nowhere) is refused even by a server that listens nowhere.
    auto client = end(role::client, {ours}, how, 0);
    auto server = end(role::server, {ours}, how, 0);
    server.take(all_of(client));
    EXPECT_EQ(server.where(), state::refused);
  }
  auto client = end(role::client, {open_door_key()}, mode::open, 7401);
  auto server = end(role::server, {open_door_key()}, mode::open);
  converse(client, server);
  EXPECT_EQ(client.where(), state::proven);
  EXPECT_EQ(server.where(), state::proven);
}

TEST(door_handshake, a_port_that_is_changed_on_the_way_makes_the_proofs_differ) {
  auto client = end(role::client, {ours}, mode::secret, 7401);
  auto server = end(role::server);
  auto hello = all_of(client);
  hello[12] = std::byte{7400 & 0xff};
  server.take(hello);
  client.take(all_of(server));
  server.take(all_of(client));
  EXPECT_EQ(server.where(), state::refused);
}

TEST(door_handshake, another_version_is_refused_after_its_head_whatever_comes_behind_it) {
  auto client = end(role::client);
  auto server = end(role::server);
  auto hello = all_of(client);
  hello[8] = std::byte{2};
  server.take(std::span{hello}.first(16));
  ASSERT_EQ(server.where(), state::refused);
  EXPECT_EQ(server.why().code, errc::version_mismatch);
  const auto refusal = all_of(server);
  EXPECT_EQ(refusal.size(), 16u);
  // A client of another version understands such a refusal.
  auto changed = refusal;
  changed[8] = std::byte{2};
  client.take(changed);
  ASSERT_EQ(client.where(), state::refused);
  EXPECT_EQ(client.why().code, errc::version_mismatch);
  EXPECT_NE(client.why().message.find("version 2"), std::string::npos);
}

TEST(door_handshake, every_flipped_bit_of_every_message_ends_it_at_both_ends) {
  const std::size_t sizes[]{48, 48, 40, 40};
  for (std::size_t message = 0; message < 4; ++message) {
    for (std::size_t bit = 0; bit < sizes[message] * 8; ++bit) {
      auto client = end(role::client);
      auto server = end(role::server);
      bool changed = false;
      for (std::size_t turn = 0; turn < 4; ++turn) {
        auto& from = turn % 2 == 0 ? client : server;
        auto& to = turn % 2 == 0 ? server : client;
        auto said = all_of(from);
        if (turn == message && said.size() == sizes[turn]) {
          said[bit / 8] ^= std::byte{1} << (bit % 8);
          changed = true;
        }
        to.take(said);
      }
      ASSERT_TRUE(changed);
      EXPECT_NE(client.where(), state::proven) << "message " << message << " bit " << bit;
      // The verdict is checked by the client: the server has seen a valid proof.
      EXPECT_TRUE(message == 3 || server.where() != state::proven)
          << "message " << message << " bit " << bit;
    }
  }
}

TEST(door_handshake, a_message_that_was_cut_short_proves_nothing) {
  for (std::size_t message = 0; message < 4; ++message) {
    for (std::size_t keep = 0; keep < 40; ++keep) {
      auto client = end(role::client);
      auto server = end(role::server);
      for (std::size_t turn = 0; turn <= message; ++turn) {
        auto& from = turn % 2 == 0 ? client : server;
        auto& to = turn % 2 == 0 ? server : client;
        auto said = all_of(from);
        if (turn == message) said.resize(keep);
        to.take(said);
      }
      auto& to = message % 2 == 0 ? server : client;
      EXPECT_EQ(to.where(), state::under_way);
      EXPECT_GT(to.wants(), 0u);
      EXPECT_TRUE(to.to_send().empty() || &to == &client);
    }
  }
}

TEST(door_handshake, what_was_recorded_opens_no_other_connection) {
  auto client = end(role::client);
  auto server = end(role::server);
  const auto old = converse(client, server);
  ASSERT_EQ(server.where(), state::proven);

  auto next_server = end(role::server);
  next_server.take(old.hello);
  (void)all_of(next_server);
  next_server.take(old.proof);
  EXPECT_EQ(next_server.where(), state::refused);

  auto next_client = end(role::client);
  (void)all_of(next_client);
  next_client.take(old.challenge);
  (void)all_of(next_client);
  next_client.take(old.verdict);
  EXPECT_EQ(next_client.where(), state::refused);
}

TEST(door_handshake, what_an_end_said_itself_convinces_it_of_nothing) {
  // A peer that echoes: with equal nonces, only the role tells the proofs apart.
  auto echoed = end(role::client);
  echoed.take(all_of(echoed));
  EXPECT_EQ(echoed.where(), state::refused) << "a challenge names no port";
  auto client = end(role::client);
  auto echo = all_of(client);
  echo[12] = echo[13] = std::byte{0};
  client.take(echo);
  ASSERT_EQ(client.where(), state::under_way);
  const auto proof = all_of(client);
  ASSERT_EQ(proof.size(), 40u);
  client.take(proof);
  EXPECT_EQ(client.where(), state::refused);

  // Two servers played off against one another: the first one's challenge is the second one's hello.
  auto first = end(role::server);
  auto second = end(role::server);
  auto asker = end(role::client);
  first.take(all_of(asker));
  const auto challenge = all_of(first);
  second.take(challenge);
  first.take(all_of(second));  // a challenge where the proof belongs
  EXPECT_NE(first.where(), state::proven);
}

TEST(door_handshake, a_server_that_has_not_the_key_is_not_believed) {
  auto client = end(role::client, {ours});
  auto fake = end(role::server, {ours, other});
  auto hello = all_of(client);
  fake.take(hello);
  client.take(all_of(fake));
  (void)all_of(client);
  bytes verdict(40);  // code 0, and zeros for a proof
  client.take(verdict);
  ASSERT_EQ(client.where(), state::refused);
  EXPECT_EQ(client.why().code, errc::unauthorized);
  EXPECT_NE(client.why().message.find("has not proved"), std::string::npos);
}

TEST(door_handshake, other_protocols_are_cut_at_their_first_byte_without_an_answer) {
  for (const std::string& first :
       std::vector{std::string{"GET / HTTP/1.1\r\n"}, std::string{"\x16\x03\x01"},
                   std::string(32, '\0'), std::string{"SSH-2.0-x"}}) {
    auto server = end(role::server);
    server.take(std::as_bytes(std::span{first.data(), 1}));
    EXPECT_EQ(server.where(), state::refused);
    EXPECT_TRUE(server.to_send().empty());
    EXPECT_FALSE(server.told());
    auto client = end(role::client);
    (void)all_of(client);
    client.take(std::as_bytes(std::span{first.data(), 1}));
    EXPECT_EQ(client.where(), state::refused);
    EXPECT_EQ(client.why().code, errc::version_mismatch);
  }
}

TEST(door_handshake, refusals_that_this_release_does_not_know_are_refusals) {
  auto client = end(role::client);
  auto server = end(role::server);
  server.take(all_of(client));
  auto challenge = all_of(server);
  challenge[11] = std::byte{77};
  client.take(std::span{challenge}.first(16));
  ASSERT_EQ(client.where(), state::refused);
  EXPECT_NE(client.why().message.find("77"), std::string::npos);
}

}  // namespace
}  // namespace troupe::actors
