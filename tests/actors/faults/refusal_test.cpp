// Requests that cannot be served, and deployments that do not match: each ends with an error that
// says what is wrong, at once or at its deadline, and nothing hangs.

#include <algorithm>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <caf/scoped_actor.hpp>

#include "troupe/actors/messages/messages.hpp"

#include "cluster_fixture.hpp"
#include "fails_with.hpp"
#include "free_port.hpp"
#include "waiting.hpp"

namespace troupe::testing {
namespace {

using ::testing::HasSubstr;

/// "ID TOKENS SEED" offers the whole request at once and answers with its outcome.
int generous_prefill(engine& node, line_channel& channel) {
  cache_bytes cache{node};
  listener events{node};
  const auto layers = static_cast<std::uint32_t>(node.layout().layers.size());
  while (auto line = channel.order()) {
    std::istringstream words{*line};
    std::string request;
    std::uint32_t tokens = 0;
    std::uint64_t seed = 0;
    words >> request >> tokens >> seed;
    auto blocks = node.allocate_blocks((tokens + 15) / 16);
    if (!blocks) return 1;
    auto send = node.send({request, blocks->blocks});
    if (!send) {
      channel.say(to_string(send.error()));
      (void)node.free_blocks(blocks->owner, blocks->blocks);
      continue;
    }
    cache.fill(blocks->blocks, 0, layers, 0, tokens, seed);
    (void)node.layers_ready(*send, 0, layers, tokens);
    (void)node.seal(*send, tokens);
    (void)node.free_blocks(blocks->owner, blocks->blocks);
    channel.say("offered");
    if (!events.unpinned(*send)) return 2;
    channel.say(events.of(*send).failed > 0 ? to_string(events.of(*send).why) : "done");
  }
  return 0;
}

/// 4 layers, 2 heads of 32 fp16, K and V: 1 KiB per token, 16 KiB per block.
constexpr auto four_blocks = "64KiB";

class refusal : public ::testing::Test {
 protected:
  cluster_options options;  ///< a request without a deadline gets one longer than any test
  std::unique_ptr<cluster> c;
  std::unique_ptr<forked> prefill;
  std::unique_ptr<engine> node;
  std::unique_ptr<listener> events;

  refusal() { options.deadline = "1h"; }
  void begin() {
    c = std::make_unique<cluster>(options);
    prefill = c->spawn("prefill-0", generous_prefill);
    cluster::quiet("decode-0");
    node = c->start("decode-0");
    ASSERT_TRUE(node);
    events = std::make_unique<listener>(*node);
  }
  [[nodiscard]] result<operation_id> receive(const std::string& request, std::uint32_t tokens,
                                             std::chrono::milliseconds deadline = 0ms,
                                             bool fail_when_full = false) {
    return node->receive({request,
                          {"prefill-0"},
                          actors::transfer_mode::write,
                          tokens,
                          0,
                          {},
                          0,
                          deadline,
                          fail_when_full});
  }
};

TEST_F(refusal, of_a_request_that_no_pool_could_hold_comes_at_once) {
  options.decode_pool = four_blocks;
  begin();
  auto asked = receive("large", 65);
  ASSERT_THAT(asked, fails_with(errc::pool_exhausted, HasSubstr("5 blocks")));
  EXPECT_NE(asked.error().message.find("whole pool has 4"), std::string::npos)
      << asked.error().message;
}

TEST_F(refusal, of_a_full_pool_comes_at_once_to_who_does_not_wait) {
  options.decode_pool = four_blocks;
  begin();
  auto all = node->allocate_blocks(4);
  ASSERT_TRUE(all);
  auto asked = receive("r", 16, 0ms, true);
  ASSERT_TRUE(asked) << to_string(asked.error());
  ASSERT_TRUE(events->outcome(*asked));
  EXPECT_EQ(events->of(*asked).why.code, errc::pool_exhausted) << to_string(events->of(*asked).why);
  EXPECT_TRUE(events->unpinned(*asked));
}

TEST_F(refusal, by_configuration_is_the_same) {
  options.decode_pool = four_blocks;
  options.on_full = "fail";
  begin();
  auto all = node->allocate_blocks(4);
  ASSERT_TRUE(all);
  auto asked = receive("r", 16);
  ASSERT_TRUE(asked);
  ASSERT_TRUE(events->outcome(*asked));
  EXPECT_EQ(events->of(*asked).why.code, errc::pool_exhausted) << to_string(events->of(*asked).why);
}

TEST_F(refusal, is_not_what_a_full_pool_says_to_who_waits_in_line) {
  options.decode_pool = four_blocks;
  begin();
  auto all = node->allocate_blocks(4);
  ASSERT_TRUE(all);
  // The first needs more than the first blocks that are freed: the second must not overtake it.
  auto first = receive("first", 48);
  auto second = receive("second", 16);
  ASSERT_TRUE(first);
  ASSERT_TRUE(second);
  events->listen_for(200ms);
  ASSERT_TRUE(node->free_blocks(all->owner, std::span{all->blocks}.first(2)));
  events->listen_for(200ms);
  EXPECT_FALSE(events->of(*first).allocated);
  EXPECT_FALSE(events->of(*second).allocated) << "it overtook the first in line";
  ASSERT_TRUE(node->free_blocks(all->owner, std::span{all->blocks}.last(2)));
  ASSERT_TRUE(
      events->until([&] { return events->of(*first).allocated && events->of(*second).allocated; }));
  prefill->channel().say("first 48 1");
  ASSERT_TRUE(events->outcome(*first));
  EXPECT_EQ(events->of(*first).done, 1) << to_string(events->of(*first).why);
  EXPECT_EQ(prefill->channel().hear().value_or("silence"), "offered");
  EXPECT_EQ(prefill->channel().hear().value_or("silence"), "done");
  prefill->channel().say("second 16 2");
  ASSERT_TRUE(events->outcome(*second));
  EXPECT_EQ(events->of(*second).done, 1) << to_string(events->of(*second).why);
}

TEST_F(refusal, of_a_wait_in_line_comes_at_its_deadline_and_lets_the_next_one_in) {
  options.decode_pool = four_blocks;
  begin();
  auto most = node->allocate_blocks(3);
  ASSERT_TRUE(most);
  auto first = receive("first", 64, 300ms);
  auto second = receive("second", 16);
  ASSERT_TRUE(first);
  ASSERT_TRUE(second);
  ASSERT_TRUE(events->outcome(*first));
  EXPECT_EQ(events->of(*first).why.code, errc::deadline) << to_string(events->of(*first).why);
  EXPECT_TRUE(events->until([&] { return events->of(*second).allocated.has_value(); }));
}

TEST_F(refusal, of_an_unknown_source_comes_at_once_and_names_it) {
  begin();
  auto asked = node->receive({"r", {"prefill-7"}, actors::transfer_mode::write, 16});
  ASSERT_THAT(asked, fails_with(errc::not_found, HasSubstr("prefill-7")));
}

TEST_F(refusal, of_a_request_that_nobody_offers_comes_at_its_deadline) {
  begin();
  auto asked = receive("nobody's", 16, 400ms);
  ASSERT_TRUE(asked);
  ASSERT_TRUE(events->unpinned(*asked));
  EXPECT_EQ(events->of(*asked).failed, 1);
  EXPECT_EQ(events->of(*asked).why.code, errc::deadline) << to_string(events->of(*asked).why);
}

TEST_F(refusal, of_a_source_that_is_not_up_comes_at_the_deadline) {
  c = std::make_unique<cluster>(options);
  node = c->start("decode-0");
  ASSERT_TRUE(node);
  events = std::make_unique<listener>(*node);
  auto asked = receive("r", 16, 400ms);
  ASSERT_TRUE(asked);
  ASSERT_TRUE(events->unpinned(*asked));
  EXPECT_EQ(events->of(*asked).failed, 1);
  EXPECT_EQ(events->of(*asked).why.code, errc::deadline) << to_string(events->of(*asked).why);
}

TEST_F(refusal, of_a_request_that_is_live_already_comes_at_once) {
  begin();
  auto first = receive("r", 16);
  ASSERT_TRUE(first);
  auto again = receive("r", 16);
  ASSERT_THAT(again, fails_with(errc::already_exists, HasSubstr("request `r` is live")));
  // The first is not disturbed, and its id is free again once it has ended.
  prefill->channel().say("r 16 1");
  ASSERT_TRUE(events->unpinned(*first));
  EXPECT_EQ(events->of(*first).done, 1) << to_string(events->of(*first).why);
  EXPECT_EQ(prefill->channel().hear().value_or("silence"), "offered");
  EXPECT_EQ(prefill->channel().hear().value_or("silence"), "done");
  auto later = receive("r", 16, 200ms);
  EXPECT_TRUE(later);
}

TEST_F(refusal, of_a_request_whose_source_was_delivered_comes_at_once) {
  begin();
  auto first = receive("r", 16);
  ASSERT_TRUE(first);
  prefill->channel().say("r 16 1");
  ASSERT_TRUE(events->unpinned(*first));
  EXPECT_EQ(prefill->channel().hear().value_or("silence"), "offered");
  EXPECT_EQ(prefill->channel().hear().value_or("silence"), "done");
  auto late = receive("r", 16);
  ASSERT_TRUE(late);
  ASSERT_TRUE(events->outcome(*late));
  EXPECT_EQ(events->of(*late).why.code, errc::not_found) << to_string(events->of(*late).why);
  EXPECT_NE(events->of(*late).why.message.find("delivered"), std::string::npos);
}

TEST_F(refusal, of_more_requests_than_a_node_may_have_live_comes_at_once) {
  options.max_operations = 8;
  begin();
  std::optional<operation_id> first;
  for (int i = 0; i < 8; ++i) {
    auto asked = receive("r" + std::to_string(i), 16);
    ASSERT_TRUE(asked) << to_string(asked.error());
    if (!first) first = *asked;
  }
  auto refused = receive("r8", 16);
  ASSERT_THAT(refused, fails_with(errc::overloaded, HasSubstr("limits.max_operations")));
  // An operation that has ended makes room once its last event is taken.
  ASSERT_TRUE(node->abort(*first, "room"));
  ASSERT_TRUE(events->unpinned(*first));
  EXPECT_TRUE(receive("r8", 16));
}

TEST_F(refusal, of_more_requests_than_a_prefill_node_keeps_for_later_comes_at_once) {
  options.max_operations = 8;
  options.decodes = 2;
  c = std::make_unique<cluster>(options);
  prefill = c->spawn("prefill-0", generous_prefill);
  auto other = c->spawn("decode-1", [](engine& here, line_channel& channel) {
    listener heard{here};
    (void)channel.order();
    for (int i = 0; i < 8; ++i) {
      auto asked = here.receive(
          {"late" + std::to_string(i), {"prefill-0"}, actors::transfer_mode::write, 16});
      if (!asked || !heard.outcome(*asked)) return 1;
      channel.say(std::string{to_string(heard.of(*asked).why.code)});
    }
    (void)channel.order();
    return 0;
  });
  cluster::quiet("decode-0");
  node = c->start("decode-0");
  ASSERT_TRUE(node);
  events = std::make_unique<listener>(*node);
  for (int i = 0; i < 8; ++i) ASSERT_TRUE(receive("r" + std::to_string(i), 16));
  ASSERT_TRUE(events->moving(8));
  events->listen_for(300ms);  // the last request is on its way
  other->channel().say("go");
  for (int i = 0; i < 8; ++i) {
    EXPECT_EQ(other->channel().hear().value_or("silence"), "overloaded");
  }
}

TEST_F(refusal, of_a_send_that_is_live_already_comes_at_once) {
  begin();
  prefill->channel().say("r 16 1");
  EXPECT_EQ(prefill->channel().hear().value_or("silence"), "offered");
  auto blocks = node->allocate_blocks(1);
  ASSERT_TRUE(blocks);
  auto first = node->send({"mine", blocks->blocks});
  ASSERT_TRUE(first);
  auto again = node->send({"mine", blocks->blocks});
  ASSERT_FALSE(again);
  EXPECT_EQ(again.error().code, errc::already_exists);
}

TEST_F(refusal, of_more_tokens_than_were_sealed_comes_to_both_sides) {
  begin();
  auto asked = receive("short", 32);
  ASSERT_TRUE(asked);
  prefill->channel().say("short 16 1");
  ASSERT_TRUE(events->unpinned(*asked));
  EXPECT_EQ(events->of(*asked).why.code, errc::out_of_range) << to_string(events->of(*asked).why);
  EXPECT_EQ(prefill->channel().hear().value_or("silence"), "offered");
  EXPECT_NE(prefill->channel().hear().value_or("silence").find("out_of_range"), std::string::npos);
}

TEST_F(refusal, of_more_tokens_than_were_offered_comes_to_all_who_asked_before_and_the_node_lives) {
  auto wanted = unhurried();
  wanted.decodes = 3;
  const cluster three{wanted};
  cluster::quiet("prefill-0");
  const auto source = three.start("prefill-0");
  ASSERT_TRUE(source);
  struct side {
    std::unique_ptr<engine> node;
    std::unique_ptr<listener> events;
    operation_id receive;
  };
  std::vector<side> sides;
  for (const auto& name : three.nodes_of("decode")) {
    side one{three.start(name), nullptr, {}};
    ASSERT_TRUE(one.node);
    one.events = std::make_unique<listener>(*one.node);
    const auto asked = one.node->receive({"r", {"prefill-0"}, actors::transfer_mode::write, 80});
    ASSERT_TRUE(asked) << to_string(asked.error());
    one.receive = *asked;
    sides.push_back(std::move(one));
  }
  listener heard{*source};
  EXPECT_TRUE(comes_true([&] {
    const auto links = source->report().links;
    return std::ranges::count(links, "up", &actors::link_report::state) == 3;
  }));
  heard.listen_for(100ms);  // whether the requests came in time or too late, the result is the same
  const auto blocks = source->allocate_blocks(4);
  ASSERT_TRUE(blocks);
  const auto send = source->send({"r", blocks->blocks});
  ASSERT_TRUE(send);
  ASSERT_TRUE(heard.unpinned(*send));
  EXPECT_EQ(heard.of(*send).why.code, errc::out_of_range) << to_string(heard.of(*send).why);
  for (auto& one : sides) {
    ASSERT_TRUE(one.events->unpinned(one.receive));
    const auto& why = one.events->of(one.receive).why;
    EXPECT_EQ(why.code, errc::out_of_range) << to_string(why);
    EXPECT_NE(why.message.find("wants 80 tokens"), std::string::npos) << why.message;
  }
  EXPECT_TRUE(source->send({"another", blocks->blocks}));
}

TEST_F(refusal, of_a_source_whose_deadline_passed_is_told_to_a_decode_that_would_wait_longer) {
  c = std::make_unique<cluster>(options);
  prefill = c->spawn("prefill-0", [](engine& slow, line_channel& channel) {
    listener told_there{slow};
    auto blocks = slow.allocate_blocks(1);
    auto send = slow.send({"slow", blocks->blocks, 0, 600ms, 0});
    if (!send || !told_there.unpinned(*send)) return 1;
    channel.say(to_string(told_there.of(*send).why.code).data());
    (void)channel.order();
    return 0;
  });
  cluster::quiet("decode-0");
  node = c->start("decode-0");
  ASSERT_TRUE(node);
  events = std::make_unique<listener>(*node);
  auto asked = receive("slow", 16);
  ASSERT_TRUE(asked);
  ASSERT_TRUE(events->unpinned(*asked)) << "the prefill side gave up without a word";
  EXPECT_EQ(events->of(*asked).why.code, errc::deadline) << to_string(events->of(*asked).why);
  EXPECT_EQ(prefill->channel().hear().value_or("silence"), "deadline");
}

TEST_F(refusal, of_a_second_node_with_the_name_of_a_live_one) {
  options.heartbeat_timeout = "1h";  // it counts as alive however late its heartbeats are
  begin();
  auto second = engine::start(c->deployment(), "decode-0");
  ASSERT_TRUE(second) << to_string(second.error());
  auto in = (*second)->wait_registered(1500ms);
  const auto is_refused = [&] {
    in = (*second)->wait_registered(0ms);
    return !in && in.error().message.find("already_exists") != std::string::npos;
  };
  EXPECT_TRUE(comes_true(is_refused));
  ASSERT_FALSE(in);
  EXPECT_NE(in.error().message.find("decode-0"), std::string::npos) << to_string(in.error());
  second->reset();
  // The first node was not disturbed.
  auto asked = receive("r", 16);
  ASSERT_TRUE(asked);
  prefill->channel().say("r 16 1");
  ASSERT_TRUE(events->outcome(*asked));
  EXPECT_EQ(events->of(*asked).done, 1) << to_string(events->of(*asked).why);
}

TEST_F(refusal, of_a_life_that_was_replaced_is_for_good_and_said_at_once) {
  c = std::make_unique<cluster>(options);
  prefill = c->spawn("prefill-0", generous_prefill);
  auto former = c->spawn("decode-0", [](engine& old, line_channel& channel) {
    channel.say("in");
    auto in = old.wait_registered(0ms);
    const auto is_stale = [&] {
      in = old.wait_registered(0ms);
      return !in && in.error().code == errc::stale_incarnation;
    };
    (void)comes_true(is_stale, 10ms);
    channel.say(in ? "registered" : to_string(in.error()));
    // A wait that cannot succeed returns at once.
    in = old.wait_registered(1h);
    if (in || in.error().code != errc::stale_incarnation) return 1;
    // An operation that needs the supervisor reports why it is not available.
    listener told{old};
    const auto placed = old.place({"r", "prefill", "decode", 3'600'000});
    if (!placed || !told.outcome(*placed)) return 2;
    channel.say(to_string(told.of(*placed).why));
    const auto asked = old.receive({"r", {"prefill-0"}, actors::transfer_mode::write, 16});
    if (!asked || !told.outcome(*asked)) return 3;
    channel.say(to_string(told.of(*asked).why));
    return 0;
  });
  ASSERT_EQ(former->channel().hear().value_or("silence"), "in");
  former->stop();
  cluster::quiet("decode-0");
  node = c->start("decode-0");  // refused while the former life may be alive, then accepted
  ASSERT_TRUE(node);
  former->signal(SIGCONT);
  const auto said = former->channel().hear().value_or("silence");
  EXPECT_NE(said.find("stale_incarnation"), std::string::npos) << said;
  EXPECT_NE(said.find("pid " + std::to_string(::getpid())), std::string::npos) << said;
  const auto place = former->channel().hear().value_or("silence");
  EXPECT_NE(place.find("stale_incarnation"), std::string::npos) << place;
  const auto receive = former->channel().hear().value_or("silence");
  EXPECT_NE(receive.find("stale_incarnation"), std::string::npos) << receive;
  EXPECT_EQ(former->join(), 0);
  EXPECT_TRUE(node->wait_registered(0ms));
}

/// Requests links that the node at "PORT INCARNATION" must refuse, and reports each refusal: its
/// code, and whether it has a sentence.
int asks_for_wrong_links(line_channel& channel) {
  cluster::quiet("stranger");
  const auto line = channel.order();
  if (!line) return 0;
  std::istringstream words{*line};
  std::uint16_t port = 0;
  std::uint64_t life = 0;
  words >> port >> life;
  actors::actor_host host;
  const auto node = host.connect<actors::node_actor>("127.0.0.1", port, wait_limit);
  if (!node) {
    channel.say(to_string(node.error()));
    return 1;
  }
  caf::scoped_actor self{host.system()};
  const auto ask = [&](const std::function<void(actors::link_request&)>& wrong) {
    actors::link_request request;
    request.cluster = "test";
    request.from.name = "prefill-0";
    request.from.incarnation = 5;
    request.to_incarnation = life;
    request.backend = static_cast<std::uint8_t>(transport::backend_kind::tcp);
    wrong(request);
    std::string answer = "no answer";
    self->request(*node, wait_limit, request)
        .receive(
            [&](const actors::link_reply& reply) {
              answer = reply.failed == 0 ? "accepted"
                                         : std::string{to_string(static_cast<errc>(reply.failed))};
              if (reply.sentence.empty()) answer += " without a sentence";
            },
            [&](const caf::error& err) { answer = host.system().render(err); });
    channel.say(answer);
  };
  ask([](auto& request) { ++request.to_incarnation; });
  ask([](auto& request) { request.from.incarnation = 0; });
  ask([](auto& request) { ++request.version; });
  ask([](auto& request) { request.cluster = "another"; });
  ask([](auto& request) { request.from.boot_id = "\033[2J"; });
  ask([](auto& request) { request.backend = 77; });
  ask([](auto& request) { request.gpus.assign(65, "0000:0a:00.0"); });
  ask([](auto& request) { request.gpus = {"0000:\033[2J"}; });
  (void)channel.order();
  return 0;
}

TEST_F(refusal, of_a_link_that_means_another_life_release_or_cluster_or_names_no_gpus_says_which) {
  c = std::make_unique<cluster>(options);
  forked stranger{asks_for_wrong_links};
  cluster::quiet("decode-0");
  node = c->start("decode-0");
  ASSERT_TRUE(node);
  const auto self = node->report().node;
  stranger.channel().say(std::to_string(self.port) + " " + std::to_string(self.incarnation));
  for (const auto* expected :
       {"stale_incarnation", "stale_incarnation", "version_mismatch", "invalid_config",
        "invalid_config", "backend_unavailable", "out_of_range", "out_of_range"}) {
    EXPECT_EQ(stranger.channel().hear().value_or("silence"), expected);
  }
  listener there{*node};
  EXPECT_TRUE(there.until([&] { return node->report().links.empty(); }));
}

TEST_F(refusal, of_a_port_that_is_taken_comes_from_start) {
  c = std::make_unique<cluster>(options);
  cluster::quiet("decode-0");
  auto taken = std::make_unique<taken_port>();
  ASSERT_NE(taken->number(), 0);
  auto deployment = c->deployment();
  for (auto& stage : deployment.stages) {
    if (stage.name == "decode") stage.ports = {taken->number()};
  }
  auto started = engine::start(deployment, "decode-0");
  ASSERT_THAT(started,
              fails_with(errc::already_exists, HasSubstr(std::to_string(taken->number()))));
  taken.reset();
  auto again = engine::start(deployment, "decode-0");
  EXPECT_TRUE(again) << to_string(again.error());
}

/// A cache of the engine's own that differs from the deployment's in one field.
struct odd_geometry {
  std::string field;
  std::uint32_t block_tokens{16};
  std::uint32_t layers{4};
  std::uint32_t kv_heads{2};
  std::uint32_t head_dim{32};
  std::string dtype{"fp16"};
  std::string here, there;  ///< both values, as the sentence must name them
};

class mismatch : public ::testing::TestWithParam<odd_geometry> {};

TEST_P(mismatch, of_the_two_caches_is_one_clear_error_at_the_decode_side) {
  const auto& odd = GetParam();
  cluster c{cluster_options{}};
  auto prefill = c.spawn("prefill-0", generous_prefill);
  cluster::quiet("decode-0");
  kvcache::cache_shape shape;
  shape.layers = kvcache::attention_layers(odd.layers, odd.kv_heads, odd.head_dim);
  shape.dtype = odd.dtype;
  shape.block_tokens = odd.block_tokens;
  shape.blocks = 8;
  auto layout = kvcache::make_layout(shape, {});
  ASSERT_TRUE(layout);
  std::vector<std::byte> memory(kvcache::region_sizes(*layout).front());
  engine_options own;
  own.layout = *layout;
  own.regions = {memory};
  auto node = c.start("decode-0", std::move(own));
  ASSERT_TRUE(node);
  listener events{*node};
  auto asked =
      node->receive({"r", {"prefill-0"}, actors::transfer_mode::write, 8, 0, {block_id{3}}, 0, 1h});
  ASSERT_TRUE(asked) << to_string(asked.error());
  ASSERT_TRUE(events.unpinned(*asked));
  const auto& t = events.of(*asked);
  EXPECT_EQ(t.failed, 1);
  EXPECT_EQ(t.why.code, errc::layout_mismatch) << to_string(t.why);
  EXPECT_NE(t.why.message.find(odd.field), std::string::npos) << t.why.message;
  EXPECT_NE(t.why.message.find(odd.here), std::string::npos) << t.why.message;
  EXPECT_NE(t.why.message.find(odd.there), std::string::npos) << t.why.message;
  node->stop();
}

INSTANTIATE_TEST_SUITE_P(
    fields, mismatch,
    ::testing::Values(odd_geometry{"block_tokens", 8, 4, 2, 32, "fp16", "8", "16"},
                      odd_geometry{"dtype", 16, 4, 2, 32, "bf16", "bf16", "fp16"},
                      odd_geometry{"layers", 16, 3, 2, 32, "fp16", "3", "4"},
                      odd_geometry{"kv_heads", 16, 4, 1, 32, "fp16", "1", "2"},
                      odd_geometry{"head_dim", 16, 4, 2, 64, "fp16", "64", "32"}),
    [](const auto& test) { return test.param.field; });

}  // namespace
}  // namespace troupe::testing
