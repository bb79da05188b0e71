// A process of a transfer dies or freezes, at every state of the transfer: what the other one sees,
// and what becomes of its blocks. Real processes, real signals.

#include <algorithm>
#include <string>

#include "cluster_fixture.hpp"

namespace troupe::testing {
namespace {

struct way {
  std::string backend;
  std::string mode;
};

std::string name_of(const ::testing::TestParamInfo<way>& info) {
  return info.param.backend + "_" + info.param.mode;
}

actors::transfer_mode mode_of(const way& w) {
  return w.mode == "write" ? actors::transfer_mode::write : actors::transfer_mode::read;
}

cluster_options options_of(const way& w) {
  cluster_options options;
  options.backend = w.backend;
  options.mode = w.mode;
  options.deadline = "20s";  // what ends a transfer here is the fault, not the clock
  options.prefill_pool = "16MiB";
  options.decode_pool = "16MiB";
  return options;
}

/// How long a survivor may take to notice.
constexpr auto noticed = 2s * patience;

/// A prefill engine that does what each line says: "send ID TOKENS SEED", "ready LAYERS" (that many
/// are computed), "seal", "outcome" (answers with it). Says "ok" after each of them.
int scripted_prefill(engine& node, line_channel& channel) {
  cache_bytes cache{node};
  listener events{node};
  const auto block_tokens = node.layout().block_tokens;
  kvcache::allocation blocks;
  operation_id send;
  std::uint32_t tokens = 0;
  std::uint64_t seed = 0;
  channel.say("up");
  while (auto line = channel.hear(60s)) {
    std::istringstream words{*line};
    std::string verb;
    words >> verb;
    if (verb == "end") return 0;
    if (verb == "send") {
      std::string request;
      words >> request >> tokens >> seed;
      auto got = node.allocate_blocks((tokens + block_tokens - 1) / block_tokens);
      if (!got) return 1;
      blocks = *got;
      auto sent = node.send({request, blocks.blocks, 0, 0ms, 0});
      if (!sent) return 2;
      send = *sent;
      channel.say("ok");
    } else if (verb == "ready") {
      std::uint32_t layers = 0;
      words >> layers;
      cache.fill(blocks.blocks, 0, layers, 0, tokens, seed);
      (void)node.layers_ready(send, 0, layers, tokens);
      channel.say("ok");
    } else if (verb == "seal") {
      (void)node.seal(send, tokens);
      channel.say("ok");
    } else if (verb == "outcome") {
      if (!events.unpinned(send)) return 3;
      (void)node.free_blocks(blocks.owner, blocks.blocks);
      const auto& t = events.of(send);
      channel.say(t.failed > 0 ? to_string(t.why) : "done");
    }
  }
  return 0;
}

/// A decode engine: "receive ID TOKENS" asks, "layers" waits until some layer came, "outcome SEED"
/// answers with it.
int scripted_decode(const way& w, engine& node, line_channel& channel) {
  cache_bytes cache{node};
  listener events{node};
  operation_id receive;
  std::uint32_t tokens = 0;
  channel.say("up");
  while (auto line = channel.hear(60s)) {
    std::istringstream words{*line};
    std::string verb;
    words >> verb;
    if (verb == "end") return 0;
    if (verb == "receive") {
      std::string request;
      words >> request >> tokens;
      auto asked = node.receive({request, {"prefill-0"}, mode_of(w), tokens, 0, {}, 0, 0ms, false});
      if (!asked) return 1;
      receive = *asked;
      events.listen_for(100ms);  // a polling engine sends only while it polls
      channel.say("ok");
    } else if (verb == "layers") {
      if (!events.until([&] { return !events.of(receive).layers.empty(); })) return 2;
      channel.say("ok");
    } else if (verb == "outcome") {
      std::uint64_t seed = 0;
      words >> seed;
      if (!events.unpinned(receive)) return 3;
      auto& t = events.of(receive);
      if (t.failed > 0) {
        channel.say(to_string(t.why));
        continue;
      }
      const auto wrong = cache.differing(t.allocated->blocks, 0, tokens, seed);
      (void)node.free_blocks(t.allocated->owner, t.allocated->blocks);
      channel.say(wrong == 0 ? "done" : std::to_string(wrong) + " pieces are wrong");
    }
  }
  return 0;
}

/// A process that becomes node `name` when it is told "start". Fork it before the first engine of
/// the test starts.
std::unique_ptr<forked> later(const cluster& c, const std::string& name,
                              std::function<int(engine&, line_channel&)> body,
                              bool polling = false) {
  return std::make_unique<forked>(
      [&c, name, body = std::move(body), polling](line_channel& channel) {
        cluster::quiet(name);
        if (!channel.hear(60s)) return 0;
        engine_options options;
        options.polling = polling;
        auto node = c.start(name, std::move(options));
        return node ? body(*node, channel) : 1;
      });
}

void begin(forked& child) {
  child.channel().say("start");
  ASSERT_EQ(child.channel().hear().value_or("silence"), "up");
}

std::string ask(forked& child, const std::string& line) {
  child.channel().say(line);
  return child.channel().hear().value_or("silence");
}

/// Waits for the pool to be whole again: nothing allocated, nothing in quarantine.
::testing::AssertionResult whole(const engine& node, std::chrono::milliseconds patience = 3s) {
  const auto until = std::chrono::steady_clock::now() + patience;
  for (;;) {
    const auto pool = node.report().pool;
    if (pool.blocks_total > 0 && pool.blocks_free == pool.blocks_total &&
        pool.blocks_quarantined == 0)
      return ::testing::AssertionSuccess();
    if (std::chrono::steady_clock::now() >= until) {
      return ::testing::AssertionFailure()
             << pool.blocks_free << " of " << pool.blocks_total << " blocks free, "
             << pool.blocks_quarantined << " in quarantine";
    }
    std::this_thread::sleep_for(10ms);
  }
}

class fault : public ::testing::TestWithParam<way> {
 protected:
  fault() : fault{options_of(GetParam())} {}
  explicit fault(cluster_options options) : c{std::move(options)} {}

  cluster c;
  std::unique_ptr<engine> node;
  std::unique_ptr<cache_bytes> cache;
  std::unique_ptr<listener> events;

  /// The survivor, in this process. After every fork.
  void survive_as(const std::string& name) {
    cluster::quiet(name);
    node = c.start(name);
    ASSERT_TRUE(node);
    cache = std::make_unique<cache_bytes>(*node);
    events = std::make_unique<listener>(*node);
  }
  operation_id receive(const std::string& request, std::uint32_t tokens,
                       std::chrono::milliseconds deadline = 0ms) {
    auto asked = node->receive(
        {request, {"prefill-0"}, mode_of(GetParam()), tokens, 0, {}, 0, deadline, false});
    EXPECT_TRUE(asked) << to_string(asked.error());
    return asked.value_or(operation_id{});
  }
  operation_id send(const std::string& request, std::uint32_t tokens, kvcache::allocation& blocks) {
    auto got = node->allocate_blocks((tokens + 15) / 16);
    EXPECT_TRUE(got);
    blocks = got.value_or(kvcache::allocation{});
    auto sent = node->send({request, blocks.blocks, 0, 0ms, 0});
    EXPECT_TRUE(sent) << to_string(sent.error());
    return sent.value_or(operation_id{});
  }
  /// The operation failed once, since the peer was lost, and in time; its blocks come back after
  /// `unpinned`.
  void expect_lost(operation_id id, std::chrono::steady_clock::time_point killed) {
    ASSERT_TRUE(events->outcome(id, 10s));
    EXPECT_LT(std::chrono::steady_clock::now() - killed, noticed);
    ASSERT_TRUE(events->unpinned(id, 10s));
    events->listen_for(100ms);
    const auto& t = events->of(id);
    EXPECT_EQ(t.failed, 1);
    EXPECT_EQ(t.done, 0);
    EXPECT_EQ(t.unpinned, 1);
    EXPECT_EQ(t.why.code, errc::peer_lost) << to_string(t.why);
  }
  /// Receives a whole request of a scripted prefill and checks it.
  void take_from(forked& prefill, const std::string& request, std::uint64_t seed) {
    ASSERT_EQ(ask(prefill, "send " + request + " 50 " + std::to_string(seed)), "ok");
    ASSERT_EQ(ask(prefill, "ready 4"), "ok");
    ASSERT_EQ(ask(prefill, "seal"), "ok");
    const auto id = receive(request, 50);
    ASSERT_TRUE(events->unpinned(id));
    auto& t = events->of(id);
    ASSERT_EQ(t.done, 1) << to_string(t.why);
    EXPECT_EQ(cache->differing(t.allocated->blocks, 0, 50, seed), 0u);
    ASSERT_TRUE(node->free_blocks(t.allocated->owner, t.allocated->blocks));
    EXPECT_EQ(ask(prefill, "outcome"), "done");
  }
  /// Gives a whole request to a scripted decode.
  void give_to(forked& decode, const std::string& request, std::uint64_t seed) {
    kvcache::allocation blocks;
    const auto id = send(request, 50, blocks);
    cache->fill(blocks.blocks, 0, 4, 0, 50, seed);
    ASSERT_TRUE(node->layers_ready(id, 0, 4, 50));
    ASSERT_TRUE(node->seal(id, 50));
    ASSERT_EQ(ask(decode, "receive " + request + " 50"), "ok");
    EXPECT_EQ(ask(decode, "outcome " + std::to_string(seed)), "done");
    ASSERT_TRUE(events->unpinned(id));
    EXPECT_EQ(events->of(id).done, 1) << to_string(events->of(id).why);
    ASSERT_TRUE(node->free_blocks(blocks.owner, blocks.blocks));
  }
};

// -- prefill is killed

TEST_P(fault, a_prefill_killed_while_idle_is_replaced_under_its_name) {
  auto first = later(c, "prefill-0", scripted_prefill);
  auto second = later(c, "prefill-0", scripted_prefill);
  survive_as("decode-0");
  begin(*first);
  take_from(*first, "a", 1);
  first->end(SIGKILL);
  events->listen_for(200ms);
  begin(*second);
  take_from(*second, "b", 2);
  const auto links = node->report().links;
  EXPECT_EQ(std::ranges::count_if(links, [](const auto& link) { return link.peer == "prefill-0"; }),
            1)
      << "the link with the former life is still there";
  EXPECT_TRUE(whole(*node));
}

TEST_P(fault, a_prefill_killed_before_the_request_met_its_source_ends_the_receive) {
  auto first = later(c, "prefill-0", scripted_prefill);
  auto second = later(c, "prefill-0", scripted_prefill);
  survive_as("decode-0");
  begin(*first);
  const auto id = receive("early", 50);
  events->listen_for(300ms);
  ASSERT_EQ(events->of(id).failed, 0) << to_string(events->of(id).why);
  const auto blocks = events->of(id).allocated;
  ASSERT_TRUE(blocks);
  ASSERT_TRUE(node->free_blocks(blocks->owner, blocks->blocks));
  EXPECT_EQ(node->report().pool.blocks_quarantined, blocks->blocks.size());
  const auto killed = std::chrono::steady_clock::now();
  first->end(SIGKILL);
  expect_lost(id, killed);
  EXPECT_TRUE(whole(*node));
  begin(*second);
  take_from(*second, "early", 2);
}

TEST_P(fault, a_prefill_killed_between_layers_ends_the_receive) {
  auto first = later(c, "prefill-0", scripted_prefill);
  auto second = later(c, "prefill-0", scripted_prefill);
  survive_as("decode-0");
  begin(*first);
  ASSERT_EQ(ask(*first, "send r 50 7"), "ok");
  const auto id = receive("r", 50);
  ASSERT_EQ(ask(*first, "ready 2"), "ok");
  if (GetParam().mode == "write") {
    ASSERT_TRUE(events->until([&] { return !events->of(id).layers.empty(); }));
  } else {
    events->listen_for(200ms);
  }
  const auto blocks = events->of(id).allocated;
  ASSERT_TRUE(blocks);
  ASSERT_TRUE(node->free_blocks(blocks->owner, blocks->blocks));
  EXPECT_EQ(node->report().pool.blocks_quarantined, blocks->blocks.size())
      << "blocks that a live transfer may write to were given away";
  const auto killed = std::chrono::steady_clock::now();
  first->end(SIGKILL);
  expect_lost(id, killed);
  EXPECT_TRUE(whole(*node));
  begin(*second);
  take_from(*second, "r", 8);
}

TEST_P(fault, a_prefill_killed_while_draining_leaves_one_outcome_that_is_true) {
  auto first = later(c, "prefill-0", scripted_prefill);
  auto second = later(c, "prefill-0", scripted_prefill);
  survive_as("decode-0");
  begin(*first);
  take_from(*first, "first", 1);  // so that the link is up
  constexpr std::uint32_t tokens = 12'000;
  ASSERT_EQ(ask(*first, "send big " + std::to_string(tokens) + " 7"), "ok");
  ASSERT_EQ(ask(*first, "ready 4"), "ok");
  ASSERT_EQ(ask(*first, "seal"), "ok");
  const auto id = receive("big", tokens);
  ASSERT_TRUE(events->until([&] { return events->of(id).allocated.has_value(); }));
  events->listen_for(1ms);
  const auto killed = std::chrono::steady_clock::now();
  first->end(SIGKILL);
  ASSERT_TRUE(events->outcome(id, 10s));
  EXPECT_LT(std::chrono::steady_clock::now() - killed, noticed);
  ASSERT_TRUE(events->unpinned(id));
  events->listen_for(100ms);
  const auto& t = events->of(id);
  EXPECT_EQ(t.done + t.failed, 1);
  if (t.done == 1) {
    EXPECT_EQ(cache->differing(t.allocated->blocks, 0, tokens, 7), 0u);
  } else {
    EXPECT_EQ(t.why.code, errc::peer_lost) << to_string(t.why);
  }
  ASSERT_TRUE(node->free_blocks(t.allocated->owner, t.allocated->blocks));
  EXPECT_TRUE(whole(*node));
  begin(*second);
  take_from(*second, "big", 8);
}

TEST_P(fault, a_prefill_killed_after_done_changes_nothing) {
  auto first = later(c, "prefill-0", scripted_prefill);
  auto second = later(c, "prefill-0", scripted_prefill);
  survive_as("decode-0");
  begin(*first);
  ASSERT_EQ(ask(*first, "send r 50 7"), "ok");
  ASSERT_EQ(ask(*first, "ready 4"), "ok");
  ASSERT_EQ(ask(*first, "seal"), "ok");
  const auto id = receive("r", 50);
  ASSERT_TRUE(events->outcome(id));
  first->end(SIGKILL);
  events->listen_for(500ms);
  const auto& t = events->of(id);
  EXPECT_EQ(t.done, 1) << to_string(t.why);
  EXPECT_EQ(t.failed, 0);
  EXPECT_EQ(t.unpinned, 1);
  EXPECT_EQ(cache->differing(t.allocated->blocks, 0, 50, 7), 0u);
  ASSERT_TRUE(node->free_blocks(t.allocated->owner, t.allocated->blocks));
  EXPECT_TRUE(whole(*node));
  begin(*second);
  take_from(*second, "r", 8);
}

// -- decode is killed

TEST_P(fault, a_decode_killed_while_idle_is_replaced_under_its_name) {
  const auto body = [this](engine& e, line_channel& l) {
    return scripted_decode(GetParam(), e, l);
  };
  auto first = later(c, "decode-0", body);
  auto second = later(c, "decode-0", body);
  survive_as("prefill-0");
  begin(*first);
  give_to(*first, "a", 1);
  first->end(SIGKILL);
  events->listen_for(200ms);
  begin(*second);
  give_to(*second, "b", 2);
  EXPECT_TRUE(whole(*node));
}

TEST_P(fault, a_decode_killed_before_its_request_met_a_source_leaves_no_trace) {
  const auto body = [this](engine& e, line_channel& l) {
    return scripted_decode(GetParam(), e, l);
  };
  auto first = later(c, "decode-0", body);
  auto second = later(c, "decode-0", body);
  survive_as("prefill-0");
  begin(*first);
  ASSERT_EQ(ask(*first, "receive r 50"), "ok");
  events->listen_for(300ms);
  first->end(SIGKILL);
  events->listen_for(500ms);
  // The dead one's request must not be served from this source: the next one's must.
  begin(*second);
  give_to(*second, "r", 2);
  EXPECT_TRUE(whole(*node));
}

TEST_P(fault, a_decode_killed_between_layers_ends_the_send) {
  const auto body = [this](engine& e, line_channel& l) {
    return scripted_decode(GetParam(), e, l);
  };
  auto first = later(c, "decode-0", body);
  auto second = later(c, "decode-0", body);
  survive_as("prefill-0");
  begin(*first);
  kvcache::allocation blocks;
  const auto id = send("r", 50, blocks);
  ASSERT_EQ(ask(*first, "receive r 50"), "ok");
  cache->fill(blocks.blocks, 0, 2, 0, 50, 3);
  ASSERT_TRUE(node->layers_ready(id, 0, 2, 50));
  if (GetParam().mode == "write") {
    ASSERT_EQ(ask(*first, "layers"), "ok");
  } else {
    events->listen_for(200ms);
  }
  ASSERT_TRUE(node->free_blocks(blocks.owner, blocks.blocks));
  EXPECT_EQ(node->report().pool.blocks_quarantined, blocks.blocks.size());
  const auto killed = std::chrono::steady_clock::now();
  first->end(SIGKILL);
  expect_lost(id, killed);
  EXPECT_TRUE(whole(*node));
  begin(*second);
  give_to(*second, "r2", 4);
}

TEST_P(fault, a_decode_killed_while_draining_ends_the_send) {
  const auto body = [this](engine& e, line_channel& l) {
    return scripted_decode(GetParam(), e, l);
  };
  // The first one polls, and stops doing so: it never takes the seal or the offer.
  auto first = later(c, "decode-0", body, true);
  auto second = later(c, "decode-0", body);
  survive_as("prefill-0");
  begin(*first);
  kvcache::allocation blocks;
  const auto id = send("r", 50, blocks);
  ASSERT_EQ(ask(*first, "receive r 50"), "ok");
  cache->fill(blocks.blocks, 0, 4, 0, 50, 3);
  ASSERT_TRUE(node->layers_ready(id, 0, 4, 50));
  ASSERT_TRUE(node->seal(id, 50));
  events->listen_for(300ms);
  ASSERT_EQ(events->of(id).done + events->of(id).failed, 0) << to_string(events->of(id).why);
  ASSERT_TRUE(node->free_blocks(blocks.owner, blocks.blocks));
  EXPECT_EQ(node->report().pool.blocks_quarantined, blocks.blocks.size());
  const auto killed = std::chrono::steady_clock::now();
  first->end(SIGKILL);
  expect_lost(id, killed);
  EXPECT_TRUE(whole(*node));
  begin(*second);
  give_to(*second, "r2", 4);
}

TEST_P(fault, a_decode_killed_after_done_changes_nothing) {
  const auto body = [this](engine& e, line_channel& l) {
    return scripted_decode(GetParam(), e, l);
  };
  auto first = later(c, "decode-0", body);
  auto second = later(c, "decode-0", body);
  survive_as("prefill-0");
  begin(*first);
  kvcache::allocation blocks;
  const auto id = send("r", 50, blocks);
  cache->fill(blocks.blocks, 0, 4, 0, 50, 3);
  ASSERT_TRUE(node->layers_ready(id, 0, 4, 50));
  ASSERT_TRUE(node->seal(id, 50));
  ASSERT_EQ(ask(*first, "receive r 50"), "ok");
  ASSERT_TRUE(events->outcome(id));
  first->end(SIGKILL);
  events->listen_for(500ms);
  EXPECT_EQ(events->of(id).done, 1) << to_string(events->of(id).why);
  EXPECT_EQ(events->of(id).failed, 0);
  EXPECT_EQ(events->of(id).unpinned, 1);
  ASSERT_TRUE(node->free_blocks(blocks.owner, blocks.blocks));
  EXPECT_TRUE(whole(*node));
  begin(*second);
  give_to(*second, "r2", 4);
}

// -- prefill freezes

TEST_P(fault, a_prefill_that_stands_still_while_it_is_dialled_is_reached_when_it_goes_on) {
  auto prefill = later(c, "prefill-0", scripted_prefill);
  survive_as("decode-0");
  begin(*prefill);
  ASSERT_EQ(ask(*prefill, "send r 50 7"), "ok");
  ASSERT_EQ(ask(*prefill, "ready 4"), "ok");
  ASSERT_EQ(ask(*prefill, "seal"), "ok");
  prefill->stop();
  const auto id = receive("r", 50);
  events->listen_for(700ms);  // several keep-alives, and less than makes it dead
  EXPECT_EQ(events->of(id).failed, 0) << to_string(events->of(id).why);
  prefill->signal(SIGCONT);
  ASSERT_TRUE(events->unpinned(id));
  auto& t = events->of(id);
  ASSERT_EQ(t.done, 1) << to_string(t.why);
  EXPECT_EQ(cache->differing(t.allocated->blocks, 0, 50, 7), 0u);
  EXPECT_EQ(ask(*prefill, "outcome"), "done");
}

TEST_P(fault, what_a_stopped_prefill_still_writes_never_lands_in_reused_blocks) {
  constexpr std::uint32_t tokens = 12'000;
  auto prefill = later(c, "prefill-0", scripted_prefill);
  survive_as("decode-0");
  begin(*prefill);
  take_from(*prefill, "first", 1);  // so that the link is up
  ASSERT_EQ(ask(*prefill, "send big " + std::to_string(tokens) + " 7"), "ok");
  // What is read can be read only when all of it is there; what is written has more to come once it
  // runs again.
  const bool writes = GetParam().mode == "write";
  ASSERT_EQ(ask(*prefill, writes ? "ready 3" : "ready 4"), "ok");
  if (!writes) {
    ASSERT_EQ(ask(*prefill, "seal"), "ok");
  }
  const auto id = receive("big", tokens, 1000ms);
  ASSERT_TRUE(events->until([&] { return events->of(id).allocated.has_value(); }));
  if (writes) {
    prefill->channel().say("ready 4");
    prefill->channel().say("seal");
    std::this_thread::sleep_for(1ms);
  }
  prefill->stop();
  ASSERT_TRUE(events->outcome(id, 5s));
  auto& t = events->of(id);
  if (t.done == 1) GTEST_SKIP() << "it was done before it could be stopped";
  EXPECT_EQ(t.why.code, errc::deadline) << to_string(t.why);
  ASSERT_TRUE(node->free_blocks(t.allocated->owner, t.allocated->blocks));
  // Where only the peer can say that it writes no more, the blocks wait for it in quarantine.
  const bool before_waking = events->unpinned(id, 500ms);
  if (!before_waking) {
    EXPECT_EQ(node->report().pool.blocks_quarantined, t.allocated->blocks.size());
    prefill->signal(SIGCONT);
    ASSERT_TRUE(events->unpinned(id, 10s)) << "the blocks are lost";
  }
  if (GetParam().backend == "tcp") {
    EXPECT_TRUE(before_waking) << "a frozen peer keeps blocks that tcp can refuse it by itself";
  }
  RecordProperty("unpinned_before_waking", before_waking ? "yes" : "no");
  ASSERT_TRUE(whole(*node));
  auto reused = node->allocate_blocks(static_cast<std::uint32_t>(t.allocated->blocks.size()));
  ASSERT_TRUE(reused);
  cache->fill(reused->blocks, 0, 4, 0, tokens, 555);
  prefill->signal(SIGCONT);
  events->listen_for(700ms);
  EXPECT_EQ(cache->differing(reused->blocks, 0, tokens, 555), 0u)
      << "a late write landed in reused blocks";
  EXPECT_EQ(t.failed, 1);
  EXPECT_EQ(t.unpinned, 1);
  ASSERT_TRUE(node->free_blocks(reused->owner, reused->blocks));
  if (writes) {
    EXPECT_EQ(prefill->channel().hear().value_or("silence"), "ok");
    EXPECT_EQ(prefill->channel().hear().value_or("silence"), "ok");
  }
  EXPECT_NE(ask(*prefill, "outcome"), "done");
  take_from(*prefill, "after", 9);
}

// -- another decode takes over

class retry : public fault {
 protected:
  retry() : fault{with_window()} {}
  static cluster_options with_window() {
    auto options = options_of(GetParam());
    options.retry_window = "700ms";
    return options;
  }
};

TEST_P(retry, serves_another_decode_from_the_same_blocks_and_gives_it_the_whole_deadline) {
  const auto body = [this](engine& e, line_channel& l) {
    return scripted_decode(GetParam(), e, l);
  };
  auto first = later(c, "decode-0", body);
  auto second = later(c, "decode-0", body);
  survive_as("prefill-0");
  begin(*first);
  kvcache::allocation blocks;
  const auto id = send("r", 50, blocks);
  ASSERT_EQ(ask(*first, "receive r 50"), "ok");
  cache->fill(blocks.blocks, 0, 4, 0, 50, 3);
  ASSERT_TRUE(node->layers_ready(id, 0, 2, 50));
  events->listen_for(200ms);
  first->end(SIGKILL);
  begin(*second);
  ASSERT_EQ(ask(*second, "receive r 50"), "ok");
  // Longer than the window: it was for the arrival of another decode, not for its transfer.
  events->listen_for(1200ms);
  ASSERT_EQ(events->of(id).failed, 0) << to_string(events->of(id).why);
  ASSERT_TRUE(node->layers_ready(id, 2, 4, 50));
  ASSERT_TRUE(node->seal(id, 50));
  EXPECT_EQ(ask(*second, "outcome 3"), "done");
  ASSERT_TRUE(events->unpinned(id));
  EXPECT_EQ(events->of(id).done, 1);
  ASSERT_TRUE(node->free_blocks(blocks.owner, blocks.blocks));
  EXPECT_TRUE(whole(*node));
}

TEST_P(retry, ends_when_no_other_decode_comes_within_the_window) {
  const auto body = [this](engine& e, line_channel& l) {
    return scripted_decode(GetParam(), e, l);
  };
  auto first = later(c, "decode-0", body);
  survive_as("prefill-0");
  begin(*first);
  kvcache::allocation blocks;
  const auto id = send("r", 50, blocks);
  ASSERT_EQ(ask(*first, "receive r 50"), "ok");
  ASSERT_TRUE(node->layers_ready(id, 0, 2, 50));
  events->listen_for(200ms);
  first->end(SIGKILL);
  events->listen_for(300ms);
  EXPECT_EQ(events->of(id).failed, 0) << "the window is not over";
  ASSERT_TRUE(events->unpinned(id, 2s));
  EXPECT_EQ(events->of(id).failed, 1);
  EXPECT_EQ(events->of(id).why.code, errc::peer_lost) << to_string(events->of(id).why);
  ASSERT_TRUE(node->free_blocks(blocks.owner, blocks.blocks));
  EXPECT_TRUE(whole(*node));
}

INSTANTIATE_TEST_SUITE_P(every_way, retry,
                         ::testing::Values(way{"tcp", "write"}, way{"shm", "read"}), name_of);

INSTANTIATE_TEST_SUITE_P(every_way, fault,
                         ::testing::Values(way{"tcp", "write"}, way{"tcp", "read"},
                                           way{"shm", "write"}, way{"shm", "read"}),
                         name_of);

}  // namespace
}  // namespace troupe::testing
