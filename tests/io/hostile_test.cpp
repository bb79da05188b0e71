#include <algorithm>
#include <string_view>

#include "agents.hpp"
#include "raw_peer.hpp"

// Peers that have a descriptor and violate the protocol.
namespace troupe::io {

using transport::direction;

namespace {

const way by_tcp{transport::backend_kind::tcp, 1};

descriptor described(const agent_node& of) {
  return descriptor::decode(of.self->describe().value()).value();
}

errc refused_as(const std::optional<control_message>& answer) {
  const auto* const no = answer ? std::get_if<refusal>(&*answer) : nullptr;
  return no == nullptr ? errc{} : no->why.code;
}

bool holds(std::span<const std::byte> bytes, const agent_token& token) {
  return !std::ranges::search(bytes, token).empty();
}

/// A transfer of 64 bytes to the memory that the peer described last.
transfer_handle move_some(agent_node& a, peer_id to) {
  const auto number = a.self->remote_memories(to)->back().number;
  const auto over = a.self->session(a.kv, to, number).value();
  return a.self->move(direction::write, over, std::vector<segment>{{0, 0, 64}}, {}, 0ms).value();
}

status end_of(agent_node& a, transfer_handle which) {
  EXPECT_EQ(a.self->wait(std::vector{which}, wait_for::all, long_time), 1U);
  return a.self->status_of(which).value();
}

/// As `end_of`, where nothing but the transfer's end is waited for.
status end_soon(agent_node& a, transfer_handle which) {
  EXPECT_EQ(a.self->wait(std::vector{which}, wait_for::all, testing::wait_limit), 1U)
      << "the transfer never ends";
  return a.self->status_of(which).value();
}

/// The grants in the next answer over the link; empty if it grants nothing. Skips counts, which may
/// come at any time.
std::optional<grants> next_grants(raw_link& link) {
  while (true) {
    const auto bytes = link.next();
    auto said = decode_frame(bytes);
    if (said && std::holds_alternative<taken>(*said)) continue;
    return said && std::holds_alternative<grants>(*said)
               ? std::optional{std::get<grants>(std::move(*said))}
               : std::nullopt;
  }
}

described_memory made_up(std::uint64_t number, std::uint64_t address = 0x10000) {
  return {.number = number,
          .rights = transport::access::read_write,
          .parts = {{region_id{1}, 0, address, 4096}}};
}

}  // namespace

// -- greetings

TEST(hostile_test, nobody_greets_an_agent_as_that_agent) {
  const agent_node b{"b", by_tcp};
  raw_dialer raw{described(b)};
  raw.self.life = raw.to.life;
  EXPECT_EQ(refused_as(raw.greet()), errc::invalid_config);
  EXPECT_TRUE(b.self->report().peers.empty());
}

TEST(hostile_test, whoever_has_greeted_introduces_itself_as_the_same) {
  agent_node b{"b", by_tcp};
  // Transfers between the agent's own memories would trust what such a peer says.
  const auto own = b.self->add_peer(b.self->describe().value()).value();
  const auto before = b.self->remote_memories(own)->size();
  raw_dialer raw{described(b)};
  auto forged = raw.to;
  forged.memories = {made_up(4711, b.address())};
  ASSERT_TRUE(raw.greet());
  EXPECT_EQ(refused_as(raw.introduce(forged)), errc::unauthorized);
  EXPECT_EQ(b.self->remote_memories(own)->size(), before);
  EXPECT_EQ(b.self->report().peers.size(), 1U);
}

TEST(hostile_test, nobody_describes_memory_in_a_greeting) {
  const agent_node b{"b", by_tcp};
  raw_dialer raw{described(b)};
  auto more = raw.self;
  for (std::uint64_t i = 1; i < 20; ++i) more.memories.push_back(made_up(i));
  ASSERT_TRUE(raw.greet());
  EXPECT_EQ(refused_as(raw.introduce(more)), errc::unauthorized);
  EXPECT_TRUE(b.self->report().peers.empty());
}

TEST(hostile_test, whoever_comes_and_goes_is_told_of_once) {
  const agent_node b{"b", by_tcp};
  raw_dialer raw{described(b)};
  for (int round = 0; round < 30; ++round) ASSERT_TRUE(raw.enter());
  raw.channel.reset();
  ASSERT_TRUE(testing::comes_true([&] { return b.self->report().events > 0; }));
  ASSERT_TRUE(raw.enter());
  raw.channel.reset();
  ASSERT_TRUE(raw.enter());
  EXPECT_EQ(b.self->report().events, 1U);
  EXPECT_EQ(b.self->take(10).size(), 1U);
}

TEST(hostile_test, lives_that_are_made_up_are_forgotten_with_their_events) {
  constexpr std::size_t most = 4;
  const agent_node b{"b", by_tcp, [](agent_options& o) { o.max_peers = most; }};
  raw_dialer raw{described(b)};
  for (int round = 0; round < 40; ++round) {
    raw.self.life = incarnation{transport::random_id()};
    // The agent may not have noticed yet that the previous peer is gone.
    ASSERT_TRUE(testing::comes_true([&] { return raw.enter(); }));
    raw.channel.reset();
  }
  const auto said = b.self->report();
  EXPECT_LE(said.peers.size(), most);
  EXPECT_LE(said.events, most);
}

TEST(hostile_test, more_than_256_peers_use_one_agent) {
  constexpr std::size_t many = 260;
  const agent_node b{"b", by_tcp};
  raw_dialer raw{described(b)};
  std::vector<std::unique_ptr<raw_channel>> stay;
  for (std::size_t i = 0; i < many; ++i) {
    raw.self.life = incarnation{transport::random_id()};
    ASSERT_TRUE(raw.enter()) << "guest " << i;
    stay.push_back(std::move(raw.channel));
  }
  EXPECT_EQ(b.self->report().peers.size(), many);
}

TEST(hostile_test, what_the_program_adds_counts_for_more_than_a_greeting) {
  // One peer knows only the incarnation; another has the whole descriptor, but claims to live
  // elsewhere.
  for (const bool knows_all : {false, true}) {
    const agent_node a{"a", by_tcp};
    agent_node b{"b", by_tcp};
    raw_dialer raw{described(b)};
    raw.self.life = described(a).life;
    if (knows_all) raw.self.token = described(a).token;
    ASSERT_TRUE(raw.enter());
    const auto a_of_b = b.self->add_peer(a.self->describe().value());
    ASSERT_TRUE(a_of_b) << to_string(a_of_b.error());
    EXPECT_EQ(end_of(b, move_some(b, *a_of_b)).now, state::done);
    EXPECT_EQ(b.self->report().peers.size(), 1U);
  }
}

// -- impostors that answer for an agent

TEST(hostile_test, whoever_does_not_prove_itself_gets_no_token) {
  agent_node a{"a", by_tcp};
  const auto token = described(a).token;
  raw_acceptor raw;
  const auto peer = a.self->add_peer(raw.self.encode()).value();
  ASSERT_TRUE(a.self->notify(peer, bytes_of("hello")));
  const auto greeting = raw.accept();
  ASSERT_TRUE(greeting);
  EXPECT_FALSE(holds(encode(*greeting), token));
  auto forged = raw.welcome_for(*greeting);
  forged.proof[0] ^= std::byte{1};
  raw.channel->send(forged);
  EXPECT_FALSE(raw.channel->next()) << "it went on with a stranger";
}

TEST(hostile_test, a_link_that_is_never_answered_for_fails_what_waits) {
  agent_node a{"a", by_tcp, [](agent_options& o) { o.connect_timeout = 1000ms; }};
  raw_acceptor raw;
  raw.self.memories = {made_up(1)};
  const auto peer = a.self->add_peer(raw.self.encode()).value();
  const auto sent = move_some(a, peer);
  ASSERT_TRUE(raw.let_in());
  const auto end = end_of(a, sent);
  EXPECT_EQ(end.now, state::failed);
  EXPECT_THAT(end.why->message,
              ::testing::HasSubstr("did not answer the request for a link in time"));
}

TEST(hostile_test, grants_that_nobody_asked_for_are_not_kept) {
  agent_node a{"a", by_tcp};
  raw_acceptor raw;
  raw.self.memories = {made_up(1)};
  const auto peer = a.self->add_peer(raw.self.encode()).value();
  const auto sent = move_some(a, peer);
  ASSERT_TRUE(raw.let_in());
  const auto link = raw.link();
  ASSERT_TRUE(link);
  const auto asked = link->next();
  ASSERT_EQ(asked, encode_frame(grant_wanted{1}));
  for (std::uint64_t number = 2; number < 1000; ++number) {
    link->send(grants_refused{number, {errc::internal, std::string(2000, 'x')}});
  }
  link->send(grants_refused{1, {errc::internal, "no"}});
  EXPECT_EQ(end_of(a, sent).why->code, errc::internal);
  EXPECT_EQ(a.self->report().peers.front().grants, 0U);
  // A refused grant may be given later, so it is asked for again.
  const auto again = move_some(a, peer);
  EXPECT_EQ(link->next(), encode_frame(grant_wanted{1}));
  link->send(grants_refused{1, {errc::internal, "no"}});
  EXPECT_EQ(end_of(a, again).now, state::failed);
}

TEST(hostile_test, a_backend_that_cannot_reach_a_memory_makes_room_for_the_next) {
  agent_node a{"a", by_tcp, [](agent_options& o) {
                 o.backends = {transport::backend_kind::shm, transport::backend_kind::tcp};
               }};
  raw_acceptor raw;
  raw.self.memories = {made_up(1)};
  const auto peer = a.self->add_peer(raw.self.encode()).value();
  const auto sent = move_some(a, peer);
  ASSERT_TRUE(raw.let_in());
  const auto first = raw.link();
  ASSERT_TRUE(first);
  ASSERT_EQ(raw.kind, transport::backend_kind::shm);
  ASSERT_EQ(first->next(), encode_frame(grant_wanted{1}));
  first->send(grants_refused{1, {errc::backend_unavailable, "not over this one"}});
  ASSERT_TRUE(raw.channel->next_of<link_over>());
  const auto second = raw.link();
  ASSERT_TRUE(second);
  EXPECT_EQ(raw.kind, transport::backend_kind::tcp);
  // Notices may have been lost with the first link.
  ASSERT_EQ(second->next(), encode_frame(count_wanted{1}));
  ASSERT_EQ(second->next(), encode_frame(grant_wanted{1}));
  // There is no other backend, so this refusal ends the transfer.
  second->send(grants_refused{1, {errc::backend_unavailable, "nor over this one"}});
  EXPECT_EQ(end_of(a, sent).why->code, errc::backend_unavailable);
}

TEST(hostile_test, a_question_that_a_live_peer_never_answers_ends_the_transfer) {
  agent_node a{"a", by_tcp, [](agent_options& o) { o.grant_timeout = 100ms; }};
  raw_acceptor raw;
  raw.self.memories = {made_up(1)};
  const auto peer = a.self->add_peer(raw.self.encode()).value();
  const auto sent = move_some(a, peer);
  ASSERT_TRUE(raw.let_in());
  const auto link = raw.link();
  ASSERT_TRUE(link);
  ASSERT_EQ(link->next(), encode_frame(grant_wanted{1}));
  const auto end = end_soon(a, sent);
  ASSERT_EQ(end.now, state::failed);
  EXPECT_EQ(end.why->code, errc::peer_unreachable);
  EXPECT_THAT(end.why->message,
              ::testing::HasSubstr("'raw' lives, but did not answer the request for a grant to its "
                                   "memory 1 within 100 ms"));
  EXPECT_EQ(a.self->report().active, 0U);
  EXPECT_EQ(a.self->report().peers.front().grants, 0U);
  EXPECT_TRUE(a.self->release(sent));
  // A late answer does no harm, and the next transfer asks again over the same link.
  link->send(grants_refused{1, {errc::internal, "late"}});
  const auto again = move_some(a, peer);
  EXPECT_EQ(link->next(), encode_frame(grant_wanted{1}));
  EXPECT_EQ(end_soon(a, again).now, state::failed);
  EXPECT_FALSE(link->broken);
  EXPECT_EQ(a.self->report().peers.front().links, 1U);
}

TEST(hostile_test, links_that_break_as_soon_as_they_are_up_end_what_waits) {
  agent_node a{"a", by_tcp, [](agent_options& o) {
                 o.backends = {transport::backend_kind::shm, transport::backend_kind::tcp};
               }};
  raw_acceptor raw;
  raw.self.memories = {made_up(1)};
  const auto peer = a.self->add_peer(raw.self.encode()).value();
  const auto sent = move_some(a, peer);
  ASSERT_TRUE(raw.let_in());
  // Two links over each backend, as where links are refused.
  for (const auto kind : {transport::backend_kind::shm, transport::backend_kind::shm,
                          transport::backend_kind::tcp, transport::backend_kind::tcp}) {
    const auto link = raw.link();
    ASSERT_TRUE(link);
    ASSERT_EQ(raw.kind, kind);
    ASSERT_FALSE(link->next().empty());  // it is up at the agent, too
    link->wire->close();
    ASSERT_TRUE(raw.channel->next_of<link_over>());
  }
  const auto end = end_soon(a, sent);
  ASSERT_EQ(end.now, state::failed);
  EXPECT_THAT(end.why->message, ::testing::HasSubstr("each link to agent 'raw' over tcp broke "
                                                     "before anything moved over it"));
  EXPECT_EQ(a.self->report().active, 0U);
  // The next transfer starts over.
  const auto again = move_some(a, peer);
  const auto link = raw.link();
  ASSERT_TRUE(link);
  EXPECT_EQ(raw.kind, transport::backend_kind::shm);
  EXPECT_TRUE(a.self->cancel(again));
}

TEST(hostile_test, a_peer_that_answers_only_others_on_each_link_holds_no_transfer_for_ever) {
  agent_node a{"a", by_tcp};
  raw_acceptor raw;
  raw.self.memories = {made_up(1), made_up(2, 0x20000)};
  const auto peer = a.self->add_peer(raw.self.encode()).value();
  const auto over = a.self->session(a.kv, peer, 1).value();
  const std::vector<segment> some{{0, 0, 64}};
  const auto held = a.self->move(direction::write, over, some, {}, 0ms).value();
  ASSERT_TRUE(raw.let_in());
  for (int links = 0; links < 8; ++links) {
    EXPECT_EQ(a.self->status_of(held)->now, state::active) << "after " << links << " links";
    const auto link = raw.link();
    ASSERT_TRUE(link);
    const auto other = move_some(a, peer);
    for (auto frame = link->next(); frame != encode_frame(grant_wanted{2}); frame = link->next()) {
      ASSERT_FALSE(frame.empty()) << "it does not ask for the second memory";
    }
    link->send(grants_refused{2, {errc::internal, "no"}});
    ASSERT_EQ(end_soon(a, other).now, state::failed);
    link->wire->close();
    ASSERT_TRUE(raw.channel->next_of<link_over>());
  }
  const auto end = end_soon(a, held);
  ASSERT_EQ(end.now, state::failed);
  EXPECT_THAT(end.why->message, ::testing::HasSubstr("8 links to agent 'raw' broke before"));
}

// -- peers that are granted memory

TEST(hostile_test, whoever_asks_again_for_a_memory_is_told_the_grant_that_it_has) {
  const agent_node b{"b", by_tcp};
  raw_dialer raw{described(b)};
  ASSERT_TRUE(raw.enter());
  const auto link = raw.link();
  link->send(grant_wanted{b.kv.value});
  const auto given = next_grants(*link);
  ASSERT_TRUE(given);
  EXPECT_EQ(given->memory, b.kv.value);
  for (int i = 0; i < 100; ++i) link->send(grant_wanted{b.kv.value});
  // One thread answers in the order of the requests, so this answer comes last.
  const auto last = raw.to.memories.front().number;
  ASSERT_NE(last, b.kv.value);
  link->send(grant_wanted{last});
  std::size_t again = 0;
  auto said = next_grants(*link);
  for (; said && said->memory != last; said = next_grants(*link), ++again) {
    EXPECT_EQ(encode_frame(*said), encode_frame(*given));
  }
  EXPECT_TRUE(said);
  EXPECT_GE(again, 1U);
  EXPECT_FALSE(link->broken);
}

TEST(hostile_test, a_count_says_which_question_it_answers) {
  const agent_node b{"b", by_tcp};
  raw_dialer raw{described(b)};
  ASSERT_TRUE(raw.enter());
  const auto link = raw.link();
  const auto next_count = [&] {
    const auto bytes = link->next();
    const auto said = decode_frame(bytes);
    return said && std::holds_alternative<taken>(*said) ? std::get<taken>(*said) : taken{};
  };
  link->send(count_wanted{7});
  auto count = next_count();
  if (count.answers == 0) count = next_count();  // the count that comes with the link
  EXPECT_EQ(count.answers, 7U);
}

TEST(hostile_test, a_flood_of_questions_is_answered_or_ends_the_link) {
  agent_pair p{by_tcp};
  raw_dialer raw{described(p.b)};
  ASSERT_TRUE(raw.enter());
  const auto link = raw.link();
  for (std::uint64_t number = 1; number < 20'000 && !link->broken; ++number) {
    static_cast<void>(link->wire->send_frame(encode_frame(grant_wanted{number})));
  }
  const auto out = p.make_blocks(direction::write, 4, 4096);
  ASSERT_TRUE(p.a.self->post(out, {}, 0ms));
  EXPECT_EQ(p.ended(p.a, out).now, state::done);
}

// -- peers that leave notices

namespace {

constexpr std::size_t room = 64;
constexpr std::size_t rooms = 16;

std::uint64_t unread_in_all(const agent_node& at) {
  std::uint64_t sum = 0;
  for (const auto& one : at.self->report().peers) sum += one.notices_unread;
  return sum;
}

/// A new life, over a link of its own, that sends as many notices as one peer may leave unread.
std::unique_ptr<raw_dialer> fill_a_room(const agent_node& of) {
  auto raw = std::make_unique<raw_dialer>(described(of));
  EXPECT_TRUE(raw->enter());
  const auto link = raw->link();
  const auto before = unread_in_all(of);
  for (std::size_t i = 0; i < room; ++i) link->send(note{bytes_of("n")});
  EXPECT_TRUE(testing::comes_true([&] { return unread_in_all(of) == before + room; }));
  return raw;
}

}  // namespace

TEST(hostile_test, notices_of_peers_that_come_and_go_are_bounded_in_all) {
  const agent_node b{"b", by_tcp, [](agent_options& o) { o.max_notices = room; }};
  for (std::size_t i = 0; i < rooms; ++i) ASSERT_TRUE(fill_a_room(b));
  ASSERT_EQ(unread_in_all(b), rooms * room);
  // One more: the oldest peer that has left loses its notices, once the agent knows that it left.
  ASSERT_TRUE(testing::comes_true([&] {
    raw_dialer last{described(b)};
    EXPECT_TRUE(last.enter());
    const auto link = last.link();
    link->send(note{bytes_of("more")});
    return testing::comes_true(
               [&] { return link->broken || b.self->report().notices_dropped > 0; }) &&
           b.self->report().notices_dropped > 0;
  }));
  EXPECT_EQ(b.self->report().notices_dropped, room);
  // The oldest of those that are known to have left: mostly the first.
  const auto peers = b.self->report().peers;
  const auto loser_at = std::ranges::find(peers, 0U, &peer_report::notices_unread);
  ASSERT_NE(loser_at, peers.end());
  const auto& loser = *loser_at;
  const auto events = b.self->take(100);
  const auto told = std::ranges::find(events, loser.who, &event::who);
  ASSERT_NE(told, events.end());
  EXPECT_EQ(told->what, event_kind::peer_lost);
  ASSERT_TRUE(told->why);
  EXPECT_EQ(told->why->code, errc::overloaded);
  EXPECT_THAT(told->why->message, ::testing::HasSubstr("its 64 unread notices were dropped"));
  const auto came = b.self->take_notices(2 * rooms * room);
  EXPECT_EQ(came.size(), (rooms - 1) * room + 1);
  EXPECT_EQ(std::ranges::count(came, loser.who, &notice::life), 0);
  EXPECT_EQ(text_of(came.back().bytes), "more");
  EXPECT_EQ(unread_in_all(b), 0U);
}

TEST(hostile_test, whoever_sends_more_than_all_peers_may_loses_its_link) {
  const agent_node b{"b", by_tcp, [](agent_options& o) { o.max_notices = room; }};
  std::vector<std::unique_ptr<raw_dialer>> stay;
  for (std::size_t i = 0; i < rooms; ++i) stay.push_back(fill_a_room(b));
  raw_dialer last{described(b)};
  ASSERT_TRUE(last.enter());
  const auto refused = last.link();
  refused->send(note{bytes_of("more")});
  ASSERT_TRUE(testing::comes_true([&] { return refused->broken.load(); }));
  EXPECT_EQ(unread_in_all(b), rooms * room);
  EXPECT_EQ(b.self->report().notices_dropped, 0U) << "those peers live";
  EXPECT_EQ(b.self->take_notices(2 * rooms * room).size(), rooms * room);
  last.link()->send(note{bytes_of("again")});
  ASSERT_TRUE(testing::comes_true([&] { return unread_in_all(b) == 1; }));
  EXPECT_EQ(text_of(b.self->take_notices(1).at(0).bytes), "again");
}

}  // namespace troupe::io
