#pragma once

/// Tests in which one process of a transfer dies or freezes; the test's own process survives. Real
/// processes, real signals.

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "scripted_engines.hpp"

namespace troupe::testing {

/// How an engine makes progress: by the threads of its node, or only while it is asked for events.
enum class progress { event_driven, polling };

/// A process that becomes node `name` when it is told "start". Fork it before the first engine of
/// the test starts.
inline std::unique_ptr<forked> later(const cluster& c, const std::string& name,
                                     std::function<int(engine&, line_channel&)> body,
                                     progress how = progress::event_driven) {
  return std::make_unique<forked>([&c, name, body = std::move(body), how](line_channel& channel) {
    cluster::quiet(name);
    if (!channel.order()) return 0;
    engine_options options;
    options.polling = how == progress::polling;
    auto node = c.start(name, std::move(options));
    return node ? body(*node, channel) : 1;
  });
}

inline void begin(forked& child) {
  child.channel().say("start");
  ASSERT_EQ(child.channel().hear().value_or("silence"), "up");
}

inline std::string ask(forked& child, const std::string& line) {
  child.channel().say(line);
  return child.channel().hear().value_or("silence");
}

/// Waits for the pool to be whole again: nothing allocated, nothing in quarantine.
inline ::testing::AssertionResult whole(const engine& node) {
  actors::pool_report pool;
  const bool is_whole = comes_true(
      [&] {
        pool = node.report().pool;
        return pool.blocks_total > 0 && pool.blocks_free == pool.blocks_total &&
               pool.blocks_quarantined == 0;
      },
      10ms);
  if (is_whole) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << pool.blocks_free << " of " << pool.blocks_total << " blocks free, "
         << pool.blocks_quarantined << " in quarantine";
}

/// Whether the peer was lost for being silent, as a frozen process is. A killed process is detected
/// sooner.
inline bool was_silent(const troupe::error& why) {
  return why.message.find("silent for ") != std::string::npos;
}

class fault : public ::testing::TestWithParam<way> {
 protected:
  /// Only the fault ends a transfer, not a clock, and no live process is taken for dead.
  static cluster_options patient(const way& w) {
    auto options = unhurried(options_of(w));
    options.prefill_pool = "16MiB";
    options.decode_pool = "16MiB";
    return options;
  }
  fault() : fault{patient(GetParam())} {}
  explicit fault(cluster_options options) : c{std::move(options)} {}

  cluster c;
  std::unique_ptr<engine> node;
  std::unique_ptr<cache_bytes> cache;
  std::unique_ptr<listener> events;
  /// The process that dies, and its successor under the same name.
  std::unique_ptr<forked> first, second;

  /// Starts the first prefill-0, and decode-0 here.
  void start_prefill() {
    first = later(c, "prefill-0", scripted_prefill);
    second = later(c, "prefill-0", scripted_prefill);
    survive_as("decode-0");
    begin(*first);
  }
  /// Starts the first decode-0, and prefill-0 here.
  void start_decode(progress how = progress::event_driven) {
    const auto body = [this](engine& e, line_channel& l) {
      return scripted_decode(GetParam(), e, l);
    };
    first = later(c, "decode-0", body, how);
    second = later(c, "decode-0", body);
    survive_as("prefill-0");
    begin(*first);
  }
  /// Starts the survivor in this process. Call it after every fork.
  void survive_as(const std::string& name) {
    cluster::quiet(name);
    node = c.start(name);
    ASSERT_TRUE(node);
    cache = std::make_unique<cache_bytes>(*node);
    events = std::make_unique<listener>(*node);
  }
  operation_id receive(const std::string& request, std::uint32_t tokens,
                       std::chrono::milliseconds deadline = 0ms) {
    auto asked =
        node->receive({request, {"prefill-0"}, mode_of(GetParam()), tokens, 0, {}, 0, deadline});
    EXPECT_TRUE(asked) << to_string(asked.error());
    return asked.value_or(operation_id{});
  }
  operation_id send(const std::string& request, std::uint32_t tokens, kvcache::allocation& blocks) {
    auto got = node->allocate_blocks((tokens + 15) / 16);
    EXPECT_TRUE(got);
    blocks = got.value_or(kvcache::allocation{});
    auto sent = node->send({request, blocks.blocks});
    EXPECT_TRUE(sent) << to_string(sent.error());
    return sent.value_or(operation_id{});
  }
  /// Computes the rest of the request and reports it.
  void complete(operation_id id, const kvcache::allocation& blocks, std::uint64_t seed) {
    cache->fill(blocks.blocks, 0, 4, 0, 50, seed);
    ASSERT_TRUE(node->layers_ready(id, 0, 4, 50));
    ASSERT_TRUE(node->seal(id, 50));
  }
  /// Sends the first decode two of the four layers of request "r", for which it asked.
  operation_id send_two_layers(kvcache::allocation& blocks, std::uint64_t seed) {
    const auto id = send("r", 50, blocks);
    EXPECT_EQ(ask(*first, "receive r 50"), "ok");
    cache->fill(blocks.blocks, 0, 4, 0, 50, seed);
    EXPECT_TRUE(node->layers_ready(id, 0, 2, 50));
    EXPECT_TRUE(events->moving()) << "nobody asked for it";
    return id;
  }
  /// Asks the first prefill for request "r". Returns once two of its four layers are here, or this
  /// side has begun to read.
  operation_id receive_two_layers(std::uint64_t seed) {
    EXPECT_EQ(ask(*first, "send r 50 " + std::to_string(seed)), "ok");
    const auto id = receive("r", 50);
    EXPECT_EQ(ask(*first, "ready 2"), "ok");
    if (GetParam().mode == "write") {
      EXPECT_TRUE(events->until([&] { return !events->of(id).layers.empty(); })) << "nothing came";
    } else {
      EXPECT_TRUE(events->moving()) << "nothing moves";
    }
    return id;
  }
  /// Frees blocks that a live transfer has pinned: none of them may return to the pool yet.
  void free_under_way(const kvcache::allocation& blocks) {
    ASSERT_TRUE(node->free_blocks(blocks.owner, blocks.blocks));
    EXPECT_EQ(node->report().pool.blocks_quarantined, blocks.blocks.size())
        << "blocks that a live transfer still touches were given away";
  }
  /// Frees the blocks of a transfer that has ended. The pool must then be whole.
  void give_back(const kvcache::allocation& blocks) {
    ASSERT_TRUE(node->free_blocks(blocks.owner, blocks.blocks));
    EXPECT_TRUE(whole(*node));
  }
  /// Expects that the operation failed once because the peer's process was gone, and that its
  /// blocks return after `unpinned`.
  void expect_lost(operation_id id) {
    ASSERT_TRUE(events->outcome(id));
    ASSERT_TRUE(events->unpinned(id));
    events->listen_for(100ms);
    const auto& t = events->of(id);
    EXPECT_EQ(t.failed, 1);
    EXPECT_EQ(t.done, 0);
    EXPECT_EQ(t.unpinned, 1);
    EXPECT_EQ(t.why.code, errc::peer_lost) << to_string(t.why);
    EXPECT_FALSE(was_silent(t.why)) << to_string(t.why);
  }
  /// Kills the first peer while `id` moves `blocks`, which the engine has already freed. The
  /// operation must fail, the pool lose no block, and the second peer start under the same name.
  void kill_under_way(operation_id id, const kvcache::allocation& blocks) {
    free_under_way(blocks);
    first->end(SIGKILL);
    expect_lost(id);
    EXPECT_TRUE(whole(*node));
    begin(*second);
  }
  /// Receives a whole request of a scripted prefill and checks it.
  void take_from(forked& prefill, const std::string& request, std::uint64_t seed) {
    ASSERT_EQ(ask(prefill, "send " + request + " 50 " + std::to_string(seed)), "ok");
    ASSERT_EQ(ask(prefill, "ready 4"), "ok");
    ASSERT_EQ(ask(prefill, "seal"), "ok");
    expect_taken(prefill, receive(request, 50), seed);
  }
  /// Expects all that a scripted prefill sends to arrive, and both sides to report it.
  void expect_taken(forked& prefill, operation_id id, std::uint64_t seed,
                    std::uint32_t tokens = 50) {
    ASSERT_TRUE(events->unpinned(id));
    auto& t = events->of(id);
    ASSERT_EQ(t.done, 1) << to_string(t.why);
    EXPECT_EQ(cache->differing(t.allocated->blocks, 0, tokens, seed), 0u);
    ASSERT_TRUE(node->free_blocks(t.allocated->owner, t.allocated->blocks));
    EXPECT_EQ(ask(prefill, "outcome"), "done");
  }
  /// Like `expect_taken`, once the first prefill has sent the rest of its request.
  void expect_rest_taken(operation_id id, std::uint64_t seed) {
    ASSERT_EQ(ask(*first, "ready 4"), "ok");
    ASSERT_EQ(ask(*first, "seal"), "ok");
    expect_taken(*first, id, seed);
    EXPECT_TRUE(whole(*node));
  }
  /// Sends a whole request to a scripted decode.
  void give_to(forked& decode, const std::string& request, std::uint64_t seed) {
    kvcache::allocation blocks;
    const auto id = send(request, 50, blocks);
    complete(id, blocks, seed);
    ASSERT_EQ(ask(decode, "receive " + request + " 50"), "ok");
    expect_given(decode, id, blocks, seed);
  }
  /// Expects all of it to arrive at a scripted decode, and both sides to report it.
  void expect_given(forked& decode, operation_id id, const kvcache::allocation& blocks,
                    std::uint64_t seed) {
    EXPECT_EQ(ask(decode, "outcome " + std::to_string(seed)), "done");
    ASSERT_TRUE(events->unpinned(id));
    EXPECT_EQ(events->of(id).done, 1) << to_string(events->of(id).why);
    ASSERT_TRUE(node->free_blocks(blocks.owner, blocks.blocks));
  }
};

}  // namespace troupe::testing
