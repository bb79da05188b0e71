#pragma once

/// Engines that follow a script line by line, so that a test can stop them in any state of a
/// transfer.

#include <algorithm>
#include <cstdint>
#include <sstream>
#include <string>

#include "ways.hpp"

namespace troupe::testing {

/// Says "up", then carries out each line until "end". Answers "port" with the node's port; passes
/// every other line to `does(verb, words)`, which returns nonzero on failure.
template <class Does>
int follow_script(const engine& node, line_channel& channel, Does does) {
  channel.say("up");
  while (auto line = channel.order()) {
    std::istringstream words{*line};
    std::string verb;
    words >> verb;
    if (verb == "end") return 0;
    if (verb == "port") channel.say(std::to_string(node.report().node.port));
    if (const int failed = does(verb, words); failed != 0) return failed;
  }
  return 0;
}

/// A prefill engine that carries out each line: "send ID TOKENS SEED", "compute LAYERS" (computes
/// that many), "tell LAYERS" (reports that many as computed), "ready LAYERS" (both), "seal",
/// "outcome" (answers with the outcome), "port". Answers "ok" to each of the others.
inline int scripted_prefill(engine& node, line_channel& channel) {
  cache_bytes cache{node};
  listener events{node};
  const auto block_tokens = node.layout().block_tokens;
  kvcache::allocation blocks;
  operation_id send;
  std::uint32_t tokens = 0;
  std::uint64_t seed = 0;
  return follow_script(node, channel, [&](const std::string& verb, std::istringstream& words) {
    if (verb == "send") {
      std::string request;
      words >> request >> tokens >> seed;
      auto got = node.allocate_blocks((tokens + block_tokens - 1) / block_tokens);
      if (!got) return 1;
      blocks = *got;
      auto sent = node.send({request, blocks.blocks});
      if (!sent) return 2;
      send = *sent;
      channel.say("ok");
    } else if (verb == "compute" || verb == "tell" || verb == "ready") {
      std::uint32_t layers = 0;
      words >> layers;
      if (verb != "tell") cache.fill(blocks.blocks, 0, layers, 0, tokens, seed);
      if (verb != "compute") (void)node.layers_ready(send, 0, layers, tokens);
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
    return 0;
  });
}

/// A polling engine sends only while it polls, and only once it has a link.
inline void poll_until_asked(const engine& node, listener& events) {
  const auto linked = [&] {
    const auto links = node.report().links;
    return std::ranges::any_of(links, [](const auto& l) { return l.state == "up"; });
  };
  (void)events.until(linked);
  events.listen_for(100ms);
}

/// A decode engine: "ask ID TOKENS [DEADLINE_MS]" begins a receive, "receive ..." also waits until
/// the prefill knows of it, "layers" waits until a layer has come, "outcome SEED" answers with the
/// outcome, "hoard" takes every block of its pool, "release" gives them back, "port" answers with
/// the node's port.
inline int scripted_decode(const way& w, engine& node, line_channel& channel) {
  cache_bytes cache{node};
  listener events{node};
  kvcache::allocation hoard;
  operation_id receive;
  std::uint32_t tokens = 0;
  return follow_script(node, channel, [&](const std::string& verb, std::istringstream& words) {
    if (verb == "ask" || verb == "receive") {
      std::string request;
      std::int64_t deadline = 0;
      words >> request >> tokens;
      if (!(words >> deadline)) deadline = 0;
      auto asked = node.receive({request,
                                 {"prefill-0"},
                                 mode_of(w),
                                 tokens,
                                 0,
                                 {},
                                 0,
                                 std::chrono::milliseconds{deadline}});
      if (!asked) return 1;
      receive = *asked;
      if (verb == "receive") poll_until_asked(node, events);
      channel.say("ok");
    } else if (verb == "layers") {
      if (!events.until([&] { return !events.of(receive).layers.empty(); })) return 2;
      channel.say("ok");
    } else if (verb == "outcome") {
      std::uint64_t seed = 0;
      words >> seed;
      if (!events.unpinned(receive)) return 3;
      auto& t = events.of(receive);
      auto outcome = t.failed > 0 ? to_string(t.why) : std::string{"done"};
      const auto wrong = t.failed > 0 ? 0 : cache.differing(t.allocated->blocks, 0, tokens, seed);
      if (wrong > 0) outcome = std::to_string(wrong) + " pieces are wrong";
      if (t.allocated) (void)node.free_blocks(t.allocated->owner, t.allocated->blocks);
      channel.say(outcome);
    } else if (verb == "hoard") {
      auto all = node.allocate_blocks(static_cast<std::uint32_t>(node.report().pool.blocks_free));
      if (!all) return 4;
      hoard = *all;
      channel.say("ok");
    } else if (verb == "release") {
      (void)node.free_blocks(hoard.owner, hoard.blocks);
      channel.say("ok");
    }
    return 0;
  });
}

}  // namespace troupe::testing
