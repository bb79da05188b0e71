#pragma once

/// The dialling end of a lane, spoken by hand.

#include <array>
#include <cstddef>
#include <optional>

#include <gtest/gtest.h>
#include <sys/socket.h>

#include "troupe/transport/owned_fd.hpp"
#include "troupe/transport/tcp/lane_proof.hpp"
#include "troupe/transport/tcp/wire.hpp"

namespace troupe::transport::tcp {

template <class Bytes>
void say(const owned_fd& fd, const Bytes& bytes) {
  EXPECT_EQ(::send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(bytes.size()));
}

template <class Bytes>
[[nodiscard]] Bytes hear(const owned_fd& fd) {
  Bytes bytes{};
  EXPECT_EQ(::recv(fd.get(), bytes.data(), bytes.size(), MSG_WAITALL),
            static_cast<ssize_t>(bytes.size()));
  return bytes;
}

/// The messages of one lane's greeting, as an eavesdropper sees them.
struct lane_talk {
  hello_bytes greeting{};
  reply_bytes challenge{};
  proof_bytes shown{};
};

/// Greets, up to the challenge.
inline lane_talk greet(const owned_fd& fd, const hello& said) {
  lane_talk talk;
  talk.greeting = encode(said);
  say(fd, talk.greeting);
  talk.challenge = hear<reply_bytes>(fd);
  const auto question = decode_reply(talk.challenge);
  EXPECT_TRUE(question && question->kind == reply_kind::challenge);
  return talk;
}

/// The secrets of a link's two offers.
struct link_secrets {
  token acceptors{}, dialers{};
  [[nodiscard]] lane_key key() const { return key_of_lanes(acceptors, dialers); }
};

/// The proofs of a dialer that has these secrets.
inline dialers_proofs proofs_with(const link_secrets& with, const hello_bytes& greeting,
                                  const reply_bytes& challenge) {
  return {.invitation = prove_invitation(with.acceptors, greeting, challenge),
          .proof = prove_lane(link_role::initiator, with.key(), greeting, challenge)};
}

/// Goes on up to the proofs; the verdict comes once the other lanes are there.
inline lane_talk prove(const owned_fd& fd, const hello& said, const link_secrets& with) {
  auto talk = greet(fd, said);
  talk.shown = encode(proofs_with(with, talk.greeting, talk.challenge));
  say(fd, talk.shown);
  return talk;
}

/// The code of the refusal that comes next; `nullopt` if something else comes.
inline std::optional<errc> refusal_from(const owned_fd& fd) {
  const auto reply = decode_reply(hear<reply_bytes>(fd));
  if (!reply || reply->kind != reply_kind::refusal) return std::nullopt;
  return static_cast<errc>(reply->status);
}

/// Whether the acceptor takes the lane and has proved itself.
inline bool is_accepted(const owned_fd& fd, const lane_talk& talk, const link_secrets& with) {
  const auto reply = decode_reply(hear<reply_bytes>(fd));
  return reply && reply->kind == reply_kind::verdict &&
         reply->body == prove_lane(link_role::acceptor, with.key(), talk.greeting, talk.challenge);
}

}  // namespace troupe::transport::tcp
