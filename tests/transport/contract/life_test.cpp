#include "pair.hpp"

// How links begin and end.
namespace troupe::transport::contract {

TEST_P(any_lanes, closing_completes_every_batch_once_and_breaks_the_peer) {
  pair p{GetParam()};
  const auto grant = p.grant(p.b, access::read_write, t1);
  std::vector<segment> large;
  for (std::uint64_t i = 0; i < 64; ++i) large.push_back({i * 65'536, i * 65'536, 65'536, 0, 0, 1});
  std::size_t posted = 0;
  for (int i = 0; i < 10; ++i) {
    posted +=
        p.a.wire
            ->post(p.make_batch(p.a, i % 2 == 0 ? direction::write : direction::read, grant, large))
            .has_value();
  }
  p.a.wire->close();
  p.a.wire->close();
  ASSERT_TRUE(p.until([&] { return p.a.sink->completed() == posted; }));
  for (const auto& done : p.a.sink->completions) {
    if (done.failure) {
      EXPECT_EQ(done.failure->code, errc::aborted);
    }
  }
  EXPECT_TRUE(p.until([&] { return p.b.sink->is_broken(); }));
  p.drive_for(5ms);
  EXPECT_FALSE(p.a.sink->is_broken()) << "no on_broken after close";
  EXPECT_EQ(code_of(p.a.wire->post(p.make_batch(p.a, direction::write, grant, large))),
            errc::link_broken);
  EXPECT_EQ(code_of(p.b.wire->send_frame({})), errc::link_broken);
}

TEST_P(backend_contract, a_broken_link_completes_its_batches_before_it_says_so) {
  pair p{GetParam()};
  const auto grant = p.grant(p.a, access::read_write, t1);
  std::size_t posted = 0;
  for (int i = 0; i < 10; ++i) {
    posted += p.b.wire->post(p.make_batch(p.b, direction::write, grant, {{0, 0, 8 << 20, 0, 0, 1}}))
                  .has_value();
  }
  p.a.wire->close();
  ASSERT_TRUE(p.until([&] { return p.b.sink->is_broken(); }));
  EXPECT_EQ(p.b.sink->completions_when_broken, posted);
  EXPECT_EQ(p.b.sink->completed(), posted);
}

TEST_P(backend_contract, a_link_may_be_closed_from_its_own_callback) {
  pair p{GetParam()};
  p.b.sink->when_frame = [&](const std::string&) { p.b.wire->close(); };
  const std::string word = "bye";
  ASSERT_TRUE(p.a.wire->send_frame(std::as_bytes(std::span{word.data(), word.size()})));
  EXPECT_TRUE(p.until([&] { return p.a.sink->is_broken(); }));
}

TEST_P(backend_contract, an_offer_of_another_life_is_refused) {
  pair p{GetParam()};
  auto sink = std::make_shared<recorder>();
  auto opened = p.a.place->open(GetParam().kind,
                                {.role = link_role::initiator, .peer = incarnation{42}}, sink);
  ASSERT_TRUE(opened);
  EXPECT_EQ(code_of((*opened)->connect(p.b.wire->offer())), errc::stale_incarnation);
  auto garbled = p.b.wire->offer();
  garbled.owner = incarnation{42};
  garbled.payload.resize(garbled.payload.size() / 2);
  EXPECT_EQ(code_of((*opened)->connect(garbled)), errc::invalid_config);
  (*opened)->close();
}

TEST_P(backend_contract, a_link_whose_peer_never_comes_breaks_in_time) {
  pair p{GetParam()};
  auto sink = std::make_shared<recorder>();
  auto opened = p.a.place->open(
      GetParam().kind, {.role = link_role::acceptor, .peer = p.b.self, .connect_timeout = 100ms},
      sink);
  ASSERT_TRUE(opened);
  auto other = p.b.place->open(GetParam().kind, {.role = link_role::initiator, .peer = p.a.self},
                               std::make_shared<recorder>());
  ASSERT_TRUE(other);
  ASSERT_TRUE((*opened)->connect((*other)->offer()));
  ASSERT_TRUE(p.until([&] { return sink->is_broken(); }));
  EXPECT_EQ(sink->broken->code, errc::peer_unreachable);
  (*opened)->close();
  (*other)->close();
}

/// Two ends of a new link between the nodes of a pair, with a long connect time-out.
struct joining {
  joining(pair& p, backend_kind kind)
      : dialer{open(kind, p.a, p.b, link_role::initiator, dialer_sink)},
        acceptor{open(kind, p.b, p.a, link_role::acceptor, acceptor_sink)} {}
  ~joining() {
    dialer->close();
    acceptor->close();
  }
  static std::shared_ptr<link> open(backend_kind kind, const end& at, const end& to, link_role role,
                                    const std::shared_ptr<recorder>& sink) {
    return *at.place->open(
        kind, {.role = role, .peer = to.self, .connect_timeout = longer_than_any_wait}, sink);
  }

  std::shared_ptr<recorder> dialer_sink{std::make_shared<recorder>()};
  std::shared_ptr<recorder> acceptor_sink{std::make_shared<recorder>()};
  std::shared_ptr<link> dialer;
  std::shared_ptr<link> acceptor;
};

// Queue pairs that were never joined cannot say goodbye, so only the deadline ends such a link.
constexpr const char* speechless = "a queue pair that was not joined yet has nobody to tell";

TEST_P(backend_contract, a_dialer_hears_at_once_that_the_other_end_was_closed_while_connecting) {
  if (GetParam().kind == backend_kind::rdma) GTEST_SKIP() << speechless;
  pair p{GetParam()};
  joining j{p, GetParam().kind};
  ASSERT_TRUE(j.dialer->connect(j.acceptor->offer()));
  p.drive_for(600ms);  // a has dialled; the acceptor does not know its offer yet
  j.acceptor->close();
  ASSERT_TRUE(p.until([&] { return j.dialer_sink->is_broken(); }));
  EXPECT_EQ(j.dialer_sink->broken->code, errc::link_broken) << j.dialer_sink->broken->message;
  EXPECT_EQ(j.dialer_sink->ups, 0);
}

TEST_P(backend_contract, an_acceptor_hears_at_once_that_the_dialer_was_closed_while_connecting) {
  if (GetParam().kind == backend_kind::rdma) GTEST_SKIP() << speechless;
  pair p{GetParam()};
  joining j{p, GetParam().kind};
  ASSERT_TRUE(j.dialer->connect(j.acceptor->offer()));
  p.drive_for(600ms);
  j.dialer->close();
  ASSERT_TRUE(j.acceptor->connect(j.dialer->offer()));
  ASSERT_TRUE(p.until([&] { return j.acceptor_sink->is_broken(); }));
  EXPECT_EQ(j.acceptor_sink->broken->code, errc::link_broken) << j.acceptor_sink->broken->message;
}

TEST_P(backend_contract, many_links_join_the_same_two_nodes) {
  pair p{GetParam()};
  struct one {
    std::shared_ptr<recorder> sink_a, sink_b;
    std::shared_ptr<link> a, b;
  };
  std::vector<one> links;
  for (int i = 0; i < 8; ++i) {
    one l{std::make_shared<recorder>(), std::make_shared<recorder>(), {}, {}};
    const auto open = [&](const end& at, link_role role, const end& to, auto sink) {
      return *at.place->open(
          GetParam().kind, {.role = role, .peer = to.self, .connect_timeout = longer_than_any_wait},
          std::move(sink));
    };
    l.a = open(p.a, link_role::initiator, p.b, l.sink_a);
    l.b = open(p.b, link_role::acceptor, p.a, l.sink_b);
    ASSERT_TRUE(l.b->connect(l.a->offer()));
    ASSERT_TRUE(l.a->connect(l.b->offer()));
    links.push_back(std::move(l));
  }
  ASSERT_TRUE(p.until([&] {
    for (const auto& l : links) {
      if (l.sink_a->ups != 1 || l.sink_b->ups != 1) return false;
    }
    return true;
  }));
  // A grant is valid only on the link that issued it.
  const auto given = links[0].b->grant(p.b.region, {{0, 4096, 0, 1}}, access::write, t1);
  ASSERT_TRUE(given);
  const auto grant = std::make_shared<const remote_grant>(*given);
  // Refused at once if the initiator can know, else by the target.
  auto strange =
      links[1].a->post(p.make_batch(p.a, direction::write, grant, {{0, 0, 64, 0, 0, 1}}));
  if (strange) {
    ASSERT_TRUE(p.until([&] { return links[1].sink_a->completed() == 1; }));
    strange = fail(links[1].sink_a->completions[0].failure.value_or(troupe::error{}));
  }
  EXPECT_EQ(code_of(strange), errc::grant_revoked);
  ASSERT_TRUE(links[0].a->post(p.make_batch(p.a, direction::write, grant, {{0, 0, 64, 0, 0, 1}})));
  ASSERT_TRUE(p.until([&] { return links[0].sink_a->completed() == 1; }));
  EXPECT_FALSE(links[0].sink_a->completions[0].failure);
  for (const auto& l : links) {
    l.a->close();
    l.b->close();
  }
}

}  // namespace troupe::transport::contract
