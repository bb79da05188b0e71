// Engines that no file names, in one cluster: they find each other by their announcements, move
// caches in both directions, and may do what the edges of their stage allow.

#include <memory>
#include <string>
#include <vector>

#include "troupe/actors/cluster_client.hpp"

#include "cluster_fixture.hpp"

namespace troupe::testing {
namespace {

constexpr std::uint32_t tokens = 100;

cluster_options open_cluster() {
  auto options = unhurried();
  options.more_stages =
      "  - {name: engines, role: both, open: {max_nodes: 8}}\n"
      "  - {name: guests, role: decode, open: {max_nodes: 8}}\n";
  options.more_edges = "  - {from: engines, to: engines, mode: read}\n";
  options.max_parked = 3;
  options.heartbeat_interval = "2s";  // a node silent for three of these gives way to another life
  return options;
}

kvcache::cache_layout layout_of(std::uint32_t layers, std::uint32_t rank = 0,
                                std::uint32_t ranks = 1) {
  kvcache::cache_shape shape;
  shape.layers = kvcache::attention_layers(layers, 2, 16);
  shape.dtype = "fp16";
  shape.block_tokens = 16;
  shape.blocks = 32;
  shape.tp_rank = rank;
  shape.tp_size = ranks;
  return kvcache::make_layout(shape, {}).value();
}

engine_options joining(const std::string& replica, std::uint32_t layers = 4, std::uint32_t rank = 0,
                       std::uint32_t ranks = 1) {
  engine_options options;
  options.layout = layout_of(layers, rank, ranks);
  options.allocate.emplace();
  options.join = announcement{"engines", replica, rank, ranks, {{"http", replica + ":8000"}}};
  return options;
}

std::vector<block_id> blocks_from(std::uint32_t first) {
  std::vector<block_id> all((tokens + 15) / 16);
  for (std::uint32_t i = 0; i < all.size(); ++i) all[i].value = first + i;
  return all;
}

class joined_engines : public ::testing::Test {
 protected:
  cluster c{open_cluster()};

  void SetUp() override { cluster::quiet("joined"); }

  [[nodiscard]] std::unique_ptr<actors::cluster_client> frontend() const {
    actors::cluster_client_options options;
    options.port = static_cast<std::uint16_t>(c.port());
    options.timeout = wait_limit;
    return actors::cluster_client::unconnected(options);
  }
  /// Moves one request between the engines and compares its bytes.
  static void moves(engine& from, engine& to, const receive_spec& spec, std::uint64_t seed) {
    cache_bytes source{from};
    cache_bytes destination{to};
    send_spec offer{spec.request, blocks_from(0)};
    const auto layers = static_cast<std::uint32_t>(from.layout().layers.size());
    source.fill(offer.blocks, 0, layers, 0, tokens, seed);
    const auto send = from.send(std::move(offer));
    ASSERT_TRUE(send) << to_string(send.error());
    ASSERT_TRUE(from.seal(*send, tokens));
    const auto receive = to.receive(spec);
    ASSERT_TRUE(receive) << to_string(receive.error());
    const auto received = to.wait(*receive);
    ASSERT_TRUE(received) << to_string(received.error());
    EXPECT_EQ(destination.differing(spec.blocks, 0, tokens, seed), 0u);
    ASSERT_TRUE(from.wait(*send));
  }
  /// Whether the node is refused for that reason.
  static bool is_told(engine& node, const std::string& why) {
    return comes_true([&] {
      const auto in = node.wait_registered(10ms);
      return !in && in.error().message.find(why) != std::string::npos;
    });
  }
  static receive_spec wish(const std::string& request, const std::string& source) {
    receive_spec spec;
    spec.request = request;
    spec.sources = {source};
    spec.mode = actors::transfer_mode::read;
    spec.tokens = tokens;
    spec.blocks = blocks_from(10);
    return spec;
  }
};

TEST_F(joined_engines, caches_move_both_ways_between_two_that_no_file_names) {
  const auto a = c.start("", joining("a"));
  const auto b = c.start("", joining("b"));
  ASSERT_TRUE(a && b);
  moves(*a, *b, wish("r1", "engines.a.0"), 1);
  moves(*b, *a, wish("r2", "engines.b.0"), 2);
}

TEST_F(joined_engines, a_placement_joins_replicas_of_one_layout) {
  const auto a = c.start("", joining("a"));
  const auto other = c.start("", joining("other", 5));
  const auto b = c.start("", joining("b"));
  ASSERT_TRUE(a && other && b);
  const auto cluster = frontend();
  for (int i = 0; i < 6; ++i) {
    actors::placement_request request;
    request.request = "r" + std::to_string(i);
    request.from = request.to = "engines";
    request.timeout_ms = 10'000;
    const auto where = cluster->place(request);
    ASSERT_TRUE(where) << to_string(where.error());
    const auto& from = where->prefill.front();
    const auto& to = where->decode.front();
    EXPECT_NE(from.name, to.name);
    EXPECT_NE(from.replica_name, "other");
    EXPECT_NE(to.replica_name, "other");
    EXPECT_EQ(where->fingerprint, kvcache::fingerprint_of(a->layout()));
    auto& sender = from.replica_name == "a" ? *a : *b;
    auto& receiver = from.replica_name == "a" ? *b : *a;
    moves(sender, receiver, receive_spec::of(*where, tokens, blocks_from(10)),
          static_cast<std::uint64_t>(i));
  }
}

TEST_F(joined_engines, ranks_join_one_by_one_and_a_receive_takes_from_all_of_them) {
  const auto a0 = c.start("", joining("a", 4, 0, 2));
  const auto a1 = c.start("", joining("a", 4, 1, 2));
  const auto b = c.start("", joining("b"));
  ASSERT_TRUE(a0 && a1 && b);
  for (const auto* node : {&a0, &a1}) {
    send_spec offer{"r1", blocks_from(0)};
    cache_bytes{**node}.fill(offer.blocks, 0, 4, 0, tokens, 7);
    const auto send = (*node)->send(std::move(offer));
    ASSERT_TRUE(send);
    ASSERT_TRUE((*node)->seal(*send, tokens));
  }
  auto one = b->receive(wish("r1", "engines.a.1"));
  ASSERT_FALSE(one);
  EXPECT_EQ(one.error().code, errc::invalid_config);
  one = b->receive(wish("r1", "engines.a.0"));
  ASSERT_TRUE(one);
  const auto half = b->wait(*one);
  ASSERT_FALSE(half) << "a cache of which one rank was asked is not whole";
  EXPECT_EQ(half.error().code, errc::layout_mismatch) << half.error().message;
  auto spec = wish("r1", "engines.a.0");
  spec.sources.push_back("engines.a.1");
  spec.again = true;
  const auto both = b->receive(spec);
  ASSERT_TRUE(both) << to_string(both.error());
  const auto whole = b->wait(*both);
  ASSERT_TRUE(whole) << to_string(whole.error());
  EXPECT_EQ(cache_bytes{*b}.differing(spec.blocks, 0, tokens, 7), 0u);
}

TEST_F(joined_engines, a_node_is_found_by_what_it_is_called_elsewhere) {
  const auto a = c.start("", joining("a"));
  const auto b = c.start("", joining("b"));
  ASSERT_TRUE(a && b);
  const auto cluster = frontend();
  const auto found = cluster->find_label("http", "b:8000");
  ASSERT_TRUE(found) << to_string(found.error());
  ASSERT_EQ(found->size(), 1u);
  EXPECT_EQ(found->front().node.name, "engines.b.0");
  const auto none = cluster->find_label("http", "c:8000");
  ASSERT_TRUE(none);
  EXPECT_TRUE(none->empty());
}

TEST_F(joined_engines, what_no_supervisor_would_take_in_does_not_start) {
  const auto code_of = [&](const std::string& name, engine_options options) {
    const auto started = engine::start(c.deployment(), name, std::move(options));
    return started ? std::optional<errc>{} : started.error().code;
  };
  EXPECT_EQ(code_of("decode-0", joining("a")), errc::invalid_config);
  auto options = joining("a");
  options.join->stage = "decode";
  EXPECT_EQ(code_of("", options), errc::not_found);
  options = joining("A.b");
  EXPECT_EQ(code_of("", options), errc::invalid_config);
  options = joining("a");
  options.join->ranks = 2;
  EXPECT_EQ(code_of("", options), errc::invalid_config) << "its layout is of one rank";
  options = joining("a");
  options.join->labels.assign(17, {"k", "v"});
  EXPECT_EQ(code_of("", options), errc::invalid_config);
  EXPECT_EQ(code_of("", {}), errc::not_found) << "neither named nor announced";
}

TEST_F(joined_engines, a_taken_name_is_said_and_is_free_once_its_node_has_left) {
  auto a = c.start("", joining("a"));
  ASSERT_TRUE(a);
  auto second = engine::start(c.deployment(), "", joining("a"));
  ASSERT_TRUE(second) << to_string(second.error());
  EXPECT_TRUE(is_told(**second, "stop that process first"));
  a->stop();
  const auto later = (*second)->wait_registered(wait_limit);
  EXPECT_TRUE(later) << to_string(later.error());
}

TEST_F(joined_engines, a_rank_of_another_layout_than_its_replica_is_told_both) {
  const auto a0 = c.start("", joining("a", 4, 0, 2));
  ASSERT_TRUE(a0);
  auto a1 = engine::start(c.deployment(), "", joining("a", 5, 1, 2));
  ASSERT_TRUE(a1);
  EXPECT_TRUE(is_told(**a1, "fingerprint"));
}

TEST_F(joined_engines, a_node_may_do_no_more_than_the_edges_of_its_stage) {
  const auto a = c.start("", joining("a"));
  auto options = joining("g");
  options.join->stage = "guests";
  const auto guest = c.start("", std::move(options));
  ASSERT_TRUE(a && guest);
  const auto receive = guest->receive(wish("r1", "engines.a.0"));
  ASSERT_FALSE(receive);
  EXPECT_EQ(receive.error().code, errc::invalid_config);
  const std::vector<std::byte> value(8);
  EXPECT_EQ(guest->put("engines.a.0", "k", value).error().code, errc::invalid_config);
  EXPECT_EQ(guest->put("nowhere.a.0", "k", value).error().code, errc::not_found);
  const auto itself = a->receive(wish("r1", "engines.a.0"));
  ASSERT_FALSE(itself);
  EXPECT_NE(itself.error().message.find("this node itself"), std::string::npos);
}

TEST_F(joined_engines, receives_of_one_peer_that_wait_for_their_request_are_bounded_and_shown) {
  const auto a = c.start("", joining("a"));
  const auto b = c.start("", joining("b"));
  const auto d = c.start("", joining("d"));
  ASSERT_TRUE(a && b && d);
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(b->receive(wish("early" + std::to_string(i), "engines.a.0")));
  }
  const auto parked = [&]() -> std::uint32_t {
    for (const auto& one : a->report().parked) {
      if (one.peer == "engines.b.0") return one.receives;
    }
    return 0;
  };
  ASSERT_TRUE(comes_true([&] { return parked() == 3; }));
  const auto fourth = b->receive(wish("early3", "engines.a.0"));
  ASSERT_TRUE(fourth);
  const auto refused = b->wait(*fourth);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, errc::overloaded) << refused.error().message;
  EXPECT_NE(refused.error().message.find("max_parked"), std::string::npos);
  moves(*a, *d, wish("r1", "engines.a.0"), 3);  // another peer has its own limit
  const auto send = a->send({"early0", blocks_from(0)});
  ASSERT_TRUE(send);
  ASSERT_TRUE(a->seal(*send, tokens));
  ASSERT_TRUE(a->wait(*send));
  EXPECT_TRUE(comes_true([&] { return parked() == 2; }));
}

}  // namespace
}  // namespace troupe::testing
