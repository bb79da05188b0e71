#pragma once

/// A router and the membership that it is given, for tests that change which nodes are up and check
/// where requests go. Stages are `prefill` and `decode`, nodes `decode-REPLICA-RANK`.

#include <algorithm>
#include <string>
#include <vector>

#include <gmock/gmock.h>

#include "troupe/actors/membership/router.hpp"

namespace troupe::actors::testing {

struct routed_stage {
  std::uint32_t replicas{1};
  std::uint32_t ranks{1};
};

inline router_options routes_of(routed_stage prefill, routed_stage decode,
                                placement_policy policy = placement_policy::round_robin) {
  router_options o;
  o.edges = {{"prefill", "decode", transfer_mode::write}};
  o.policies = {{"prefill", policy}, {"decode", policy}};
  const auto add = [&](const std::string& name, node_role role, routed_stage stage) {
    for (std::uint32_t replica = 0; replica < stage.replicas; ++replica) {
      for (std::uint32_t rank = stage.ranks; rank-- > 0;) {  // not in rank order
        o.slots.push_back({name + "-" + std::to_string(replica) + "-" + std::to_string(rank), name,
                           role, replica, rank, stage.ranks});
      }
    }
  };
  add("prefill", node_role::prefill, prefill);
  add("decode", node_role::decode, decode);
  o.seed = 5;
  return o;
}

struct routed_cluster {
  router_options options;
  router routes;
  membership members;
  steady_time now{std::chrono::hours{1}};
  int requests{0};

  explicit routed_cluster(router_options o) : options{std::move(o)}, routes{options} {}

  [[nodiscard]] member* find(const std::string& name) {
    const auto it =
        std::ranges::find(members.members, name, [](const member& m) { return m.node.name; });
    return it == members.members.end() ? nullptr : &*it;
  }
  /// Changes the membership without telling the router.
  void note(const std::string& name, node_state state, std::uint64_t incarnation,
            std::uint32_t queue = 0) {
    const auto slot = std::ranges::find(options.slots, name, &expected_slot::name);
    ASSERT_NE(slot, options.slots.end()) << name;
    member* m = find(name);
    if (m == nullptr) m = &members.members.emplace_back();
    m->node.name = name;
    m->node.stage = slot->stage;
    m->node.replica = slot->replica;
    m->node.rank = slot->rank;
    m->node.ranks = slot->ranks;
    m->node.incarnation = incarnation;
    m->state = static_cast<std::uint8_t>(state);
    m->load.queue_length = queue;
  }
  void tell() {
    ++members.epoch;
    routes.update(members, now);
  }
  void set(const std::string& name, node_state state, std::uint64_t incarnation = 1,
           std::uint32_t queue = 0) {
    note(name, state, incarnation, queue);
    tell();
  }
  void all_up() {
    for (const expected_slot& slot : options.slots) note(slot.name, node_state::up, 1);
    tell();
  }
  void beat(const std::string& name, std::uint32_t queue, std::uint64_t incarnation = 1) {
    load_report load;
    load.queue_length = queue;
    routes.load(name, incarnation, load);
  }

  auto ask(const std::string& affinity = "", std::uint32_t timeout_ms = 0) {
    placement_request r;
    r.request = "r" + std::to_string(++requests);
    r.affinity = affinity;
    r.timeout_ms = timeout_ms;
    return routes.place(r, now);
  }
  /// Places one more request, which must succeed at once.
  placement place(const std::string& affinity = "") {
    const auto outcome = ask(affinity);
    if (outcome && std::holds_alternative<placement>(*outcome)) {
      return std::get<placement>(*outcome);
    }
    ADD_FAILURE() << "not placed: " << (outcome ? "it waits" : outcome.error().message);
    placement none;
    none.prefill.resize(1);
    none.decode.resize(1);
    return none;
  }
  std::uint32_t decode(const std::string& affinity = "") {
    return place(affinity).decode.front().replica;
  }
  std::vector<std::uint32_t> decodes(int n) {
    std::vector<std::uint32_t> chosen;
    for (int i = 0; i < n; ++i) chosen.push_back(decode());
    return chosen;
  }
  /// How many of `n` requests, each ended at once, went to that decode replica.
  int taken_of(int n, std::uint32_t replica) {
    int taken = 0;
    for (int i = 0; i < n; ++i) {
      const placement p = place();
      taken += p.decode.front().replica == replica ? 1 : 0;
      routes.finished(p.request);
    }
    return taken;
  }
};

inline std::string policy_name(const ::testing::TestParamInfo<placement_policy>& info) {
  switch (info.param) {
    case placement_policy::round_robin: return "round_robin";
    case placement_policy::least_queue_length: return "least_queue_length";
    case placement_policy::random: return "random";
  }
  return "unknown";
}

inline auto every_policy() {
  return ::testing::Values(placement_policy::round_robin, placement_policy::least_queue_length,
                           placement_policy::random);
}

}  // namespace troupe::actors::testing
