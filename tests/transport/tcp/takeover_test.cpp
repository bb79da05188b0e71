// Eavesdroppers that want a lane of another peer: replayed greetings, proofs over something else, a
// second greeting for a lane, and impostors that answer in the peer's place.

#include <filesystem>
#include <optional>
#include <string>

#include "hostile_fixture.hpp"

namespace troupe::transport::tcp {

namespace {

constexpr incarnation their_life{0x3333};

/// A link of the victim that waits for two lanes. The test plays the dialling end.
class takeover : public hostile {
 protected:
  takeover() {
    link_options options;
    options.lanes = 2;
    wire = victim.open(link_role::acceptor, their_life, sink, options);
    const auto offer = decode_offer(wire->offer().payload).value();
    offer_payload mine{.host = "127.0.0.1", .port = 1, .lanes = 2, .link = 5, .secret = {}};
    mine.secret.fill(std::byte{0x42});
    link_number = offer.link;
    secrets = {.acceptors = offer.secret, .dialers = mine.secret};
    EXPECT_TRUE(wire->connect({backend_kind::tcp, their_life, encode(mine)}));
  }
  ~takeover() override { wire->close(); }

  [[nodiscard]] hello greeting_of(std::uint16_t lane) const {
    hello said{
        .lane = lane, .lanes = 2, .link = link_number, .from = their_life, .to = us, .drawn = {}};
    said.drawn.fill(static_cast<std::byte>(0x50 + lane));
    return said;
  }
  using proofs_of = std::function<dialers_proofs(const lane_talk&)>;
  /// The code with which the victim refuses these proofs.
  std::optional<errc> answer_to(const hello& said, const proofs_of& show) {
    const auto fd = dial_victim();
    const auto talk = greet(fd, said);
    say(fd, encode(show(talk)));
    return refusal_from(fd);
  }
  std::optional<errc> answer_to(const hello& said, const link_secrets& with) {
    return answer_to(said, [&](const lane_talk& talk) {
      return proofs_with(with, talk.greeting, talk.challenge);
    });
  }
  /// Completes the link and writes over each of its lanes.
  void goes_on_with(const owned_fd& first, const lane_talk& first_talk) {
    const auto second = dial_victim();
    goes_on_with(first, first_talk, second, prove(second, greeting_of(1), secrets));
  }
  void goes_on_with(const owned_fd& first, const lane_talk& first_talk, const owned_fd& second,
                    const lane_talk& second_talk) {
    EXPECT_TRUE(is_accepted(first, first_talk, secrets));
    EXPECT_TRUE(is_accepted(second, second_talk, secrets));
    ASSERT_TRUE(comes_true([&] { return sink->up.load(); }));
    const auto base = region_size / 2;
    const auto grant =
        wire->grant(victim.region, {{base, 4096, 0, 1}}, access::write, transfer_id{9}).value();
    std::memset(victim.memory.data() + base, 0, 4096);
    for (const auto* fd : {&first, &second}) {
      const auto at = fd == &first ? base : base + 2048;
      send(*fd,
           write_frame(grant, {{.offset = at, .stride = 0, .length = 2048, .count = 1, .index = 0}},
                       2048, 2048));
      std::array<std::byte, trailer_size> trailer{};
      encode_trailer(0, trailer.data());
      send(*fd, trailer);
      EXPECT_EQ(status_from(*fd), 0);
    }
    for (std::size_t i = 0; i < 4096; ++i) {
      ASSERT_EQ(victim.memory[base + i], std::byte{0x66}) << i;
    }
    EXPECT_FALSE(sink->broken);
  }
  /// Ends the connection as the network might: its other end is in this process.
  static void end_at_victim(const owned_fd& fd) {
    sockaddr_in ours{};
    socklen_t size = sizeof ours;
    ASSERT_EQ(::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&ours), &size), 0);
    for (const auto& entry : std::filesystem::directory_iterator{"/proc/self/fd"}) {
      const int other = std::stoi(entry.path().filename());
      sockaddr_in peer{};
      size = sizeof peer;
      if (::getpeername(other, reinterpret_cast<sockaddr*>(&peer), &size) == 0 &&
          peer.sin_family == AF_INET && peer.sin_port == ours.sin_port) {
        ASSERT_EQ(::shutdown(other, SHUT_RDWR), 0);
        return;
      }
    }
    FAIL() << "the victim has no such connection";
  }
  void expect_waiting() {
    EXPECT_FALSE(sink->up);
    EXPECT_FALSE(sink->broken);
  }

  std::shared_ptr<quiet_sink> sink{std::make_shared<quiet_sink>()};
  std::shared_ptr<link> wire;
  std::uint64_t link_number{0};
  link_secrets secrets;
};

/// The link of a victim that has not received the dialer's offer yet.
class early_dialler : public takeover {
 protected:
  early_dialler() {
    link_options options;
    options.lanes = 2;
    wire->close();
    sink = std::make_shared<quiet_sink>();
    wire = victim.open(link_role::acceptor, their_life, sink, options);
    const auto offer = decode_offer(wire->offer().payload).value();
    link_number = offer.link;
    secrets.acceptors = offer.secret;
  }
  void give_offer() {
    const offer_payload mine{
        .host = "127.0.0.1", .port = 1, .lanes = 2, .link = 5, .secret = secrets.dialers};
    EXPECT_TRUE(wire->connect({backend_kind::tcp, their_life, encode(mine)}));
  }
};

/// An impostor that the victim dials.
class false_peer : public hostile {
 protected:
  false_peer() {
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof at;
    EXPECT_EQ(::bind(door.get(), reinterpret_cast<sockaddr*>(&at), size), 0);
    EXPECT_EQ(::listen(door.get(), 1), 0);
    EXPECT_EQ(::getsockname(door.get(), reinterpret_cast<sockaddr*>(&at), &size), 0);
    dialer = victim.open(link_role::initiator, their_life, sink);
    const offer_payload theirs{
        .host = "127.0.0.1", .port = ntohs(at.sin_port), .lanes = 1, .link = 5, .secret = {}};
    EXPECT_TRUE(dialer->connect({backend_kind::tcp, their_life, encode(theirs)}));
    fd = owned_fd{::accept4(door.get(), nullptr, nullptr, SOCK_CLOEXEC)};
    greeting = hear<hello_bytes>(fd);
  }
  ~false_peer() override { dialer->close(); }

  /// The proof that the dialer shows.
  lane_proof ask() {
    hello_reply question{.kind = reply_kind::challenge, .status = 0, .body = {}};
    question.body.fill(std::byte{7});
    say(fd, encode(question));
    return decode_proofs(hear<proof_bytes>(fd)).proof;
  }
  errc reason() {
    EXPECT_TRUE(comes_true([&] { return sink->broken.load(); }));
    EXPECT_FALSE(sink->up);
    const std::lock_guard lock{sink->mutex};
    return sink->reason.code;
  }

  owned_fd door{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
  std::shared_ptr<quiet_sink> sink{std::make_shared<quiet_sink>()};
  std::shared_ptr<link> dialer;
  owned_fd fd;
  hello_bytes greeting{};
};

}  // namespace

TEST_F(takeover, a_replayed_greeting_gets_nothing) {
  const auto first = dial_victim();
  const auto seen = prove(first, greeting_of(0), secrets);
  // An exact replay of the dialer's proofs, which answer another challenge.
  const auto sniffer = dial_victim();
  say(sniffer, seen.greeting);
  EXPECT_NE(hear<reply_bytes>(sniffer), seen.challenge);
  say(sniffer, seen.shown);
  EXPECT_EQ(refusal_from(sniffer), errc::unauthorized);
  EXPECT_TRUE(hangs_up(sniffer));
  expect_waiting();
  goes_on_with(first, seen);
}

TEST_F(takeover, no_secret_is_in_what_passes_on_the_way) {
  const auto first = dial_victim();
  const auto seen = prove(first, greeting_of(0), secrets);
  const auto holds = [](const auto& message, const token& secret) {
    return std::search(message.begin(), message.end(), secret.begin(), secret.end()) !=
           message.end();
  };
  for (const auto& secret : {secrets.acceptors, secrets.dialers}) {
    EXPECT_FALSE(holds(seen.greeting, secret) || holds(seen.challenge, secret) ||
                 holds(seen.shown, secret));
  }
}

TEST_F(takeover, a_second_connection_for_a_lane_that_is_proved_is_refused_and_the_first_stays) {
  const auto first = dial_victim();
  const auto talk = prove(first, greeting_of(0), secrets);
  const auto before = wire->stats().refused;
  // Refused even with a correct proof.
  EXPECT_EQ(answer_to(greeting_of(0), secrets), errc::already_exists);
  EXPECT_EQ(wire->stats().refused, before + 1);
  EXPECT_GE(notices_, 1);
  expect_waiting();
  goes_on_with(first, talk);
}

TEST_F(takeover, a_lane_whose_connection_has_ended_may_be_dialled_again) {
  {
    const auto lost = dial_victim();
    prove(lost, greeting_of(0), secrets);
    EXPECT_EQ(answer_to(greeting_of(0), secrets), errc::already_exists);  // the lane is there now
  }
  std::optional<owned_fd> first;
  lane_talk talk;
  auto unknown = greeting_of(0);
  ++unknown.link;
  const auto is_taken = [&] {
    first = dial_victim();
    talk = prove(*first, greeting_of(0), secrets);
    // When a later greeting is answered, this one would have been refused.
    EXPECT_EQ(answer_to(unknown, secrets), errc::unauthorized);
    char next = 0;
    return ::recv(first->get(), &next, 1, MSG_PEEK | MSG_DONTWAIT) < 0 && errno == EAGAIN;
  };
  ASSERT_TRUE(comes_true(is_taken));
  goes_on_with(*first, talk);
}

TEST_F(takeover, a_lane_whose_connection_ends_while_others_are_awaited_is_awaited_again) {
  const auto lost = dial_victim();
  prove(lost, greeting_of(0), secrets);
  EXPECT_EQ(answer_to(greeting_of(0), secrets), errc::already_exists);  // the lane is there by now
  end_at_victim(lost);
  const auto second = dial_victim();
  const auto second_talk = prove(second, greeting_of(1), secrets);
  EXPECT_EQ(answer_to(greeting_of(1), secrets), errc::already_exists);
  expect_waiting();
  const auto first = dial_victim();
  const auto talk = prove(first, greeting_of(0), secrets);
  goes_on_with(first, talk, second, second_talk);
}

TEST_F(takeover, a_wrong_proof_is_refused) {
  const auto said = greeting_of(0);
  auto wrong = secrets;
  wrong.dialers[3] ^= std::byte{1};
  EXPECT_EQ(answer_to(said, wrong), errc::unauthorized);
  wrong = secrets;
  wrong.acceptors[15] ^= std::byte{0x80};
  EXPECT_EQ(answer_to(said, wrong), errc::unauthorized);
  EXPECT_EQ(answer_to(said, {.acceptors = secrets.dialers, .dialers = secrets.acceptors}),
            errc::unauthorized);
  EXPECT_EQ(answer_to(said, link_secrets{}), errc::unauthorized);
  // One of the two proofs is not enough; nor is the one for the other lane, nor the acceptor's own.
  const auto right = [&](const lane_talk& talk) {
    return proofs_with(secrets, talk.greeting, talk.challenge);
  };
  const std::vector<proofs_of> others{
      [&](const lane_talk& talk) {
        return dialers_proofs{.invitation = right(talk).invitation, .proof = {}};
      },
      [&](const lane_talk& talk) {
        return dialers_proofs{.invitation = {}, .proof = right(talk).proof};
      },
      [&](const lane_talk& talk) {
        return dialers_proofs{.invitation = right(talk).proof, .proof = right(talk).invitation};
      },
      [&](const lane_talk& talk) {
        return dialers_proofs{
            .invitation = right(talk).invitation,
            .proof = prove_lane(link_role::acceptor, secrets.key(), talk.greeting, talk.challenge)};
      }};
  for (const auto& show : others) EXPECT_EQ(answer_to(said, show), errc::unauthorized);
  // A link that nobody waits for gets the same answer.
  auto unknown = said;
  ++unknown.link;
  EXPECT_EQ(answer_to(unknown, secrets), errc::unauthorized);
  expect_waiting();
}

TEST_F(takeover, a_proof_for_one_lane_is_none_for_another) {
  const auto of_the_other = [&](const lane_talk& talk) {
    return proofs_with(secrets, encode(greeting_of(0)), talk.challenge);
  };
  EXPECT_EQ(answer_to(greeting_of(1), of_the_other), errc::unauthorized);
  expect_waiting();
}

TEST_F(takeover, a_proof_that_is_right_of_another_life_or_of_lanes_that_make_no_sense_is_refused) {
  auto said = greeting_of(0);
  said.from = incarnation{their_life.value + 1};
  EXPECT_EQ(answer_to(said, secrets), errc::stale_incarnation);
  said = greeting_of(0);
  said.to = incarnation{us.value + 1};
  EXPECT_EQ(answer_to(said, secrets), errc::stale_incarnation);
  for (const auto& [lane, lanes] :
       {std::pair{0, 0}, {2, 2}, {0, 3}, {65'535, 65'535}, {0, 65'535}}) {
    said = greeting_of(0);
    said.lane = static_cast<std::uint16_t>(lane);
    said.lanes = static_cast<std::uint16_t>(lanes);
    EXPECT_EQ(answer_to(said, secrets), errc::invalid_config) << lane << " of " << lanes;
  }
  expect_waiting();
}

TEST_F(takeover, greetings_cut_anywhere_and_greetings_that_go_on_get_nothing) {
  const auto bytes = encode(greeting_of(0));
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    const auto fd = dial_victim();
    send(fd, std::span{bytes}.first(size));
  }
  const auto half_a_proof = dial_victim();
  static_cast<void>(greet(half_a_proof, greeting_of(0)));
  send(half_a_proof, std::array<std::byte, proof_size - 1>{});
  const auto too_much = dial_victim();
  std::vector<std::byte> more(bytes.begin(), bytes.end());
  more.resize(4096, std::byte{1});
  send(too_much, more);
  EXPECT_TRUE(comes_true([&] {
    char c[256];
    const auto got = ::recv(too_much.get(), c, sizeof c, MSG_DONTWAIT);
    return got == 0 || (got < 0 && errno != EAGAIN);
  }));
  EXPECT_TRUE(hangs_up(half_a_proof));
  expect_waiting();
  const auto first = dial_victim();
  const auto talk = prove(first, greeting_of(0), secrets);
  goes_on_with(first, talk);
}

TEST_F(takeover, a_dialler_of_another_version_is_told_so_before_it_has_said_all) {
  auto bytes = encode(greeting_of(0));
  for (const int version : {1, 3}) {
    bytes[8] = static_cast<std::byte>(version);
    for (const std::size_t size : {10U, 80U}) {
      const auto fd = dial_victim();
      send(fd, std::span{bytes}.first(size));
      EXPECT_EQ(refusal_from(fd), errc::version_mismatch) << version << ", " << size;
      EXPECT_TRUE(hangs_up(fd));
    }
  }
}

TEST_F(takeover, who_races_the_dialler_for_its_lanes_never_gets_one) {
  for (int round = 0; round < 60; ++round) {
    link_options options;
    options.lanes = 2;
    auto door_sink = std::make_shared<quiet_sink>();
    auto dialer_sink = std::make_shared<quiet_sink>();
    const auto door = victim.open(link_role::acceptor, them, door_sink, options);
    const auto dialer = friend_.open(link_role::initiator, us, dialer_sink, options);
    const auto sniffed = decode_offer(door->offer().payload).value().link;
    ASSERT_TRUE(door->connect(dialer->offer()));
    std::atomic<bool> enough{false};
    std::atomic<int> accepted{0};
    std::thread racer{[&] {
      for (std::uint16_t lane = 0; !enough; lane = static_cast<std::uint16_t>(1 - lane)) {
        const auto fd = dial_victim();
        const auto talk = greet(
            fd, {.lane = lane, .lanes = 2, .link = sniffed, .from = them, .to = us, .drawn = {}});
        say(fd, encode(proofs_with({}, talk.greeting, talk.challenge)));
        if (!refusal_from(fd)) ++accepted;
      }
    }};
    ASSERT_TRUE(dialer->connect(door->offer()));
    EXPECT_TRUE(comes_true([&] { return dialer_sink->up && door_sink->up; })) << round;
    enough = true;
    racer.join();
    EXPECT_EQ(accepted, 0) << round;
    EXPECT_FALSE(dialer_sink->broken || door_sink->broken) << round;
    dialer->close();
    door->close();
  }
}

TEST_F(early_dialler, is_kept_until_its_offer_is_there) {
  const auto first = dial_victim();
  const auto talk = prove(first, greeting_of(0), secrets);
  EXPECT_EQ(answer_to(greeting_of(0), secrets), errc::already_exists);
  expect_waiting();
  give_offer();
  goes_on_with(first, talk);
}

TEST_F(early_dialler, whose_connection_ended_is_awaited_again) {
  const auto lost = dial_victim();
  prove(lost, greeting_of(0), secrets);
  EXPECT_EQ(answer_to(greeting_of(0), secrets), errc::already_exists);
  const auto second = dial_victim();
  const auto second_talk = prove(second, greeting_of(1), secrets);
  EXPECT_EQ(answer_to(greeting_of(1), secrets), errc::already_exists);
  end_at_victim(lost);
  give_offer();
  expect_waiting();
  const auto first = dial_victim();
  const auto talk = prove(first, greeting_of(0), secrets);
  goes_on_with(first, talk, second, second_talk);
}

TEST_F(early_dialler, that_has_no_offer_of_the_acceptor_is_refused_at_once) {
  EXPECT_EQ(answer_to(greeting_of(0), {.acceptors = {}, .dialers = secrets.dialers}),
            errc::unauthorized);
  expect_waiting();
}

TEST_F(early_dialler, that_does_not_own_the_offer_is_refused_when_that_comes) {
  auto others = secrets;
  others.dialers.fill(std::byte{0x11});
  const auto fd = dial_victim();
  prove(fd, greeting_of(0), others);
  EXPECT_EQ(answer_to(greeting_of(0), secrets), errc::already_exists);  // the lane is there by now
  give_offer();
  EXPECT_EQ(refusal_from(fd), errc::unauthorized);
  expect_waiting();
  const auto first = dial_victim();
  const auto talk = prove(first, greeting_of(0), secrets);
  goes_on_with(first, talk);
}

TEST_F(false_peer, that_gives_no_proof_is_no_peer) {
  ask();
  say(fd, encode(hello_reply{.kind = reply_kind::verdict, .status = 0, .body = {}}));
  EXPECT_EQ(reason(), errc::unauthorized);
}

TEST_F(false_peer, that_says_the_diallers_own_proof_back_is_no_peer) {
  const auto shown = ask();
  say(fd, encode(hello_reply{.kind = reply_kind::verdict, .status = 0, .body = shown}));
  EXPECT_EQ(reason(), errc::unauthorized);
}

TEST_F(false_peer, that_asks_for_no_proof_is_no_peer) {
  say(fd, encode(hello_reply{.kind = reply_kind::verdict, .status = 0, .body = {}}));
  EXPECT_EQ(reason(), errc::peer_unreachable);
}

TEST_F(false_peer, that_asks_twice_is_no_peer) {
  ask();
  say(fd, encode(hello_reply{.kind = reply_kind::challenge, .status = 0, .body = {}}));
  EXPECT_EQ(reason(), errc::peer_unreachable);
}

TEST_F(false_peer, that_says_something_else_is_no_peer) {
  say(fd, std::string(reply_size, 'x'));
  EXPECT_EQ(reason(), errc::peer_unreachable);
}

TEST_F(false_peer, of_an_older_release_is_named_as_such) {
  // The refusal and the agreement of release 1.
  auto reply = encode(hello_reply{.kind = reply_kind::refusal, .status = 0, .body = {}});
  reply[8] = std::byte{1};
  say(fd, reply);
  EXPECT_EQ(reason(), errc::version_mismatch);
}

TEST_F(false_peer, that_has_the_lane_already_gives_a_reason_to_try_again) {
  ask();
  say(fd, refusal_of(errc::already_exists));
  EXPECT_EQ(reason(), errc::link_broken);
}

}  // namespace troupe::transport::tcp
