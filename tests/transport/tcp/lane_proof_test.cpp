#include "troupe/transport/tcp/lane_proof.hpp"

#include <gtest/gtest.h>

namespace troupe::transport::tcp {
namespace {

class lane_proof_test : public ::testing::Test {
 protected:
  lane_proof_test() {
    for (std::size_t i = 0; i < token_size; ++i) {
      acceptors[i] = static_cast<std::byte>(i);
      dialers[i] = static_cast<std::byte>(i + token_size);
    }
    hello h{.lane = 1, .lanes = 2, .link = 3, .from = {4}, .to = {5}, .drawn = {}};
    h.drawn.fill(std::byte{6});
    said = encode(h);
    hello_reply r{.kind = reply_kind::challenge, .status = 0, .body = {}};
    r.body.fill(std::byte{7});
    challenge = encode(r);
    key = key_of_lanes(acceptors, dialers);
  }
  [[nodiscard]] lane_proof dialers_proof() const {
    return prove_lane(link_role::initiator, key, said, challenge);
  }

  token acceptors{}, dialers{};
  hello_bytes said{};
  reply_bytes challenge{};
  lane_key key{};
};

TEST_F(lane_proof_test, a_proof_fits_its_greeting_its_challenge_and_its_key_to_the_bit) {
  const auto right = dialers_proof();
  const auto changes_with = [&](auto& bytes) {
    for (std::size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
      bytes[bit / 8] ^= std::byte{1} << (bit % 8);
      EXPECT_FALSE(same_proof(dialers_proof(), right)) << "bit " << bit;
      bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    }
  };
  changes_with(said);
  changes_with(challenge);
  changes_with(key);
  EXPECT_TRUE(same_proof(dialers_proof(), right));
}

TEST_F(lane_proof_test, one_ends_proof_is_not_the_others) {
  EXPECT_FALSE(same_proof(dialers_proof(), prove_lane(link_role::acceptor, key, said, challenge)));
}

TEST_F(lane_proof_test, an_invitation_is_no_proof_and_fits_its_messages_and_its_secret) {
  const auto right = prove_invitation(acceptors, said, challenge);
  EXPECT_FALSE(same_proof(right, dialers_proof()));
  // Also if the second half of the key is empty: the label differs.
  EXPECT_FALSE(same_proof(
      right, prove_lane(link_role::initiator, key_of_lanes(acceptors, {}), said, challenge)));
  EXPECT_FALSE(same_proof(right, prove_invitation(dialers, said, challenge)));
  said[10] ^= std::byte{1};
  EXPECT_FALSE(same_proof(right, prove_invitation(acceptors, said, challenge)));
}

TEST_F(lane_proof_test, both_proofs_of_a_dialler_survive_the_wire) {
  const dialers_proofs shown{.invitation = prove_invitation(acceptors, said, challenge),
                             .proof = dialers_proof()};
  const auto back = decode_proofs(encode(shown));
  EXPECT_EQ(back.invitation, shown.invitation);
  EXPECT_EQ(back.proof, shown.proof);
}

TEST_F(lane_proof_test, the_secrets_of_both_offers_are_in_it_in_their_places) {
  EXPECT_NE(key_of_lanes(acceptors, dialers), key_of_lanes(dialers, acceptors));
}

}  // namespace
}  // namespace troupe::transport::tcp
