#pragma once

/// Two live processes whose connections the test breaks.

#include <vector>

#include "broken_wire.hpp"
#include "fault_fixture.hpp"

namespace troupe::testing {

inline constexpr std::uint64_t loads = 24;

/// A prefill engine that gives every request "0", "1", ... the same tokens, as fast as it can.
inline int generous_prefill(engine& node, line_channel& channel) {
  cache_bytes cache{node};
  listener events{node};
  channel.say("up");
  if (!channel.order()) return 0;
  channel.say(std::to_string(node.report().node.port));
  if (!channel.order()) return 0;
  std::vector<std::pair<operation_id, kvcache::allocation>> sends;
  for (std::uint64_t i = 0; i < loads; ++i) {
    auto blocks = node.allocate_blocks(8);
    if (!blocks) return 1;
    auto sent = node.send({std::to_string(i), blocks->blocks});
    if (!sent) return 2;
    sends.emplace_back(*sent, *blocks);
  }
  for (std::uint64_t i = 0; i < sends.size(); ++i) {
    const auto& [id, blocks] = sends[i];
    for (std::uint32_t layer = 0; layer < 4; ++layer) {
      cache.fill(blocks.blocks, layer, layer + 1, 0, 128, i);
      (void)node.layers_ready(id, layer, layer + 1, 128);
      events.listen_for(12ms);
    }
    (void)node.seal(id, 128);
  }
  std::string failed;
  for (const auto& [id, blocks] : sends) {
    if (!events.unpinned(id)) return 3;
    if (events.of(id).failed > 0) failed = to_string(events.of(id).why);
    (void)node.free_blocks(blocks.owner, blocks.blocks);
  }
  if (!whole(node)) failed += "; blocks are missing";
  channel.say(failed.empty() ? "done" : failed);
  (void)channel.order();
  return 0;
}

class breakable : public fault {
 protected:
  using fault::fault;

  /// Ports of the cluster's own network layer, which must stay connected.
  std::set<int> cluster_ports() {
    const auto peer = ask(*first, "port");
    return {c.port(), node->report().node.port, std::atoi(peer.c_str())};
  }
  /// Closes the connections between the two nodes at this end.
  void cut() {
    const auto spared = cluster_ports();
    ASSERT_TRUE(events->until([&] { return cut_connections(spared) > 0; }))
        << "there was nothing to break";
  }
  actors::link_report link() {
    const auto links = node->report().links;
    return links.empty() ? actors::link_report{} : links.front();
  }
  /// At least `times`: a slow wire may also break by itself.
  void expect_rebuilt(std::uint32_t times) {
    EXPECT_TRUE(events->until([&] { return link().rebuilds >= times && link().state == "up"; }))
        << link().state << ", " << link().rebuilds << " times";
    EXPECT_EQ(node->report().links.size(), 1u);
    EXPECT_NE(link().last_break, "");
  }

  /// Starts many transfers at once. Returns the ports to spare when their connections are cut.
  std::set<int> start_load() {
    first = later(c, "prefill-0", generous_prefill);
    survive_as("decode-0");
    begin(*first);
    const auto spared = cluster_ports();
    first->channel().say("go");
    for (std::uint64_t i = 0; i < loads; ++i) load.push_back(receive(std::to_string(i), 128));
    EXPECT_TRUE(events->moving());
    return spared;
  }
  /// Expects every transfer to end as done at both sides, with the right bytes.
  void expect_loaded() {
    for (std::uint64_t i = 0; i < load.size(); ++i) {
      ASSERT_TRUE(events->unpinned(load[i])) << i;
      auto& t = events->of(load[i]);
      ASSERT_EQ(t.done, 1) << i << ": " << to_string(t.why);
      EXPECT_EQ(cache->differing(t.allocated->blocks, 0, 128, i), 0u) << i;
      ASSERT_TRUE(node->free_blocks(t.allocated->owner, t.allocated->blocks));
    }
    EXPECT_EQ(first->channel().hear().value_or("silence"), "done");
    EXPECT_TRUE(whole(*node));
  }

  std::vector<operation_id> load;
};

}  // namespace troupe::testing
