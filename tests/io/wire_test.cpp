#include "troupe/io/wire.hpp"

#include <gtest/gtest.h>

namespace troupe::io {

namespace {

transport::host_identity somewhere() {
  transport::host_identity where;
  where.boot_id = "boot";
  where.network_namespace = 1;
  where.pid_namespace = 2;
  where.user_namespace = 3;
  where.pid = 4;
  where.uid = 5;
  where.gpus = {"0000:1b:00.0", "0000:1c:00.0"};
  return where;
}

transport::link_offer an_offer() {
  return {.kind = transport::backend_kind::shm,
          .owner = incarnation{8},
          .payload = std::vector<std::byte>(100, std::byte{3})};
}

transport::remote_grant a_grant() {
  transport::remote_grant grant;
  grant.id = 11;
  grant.region = region_id{12};
  grant.owner = incarnation{13};
  grant.transfer = transfer_id{14};
  grant.standing = true;
  grant.rights = transport::access::write;
  grant.region_size = 4096;
  grant.permitted = {{100, 200, 0, 1}};
  grant.key = std::vector<std::byte>(16, std::byte{9});
  return grant;
}

std::vector<control_message> all_messages() {
  hello greeting;
  greeting.to = incarnation{77};
  greeting.from = incarnation{78};
  greeting.nonce.fill(std::byte{1});
  greeting.proof.fill(std::byte{2});
  greeting.where = somewhere();
  welcome answer;
  answer.proof.fill(std::byte{3});
  answer.where = somewhere();
  return {challenge{},
          greeting,
          answer,
          refusal{{errc::unauthorized, "no"}},
          introduction{std::vector<std::byte>(60, std::byte{4})},
          accepted{.room = {10, 20}, .received = {5, 6}, .taken = {3, 4}},
          link_wanted{.attempt = 3, .lanes = 4, .offer = an_offer()},
          link_answer{.attempt = 3, .refused = {}, .offer = an_offer()},
          link_answer{.attempt = 3, .refused = troupe::error{errc::no_device, "none"}, .offer = {}},
          link_over{3},
          ping{},
          pong{}};
}

std::vector<link_frame> all_frames(std::span<const std::byte> bytes) {
  return {note{bytes},
          grant_wanted{5},
          grants{5, {a_grant(), a_grant()}},
          grants_refused{5, {errc::grant_revoked, "gone"}},
          taken{{1, 2}, {3, 4}, 5},
          count_wanted{6}};
}

constexpr std::size_t length_size = 4;

}  // namespace

TEST(wire_test, every_message_comes_back_and_none_that_was_cut_or_is_followed_by_more) {
  for (const auto& said : all_messages()) {
    const auto bytes = encode(said);
    const auto body = std::span{bytes}.subspan(length_size);
    EXPECT_EQ(std::to_integer<std::size_t>(bytes[0]) + 256 * std::to_integer<std::size_t>(bytes[1]),
              body.size());
    const auto came = decode_control(body);
    ASSERT_TRUE(came) << said.index() << " " << to_string(came.error());
    EXPECT_EQ(came->index(), said.index());
    EXPECT_EQ(encode(*came), bytes) << said.index();
    for (std::size_t size = 0; size < body.size(); ++size) {
      EXPECT_FALSE(decode_control(body.first(size))) << said.index() << " of " << size;
    }
    std::vector<std::byte> longer{body.begin(), body.end()};
    longer.push_back(std::byte{0});
    EXPECT_FALSE(decode_control(longer)) << said.index();
  }
}

TEST(wire_test, every_frame_comes_back_and_none_that_was_cut) {
  const std::vector<std::byte> words(20, std::byte{6});
  for (const auto& said : all_frames(words)) {
    const auto bytes = encode_frame(said);
    const auto came = decode_frame(bytes);
    ASSERT_TRUE(came) << said.index();
    EXPECT_EQ(came->index(), said.index());
    EXPECT_EQ(encode_frame(*came), bytes) << said.index();
    if (std::holds_alternative<note>(said)) continue;  // any bytes are a valid notice
    for (std::size_t size = 0; size < bytes.size(); ++size) {
      EXPECT_FALSE(decode_frame(std::span{bytes}.first(size))) << said.index() << " of " << size;
    }
  }
  EXPECT_FALSE(decode_frame({}));
  EXPECT_FALSE(decode_frame(std::vector<std::byte>(10, std::byte{200})));
}

TEST(wire_test, a_grant_that_goes_beyond_its_region_is_refused) {
  auto grant = a_grant();
  grant.permitted = {{4000, 97, 0, 1}};
  EXPECT_FALSE(decode_frame(encode_frame(grants{5, {grant}})));
  grant.permitted = {{4000, 96, 0, 1}};
  const auto came = decode_frame(encode_frame(grants{5, {grant}}));
  ASSERT_TRUE(came);
  EXPECT_EQ(std::get<grants>(*came).parts.front(), grant);
}

TEST(wire_test, another_version_is_named) {
  const auto bytes = encode(challenge{.version = 2, .nonce = {}});
  const auto came = decode_control(std::span{bytes}.subspan(length_size));
  ASSERT_FALSE(came);
  EXPECT_EQ(came.error().code, errc::version_mismatch);
}

TEST(wire_test, a_proof_is_of_one_token_one_role_both_nonces_and_both_lives) {
  agent_token token{};
  control_nonce one{};
  control_nonce other{};
  other[0] = std::byte{1};
  const incarnation a{1};
  const incarnation b{2};
  const auto right = prove(proof_role::dialer, token, one, other, a, b);
  EXPECT_TRUE(same_proof(right, prove(proof_role::dialer, token, one, other, a, b)));
  EXPECT_FALSE(same_proof(right, prove(proof_role::acceptor, token, one, other, a, b)));
  EXPECT_FALSE(same_proof(right, prove(proof_role::dialer, token, other, one, a, b)));
  EXPECT_FALSE(same_proof(right, prove(proof_role::dialer, token, one, one, a, b)));
  EXPECT_FALSE(same_proof(right, prove(proof_role::dialer, token, one, other, b, a)));
  token[15] = std::byte{1};
  EXPECT_FALSE(same_proof(right, prove(proof_role::dialer, token, one, other, a, b)));
}

}  // namespace troupe::io
