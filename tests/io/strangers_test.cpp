#include <fstream>
#include <thread>

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "troupe/io/descriptor.hpp"

#include "agents.hpp"
#include "fails_with.hpp"
#include "rude_host.hpp"
#include "scratch_folder.hpp"

// Descriptors and greetings that are wrong, forged, or of a former incarnation.
namespace troupe::io {

using transport::direction;
using troupe::testing::fails_with;

namespace {

/// The error that ends a transfer to the peer which the descriptor describes.
troupe::error end_of_transfer(agent_node& a, const descriptor& forged) {
  const auto peer = a.self->add_peer(forged.encode());
  EXPECT_TRUE(peer) << to_string(peer.error());
  const auto over =
      a.self->session(a.kv, *peer, a.self->remote_memories(*peer)->back().number).value();
  const auto sent =
      a.self->move(direction::write, over, std::vector<segment>{{0, 0, 64}}, bytes_of("!"), 0ms);
  EXPECT_TRUE(sent) << to_string(sent.error());
  EXPECT_EQ(a.self->wait(std::vector{*sent}, wait_for::all, long_time), 1U);
  return a.self->status_of(*sent)->why.value_or(troupe::error{});
}

descriptor described(const agent_node& of) {
  return descriptor::decode(of.self->describe().value()).value();
}

const way by_tcp{transport::backend_kind::tcp, 1};

}  // namespace

TEST(strangers_test, a_forged_token_is_unauthorized_and_moves_nothing) {
  agent_node a{"a", by_tcp};
  const agent_node b{"b", by_tcp};
  std::memset(b.memory.data(), 0, b.memory.size());
  auto forged = described(b);
  forged.token[3] ^= std::byte{1};
  const auto why = end_of_transfer(a, forged);
  EXPECT_EQ(why.code, errc::unauthorized) << why.message;
  EXPECT_TRUE(b.self->take_notices(1).empty());
  EXPECT_EQ(b.memory[0], std::byte{0});
  EXPECT_TRUE(b.self->report().peers.empty());
  // The refusal is permanent: a wrong descriptor does not become right.
  const auto again = a.self->notify(a.self->report().peers.front().who, bytes_of("?"));
  EXPECT_EQ(code_of(again), errc::unauthorized);
}

TEST(strangers_test, a_descriptor_of_a_former_life_is_stale) {
  agent_node a{"a", by_tcp};
  const agent_node b{"b", by_tcp};
  auto former = described(b);
  former.life = incarnation{former.life.value ^ 1};
  const auto why = end_of_transfer(a, former);
  EXPECT_EQ(why.code, errc::stale_incarnation) << why.message;
  EXPECT_THAT(why.message, ::testing::HasSubstr("not the incarnation"));
}

TEST(strangers_test, a_descriptor_of_another_token_for_a_known_life_is_refused_at_once) {
  agent_node a{"a", by_tcp};
  const agent_node b{"b", by_tcp};
  ASSERT_TRUE(a.self->add_peer(b.self->describe().value()));
  auto forged = described(b);
  forged.token[0] ^= std::byte{1};
  EXPECT_EQ(code_of(a.self->add_peer(forged.encode())), errc::unauthorized);
  auto as_self = described(a);
  as_self.token[0] ^= std::byte{1};
  EXPECT_EQ(code_of(a.self->add_peer(as_self.encode())), errc::unauthorized);
  EXPECT_EQ(code_of(a.self->add_peer(bytes_of("nonsense"))), errc::invalid_config);
}

TEST(strangers_test, a_memory_that_was_never_registered_is_not_granted) {
  agent_node a{"a", by_tcp};
  const agent_node b{"b", by_tcp};
  auto forged = described(b);
  forged.memories.push_back({.number = 4711,
                             .rights = transport::access::read_write,
                             .parts = {{region_id{1}, 0, b.address(), 4096}}});
  const auto why = end_of_transfer(a, forged);
  EXPECT_EQ(why.code, errc::grant_revoked) << why.message;
}

TEST(strangers_test, whoever_knows_one_memory_cannot_name_another) {
  agent_node a{"a", by_tcp};
  const agent_node b{"b", by_tcp};
  // `b` has another memory, registered before this one.
  auto forged = descriptor::decode(b.self->describe(std::vector{b.kv}).value()).value();
  for (const auto number : {b.kv.value - 1, b.kv.value + 1, std::uint64_t{1}}) {
    forged.memories = {{.number = number,
                        .rights = transport::access::read_write,
                        .parts = {{region_id{1}, 0, b.address() - agent_node::guard, 4096}}}};
    const auto why = end_of_transfer(a, forged);
    EXPECT_EQ(why.code, errc::grant_revoked) << why.message;
  }
}

TEST(strangers_test, a_descriptor_of_ours_that_comes_back_changed_moves_nothing_it_should_not) {
  agent_node a{"a", by_tcp};
  const auto read_only =
      a.self->register_memory(a.memory.first(4096), "for readers", transport::access::read).value();
  auto forged = described(a);
  for (auto& one : forged.memories) {
    one.rights = transport::access::read_write;
    one.parts.back().length += 2 * agent_node::guard;
  }
  const auto self = a.self->add_peer(forged.encode()).value();
  const auto end = [&](memory_id to, std::uint64_t offset) {
    const auto over = a.self->session(a.kv, self, to.value).value();
    const auto sent =
        a.self->move(direction::write, over, std::vector<segment>{{0, offset, 64}}, {}, 0ms)
            .value();
    return a.self->status_of(sent)->why.value_or(troupe::error{}).code;
  };
  // Into the guard, and beyond the region: `agent_node` looks at the guard.
  EXPECT_EQ(end(a.kv, agent_node::size), errc::out_of_range);
  EXPECT_EQ(end(a.kv, agent_node::size + agent_node::guard), errc::out_of_range);
  EXPECT_EQ(end(read_only, 0), errc::unauthorized);
  // A transfer by address may find the forged memory as well.
  const std::vector<entry> beyond{{a.address(agent_node::size), 64}};
  const auto there = a.self->prepare(self, beyond).value();
  const auto here = a.self->prepare(std::vector<piece>{{a.kv, 0, 64}}).value();
  const auto out = a.self->make(direction::write, here, {}, there, {}, merge_entries::no).value();
  ASSERT_TRUE(a.self->post(out, {}, 0ms));
  EXPECT_EQ(a.self->status_of(out)->now, state::failed);
}

TEST(strangers_test, rights_and_ends_that_a_descriptor_makes_up_are_refused_by_the_owner) {
  agent_node a{"a", by_tcp};
  agent_node b{"b", by_tcp};
  std::memset(b.memory.data(), 0, b.memory.size());
  const auto part = b.memory.first(4096);
  const auto lent = b.self->register_memory(part, "lent", transport::access::read).value();
  auto forged = descriptor::decode(b.self->describe(std::vector{lent}).value()).value();
  forged.memories.front().rights = transport::access::read_write;
  EXPECT_EQ(end_of_transfer(a, forged).code, errc::unauthorized);
  forged.memories.front().rights = transport::access::read;
  forged.memories.front().parts.front().length = 1 << 20;
  const auto peer = a.self->add_peer(forged.encode()).value();
  const auto over = a.self->session(a.kv, peer, lent.value).value();
  const auto sent =
      a.self->move(direction::read, over, std::vector<segment>{{0, 4096, 64}}, {}, 0ms).value();
  EXPECT_EQ(a.self->wait(std::vector{sent}, wait_for::all, long_time), 1U);
  EXPECT_EQ(a.self->status_of(sent)->why.value_or(troupe::error{}).code, errc::out_of_range);
  EXPECT_EQ(part[0], std::byte{0});
}

TEST(strangers_test, garbage_at_the_port_costs_the_agent_nothing) {
  agent_pair p{by_tcp};
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  to.sin_port = htons(p.b.self->report().port);
  std::vector<std::string> garbage{std::string(1000, 'x'), "GET / HTTP/1.1\r\n\r\n",
                                   std::string(100, '\0'), ""};
  for (int round = 0; round < 50; ++round) {
    const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ASSERT_EQ(::connect(fd, reinterpret_cast<const sockaddr*>(&to), sizeof to), 0);
    const auto& words = garbage[static_cast<std::size_t>(round) % garbage.size()];
    [[maybe_unused]] const auto sent = ::send(fd, words.data(), words.size(), MSG_NOSIGNAL);
    ::close(fd);
  }
  const auto out = p.make_blocks(direction::write, 4, 4096);
  ASSERT_TRUE(p.a.self->post(out, {}, 0ms));
  EXPECT_EQ(p.ended(p.a, out).now, state::done);
}

TEST(strangers_test, of_a_host_that_hangs_up_it_is_known_that_nothing_reached_it) {
  agent_node a{"a", by_tcp};
  const agent_node b{"b", by_tcp};
  const testing::rude_host rude;
  std::thread door{[&] {
    while (rude.guest().get() >= 0) {
    }
  }};
  auto elsewhere = described(b);
  elsewhere.port = rude.port;
  const auto why = end_of_transfer(a, elsewhere);
  ::shutdown(rude.listens.get(), SHUT_RDWR);
  door.join();
  EXPECT_EQ(why.code, errc::peer_unreachable) << why.message;
}

TEST(strangers_test, agents_with_a_secret_know_each_other_by_it) {
  const testing::scratch_folder folder;
  const auto secret = [&](const char* name, char of) {
    const auto path = folder.path() + "/" + name;
    std::ofstream{path} << std::string(40, of) << '\n';
    ::chmod(path.c_str(), 0600);
    return path;
  };
  const auto ours = secret("ours", 'a');
  const auto other = secret("other", 'b');
  const auto with = [](const std::string& path) {
    return [path](agent_options& o) {
      o.security.how = actors::door_security::mode::secret;
      o.security.secret = path;
    };
  };
  agent_node a{"a", by_tcp, with(ours)};
  const agent_node b{"b", by_tcp, with(ours)};
  EXPECT_EQ(end_of_transfer(a, described(b)).message, "");
  const agent_node c{"c", by_tcp, with(other)};
  EXPECT_EQ(end_of_transfer(a, described(c)).code, errc::unauthorized);
  const agent_node d{"d", by_tcp};
  EXPECT_EQ(end_of_transfer(a, described(d)).code, errc::unauthorized);
}

TEST(strangers_test, without_tls_an_agent_listens_at_loopback_only) {
  const auto made = agent::create({.name = "a", .host = "0.0.0.0"});
  ASSERT_THAT(made, fails_with(errc::invalid_config, ::testing::HasSubstr("tls")));
}

TEST(strangers_test, an_address_that_nobody_can_dial_is_refused) {
  for (const auto* const host : {"0.0.0.0", "::"}) {
    agent_options options{.name = "a", .host = host};
    options.security.how = actors::door_security::mode::tls;
    const auto made = agent::create(std::move(options));
    ASSERT_THAT(made, fails_with(errc::invalid_config, ::testing::HasSubstr("no peer can dial")));
  }
}

TEST(strangers_test, options_that_make_no_sense_are_named) {
  const auto refused = [](agent_options options) {
    const auto made = agent::create(std::move(options));
    return made ? std::string{} : made.error().message;
  };
  EXPECT_THAT(refused({}), ::testing::HasSubstr("name"));
  EXPECT_THAT(refused({.name = std::string(257, 'x')}), ::testing::HasSubstr("257"));
  EXPECT_THAT(refused({.name = "a", .lanes = 0}), ::testing::HasSubstr("lanes"));
  EXPECT_THAT(refused({.name = "a", .max_notices = 1}), ::testing::HasSubstr("max_notices"));
  constexpr auto too_many = std::size_t{1} << 63;  // twice as many would be none
  EXPECT_THAT(refused({.name = "a", .max_notices = too_many}),
              ::testing::HasSubstr("max_notices is " + std::to_string(too_many)));
  EXPECT_THAT(refused({.name = "a", .max_notice_bytes = too_many}),
              ::testing::HasSubstr("max_notice_bytes is " + std::to_string(too_many)));
}

TEST(strangers_test, a_taken_port_is_said_at_the_start) {
  const auto first = agent::create({.name = "a"});
  ASSERT_TRUE(first);
  const auto second = agent::create({.name = "b", .port = (*first)->report().port});
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code, errc::already_exists);
}

}  // namespace troupe::io
