// Transfers between real processes, in every mode and over every backend of this machine.

#include <map>
#include <random>

#include "gpu_ways.hpp"

namespace troupe::testing {
namespace {

/// A prefill engine that follows orders: "REQUEST TOKENS CHUNK" computes a request in chunks, layer
/// by layer, and answers with the outcome; "end" ends it.
int obedient_prefill(engine& node, line_channel& channel) {
  cache_bytes cache{node};
  listener events{node};
  const auto layers = static_cast<std::uint32_t>(node.layout().layers.size());
  const auto block_tokens = node.layout().block_tokens;
  while (auto line = channel.order()) {
    if (*line == "end") return 0;
    std::istringstream words{*line};
    std::string request;
    std::uint32_t tokens = 0, chunk = 0;
    std::uint64_t seed = 0;
    words >> request >> tokens >> chunk >> seed;
    auto blocks = node.allocate_blocks((tokens + block_tokens - 1) / block_tokens);
    if (!blocks) {
      channel.say("no blocks: " + to_string(blocks.error()));
      continue;
    }
    auto send = node.send({request, blocks->blocks});
    if (!send) {
      channel.say("no send: " + to_string(send.error()));
      continue;
    }
    for (std::uint32_t begin = 0; begin < tokens; begin += chunk) {
      const auto end = std::min(tokens, begin + chunk);
      for (std::uint32_t layer = 0; layer < layers; ++layer) {
        cache.fill(blocks->blocks, layer, layer + 1, begin, end, seed);
        (void)node.layers_ready(*send, layer, layer + 1, end);
      }
    }
    (void)node.seal(*send, tokens, {std::byte{7}, std::byte{9}});
    (void)node.free_blocks(blocks->owner, blocks->blocks);
    if (!events.unpinned(*send)) channel.say("no end");
    auto& t = events.of(*send);
    channel.say(t.failed > 0 ? to_string(t.why) : "done " + std::to_string(t.bytes));
  }
  return 0;
}

class transfer : public ::testing::TestWithParam<way> {
 protected:
  cluster_options options{unhurried(options_of(GetParam()))};
  std::unique_ptr<cluster> c;
  std::unique_ptr<forked> prefill;
  std::unique_ptr<engine> decode;
  std::unique_ptr<cache_bytes> cache;
  std::unique_ptr<listener> events;

  /// Runs `body` as the prefill node in a process of its own; the decode node is in this process.
  void start(const std::function<int(engine&, line_channel&)>& body) {
    c = std::make_unique<cluster>(options);
    prefill = c->spawn("prefill-0", body);
    cluster::quiet("decode");
    decode = c->start("decode-0");
    ASSERT_TRUE(decode);
    cache = std::make_unique<cache_bytes>(*decode);
    events = std::make_unique<listener>(*decode);
  }
  result<operation_id> receive(const std::string& request, std::uint32_t tokens,
                               std::uint32_t prefix = 0, const std::vector<block_id>& blocks = {},
                               std::chrono::milliseconds deadline = 0ms) {
    return decode->receive(
        {request, {"prefill-0"}, mode_of(GetParam()), tokens, prefix, blocks, 0, deadline});
  }
  void expect_every_byte_moved();
};

void transfer::expect_every_byte_moved() {
  start(obedient_prefill);
  cache->poison();
  prefill->channel().say("r1 100 40 11");
  const auto id = receive("r1", 100);
  ASSERT_TRUE(id) << to_string(id.error());
  ASSERT_TRUE(events->unpinned(*id));
  auto& t = events->of(*id);
  EXPECT_EQ(t.failed, 0) << to_string(t.why);
  EXPECT_EQ(t.done, 1);
  ASSERT_TRUE(t.allocated);
  EXPECT_EQ(cache->differing(t.allocated->blocks, 0, 100, 11), 0u);
  EXPECT_EQ(t.aux, (std::vector<std::byte>{std::byte{7}, std::byte{9}}));
  EXPECT_EQ(prefill->channel().hear().value_or("silence").substr(0, 5), "done ");
  ASSERT_TRUE(decode->free_blocks(t.allocated->owner, t.allocated->blocks));
}

TEST_P(transfer, moves_every_byte_of_a_chunked_prefill_and_says_done_once_at_both_sides) {
  expect_every_byte_moved();
}

TEST_P(transfer, works_when_the_decode_side_comes_first) {
  start(obedient_prefill);
  const auto asked = std::chrono::steady_clock::now();
  const auto id = receive("late", 33);
  ASSERT_TRUE(id);
  events->listen_for(300ms);
  EXPECT_EQ(events->of(*id).done + events->of(*id).failed, 0);
  prefill->channel().say("late 33 33 5");
  ASSERT_TRUE(events->outcome(*id));
  const auto& how = events->of(*id).how;
  EXPECT_GT(how.waited, 0us);
  EXPECT_LE(how.waited + how.moving, std::chrono::steady_clock::now() - asked);
  EXPECT_EQ(how.backend, GetParam().backend);
  EXPECT_EQ(events->of(*id).failed, 0) << to_string(events->of(*id).why);
  EXPECT_EQ(cache->differing(events->of(*id).allocated->blocks, 0, 33, 5), 0u);
}

TEST_P(transfer, leaves_a_prefix_alone_that_is_already_there) {
  start(obedient_prefill);
  cache->poison();
  auto blocks = decode->allocate_blocks(4);
  ASSERT_TRUE(blocks);
  cache->fill(blocks->blocks, 0, 4, 0, 21, 99);
  prefill->channel().say("p 60 60 3");
  const auto id = receive("p", 60, 21, blocks->blocks);
  ASSERT_TRUE(id) << to_string(id.error());
  ASSERT_TRUE(events->outcome(*id));
  EXPECT_EQ(events->of(*id).failed, 0) << to_string(events->of(*id).why);
  EXPECT_EQ(cache->differing(blocks->blocks, 0, 21, 99), 0u);
  EXPECT_EQ(cache->differing(blocks->blocks, 21, 60, 3), 0u);
}

TEST_P(transfer, of_nothing_completes_at_once) {
  start(obedient_prefill);
  auto blocks = decode->allocate_blocks(2);
  ASSERT_TRUE(blocks);
  prefill->channel().say("e 32 32 1");
  const auto id = receive("e", 32, 32, blocks->blocks);
  ASSERT_TRUE(id);
  ASSERT_TRUE(events->outcome(*id));
  EXPECT_EQ(events->of(*id).failed, 0) << to_string(events->of(*id).why);
  EXPECT_EQ(events->of(*id).bytes, 0u);
  EXPECT_EQ(prefill->channel().hear().value_or("silence").substr(0, 4), "done");
}

TEST_P(transfer, of_many_requests_share_one_link_and_none_is_mixed_up) {
  constexpr int count = 24;
  start([](engine& node, line_channel& channel) {
    cache_bytes memory{node};
    listener heard{node};
    std::vector<operation_id> sends;
    for (int i = 0; i < count; ++i) {
      const auto tokens = static_cast<std::uint32_t>(17 + i);
      auto blocks = node.allocate_blocks((tokens + 15) / 16);
      if (!blocks) return 1;
      auto send = node.send({"m" + std::to_string(i), blocks->blocks});
      if (!send) return 2;
      memory.fill(blocks->blocks, 0, 4, 0, tokens, static_cast<std::uint64_t>(1000 + i));
      (void)node.layers_ready(*send, 0, 4, tokens);
      (void)node.seal(*send, tokens);
      sends.push_back(*send);
    }
    for (const auto send : sends) {
      if (!heard.outcome(send) || heard.of(send).done != 1) {
        channel.say(to_string(heard.of(send).why));
        return 3;
      }
    }
    channel.say("all done");
    (void)channel.hear();
    return 0;
  });
  std::vector<operation_id> receives;
  for (int i = 0; i < count; ++i) {
    const auto id = receive("m" + std::to_string(i), static_cast<std::uint32_t>(17 + i));
    ASSERT_TRUE(id);
    receives.push_back(*id);
  }
  for (int i = 0; i < count; ++i) {
    ASSERT_TRUE(events->outcome(receives[static_cast<std::size_t>(i)]));
    auto& t = events->of(receives[static_cast<std::size_t>(i)]);
    EXPECT_EQ(t.done, 1) << to_string(t.why);
    EXPECT_EQ(cache->differing(t.allocated->blocks, 0, static_cast<std::uint32_t>(17 + i),
                               static_cast<std::uint64_t>(1000 + i)),
              0u);
  }
  EXPECT_EQ(prefill->channel().hear().value_or("silence"), "all done");
}

TEST_P(transfer, that_the_prefill_engine_aborts_fails_at_both_sides_with_its_reason) {
  start([](engine& node, line_channel& channel) {
    listener heard{node};
    auto blocks = node.allocate_blocks(2);
    auto send = node.send({"a", blocks->blocks});
    if (!send) return 1;
    (void)channel.hear();
    (void)node.abort(*send, "out of patience");
    if (!heard.unpinned(*send)) return 2;
    channel.say(to_string(heard.of(*send).why));
    (void)channel.hear();
    return 0;
  });
  const auto id = receive("a", 32);
  ASSERT_TRUE(id);
  ASSERT_TRUE(events->moving());
  prefill->channel().say("now");
  ASSERT_TRUE(events->unpinned(*id));
  auto& t = events->of(*id);
  EXPECT_EQ(t.failed, 1);
  EXPECT_EQ(t.why.code, errc::aborted);
  EXPECT_NE(t.why.message.find("out of patience"), std::string::npos) << t.why.message;
  EXPECT_EQ(prefill->channel().hear().value_or("silence"), "aborted: out of patience");
}

TEST_P(transfer, that_the_decode_engine_aborts_fails_at_both_sides) {
  start([](engine& node, line_channel& channel) {
    listener heard{node};
    auto blocks = node.allocate_blocks(2);
    auto send = node.send({"a", blocks->blocks});
    if (!send) return 1;
    (void)node.layers_ready(*send, 0, 1, 32);
    // An abort that arrives before the prefill engine offers the request would not reach it.
    channel.say("offered");
    if (!heard.unpinned(*send)) return 2;
    channel.say(to_string(heard.of(*send).why.code).data());
    (void)channel.hear();
    return 0;
  });
  ASSERT_EQ(prefill->channel().hear().value_or("silence"), "offered");
  const auto id = receive("a", 32);
  ASSERT_TRUE(id);
  ASSERT_TRUE(events->moving());
  ASSERT_TRUE(decode->abort(*id, "client went away"));
  ASSERT_TRUE(events->unpinned(*id));
  EXPECT_EQ(events->of(*id).why.code, errc::aborted);
  EXPECT_EQ(prefill->channel().hear().value_or("silence"), "aborted");
}

// The abort follows the request immediately, perhaps before the request has an actor.
TEST_P(transfer, that_is_given_up_at_once_fails_at_both_sides) {
  constexpr int requests = 200;
  start([](engine& node, line_channel& channel) {
    listener heard{node};
    auto blocks = node.allocate_blocks(2);
    std::vector<operation_id> sends;
    for (int i = 0; i < requests; ++i) {
      auto send = node.send({"q" + std::to_string(i), blocks->blocks, 0, 10 * wait_limit, 0});
      if (!send) return 1;
      sends.push_back(*send);
    }
    channel.say("offered");
    int aborted = 0;
    for (const auto send : sends) {
      if (!heard.unpinned(send)) break;
      if (heard.of(send).why.code == errc::aborted) ++aborted;
    }
    channel.say(std::to_string(aborted));
    (void)channel.hear();
    return 0;
  });
  ASSERT_EQ(prefill->channel().hear().value_or("silence"), "offered");
  // With named blocks the request goes out at once; one that still waits for blocks reaches no
  // peer.
  const auto blocks = decode->allocate_blocks(2);
  ASSERT_TRUE(blocks);
  const auto ask = [&](int i) {
    return receive("q" + std::to_string(i), 32, 0, blocks->blocks, 10 * wait_limit);
  };
  const auto give_up = [&](const result<operation_id>& operation) {
    ASSERT_TRUE(operation);
    ASSERT_TRUE(decode->abort(*operation, "at once"));
    ASSERT_TRUE(events->unpinned(*operation));
    EXPECT_EQ(to_string(events->of(*operation).why), "aborted: at once");
  };
  const auto first = ask(0);  // brings the link up
  ASSERT_TRUE(events->moving());
  give_up(first);
  for (int i = 1; i < requests; ++i) give_up(ask(i));
  EXPECT_EQ(prefill->channel().hear().value_or("silence"), std::to_string(requests));
}

TEST_P(transfer, that_is_never_sealed_ends_at_its_deadline_at_both_sides) {
  options.deadline = "700ms";
  start([](engine& node, line_channel& channel) {
    listener heard{node};
    auto blocks = node.allocate_blocks(2);
    auto send = node.send({"n", blocks->blocks, 0, 1500ms, 0});
    if (!send) return 1;
    (void)node.layers_ready(*send, 0, 4, 16);
    if (!heard.unpinned(*send)) return 2;
    channel.say(to_string(heard.of(*send).why.code).data());
    (void)channel.hear();
    return 0;
  });
  const auto id = receive("n", 32);
  ASSERT_TRUE(id);
  ASSERT_TRUE(events->unpinned(*id));
  EXPECT_EQ(events->of(*id).why.code, errc::deadline);
  EXPECT_EQ(prefill->channel().hear().value_or("silence"), "deadline");
}

// -- between memory of a GPU and the host's

/// The backend that `auto` chooses for such a pair on one host.
constexpr auto best_of_a_mixed_pair = "shm";

std::vector<way> mixed_ways() {
  if (gpu_ways().empty()) return {};  // which also creates the doubles
  return {{"tcp", "write"}, {"tcp", "read"},   {"shm", "write"},
          {"shm", "read"},  {"auto", "write"}, {"auto", "read"}};
}

class mixed_memory : public transfer {
 protected:
  void expect_moved() {
    expect_every_byte_moved();
    if (HasFatalFailure()) return;
    const auto links = decode->report().links;
    ASSERT_EQ(links.size(), 1u);
    EXPECT_EQ(links.front().backend,
              GetParam().backend == "auto" ? best_of_a_mixed_pair : GetParam().backend);
  }
};

TEST_P(mixed_memory, from_a_gpu_to_the_host_takes_every_byte) {
  options.prefill_device = "gpu:1";
  expect_moved();
}

TEST_P(mixed_memory, from_the_host_to_a_gpu_takes_every_byte) {
  options.decode_device = "gpu:1";
  expect_moved();
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(mixed_memory);
INSTANTIATE_TEST_SUITE_P(of_two_nodes, mixed_memory, ::testing::ValuesIn(mixed_ways()), name_of);
INSTANTIATE_TEST_SUITE_P(every_way, transfer, ::testing::ValuesIn(every_way()), name_of);
INSTANTIATE_TEST_SUITE_P(over_gpus, transfer, ::testing::ValuesIn(gpu_ways()), name_of);

}  // namespace
}  // namespace troupe::testing
