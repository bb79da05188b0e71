#pragma once

/// A membership table whose clock the test moves in ticks, as the supervisor does.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>
#include <utility>

#include <gtest/gtest.h>

#include "troupe/actors/membership/membership.hpp"

namespace troupe::actors::testing {

constexpr std::uint64_t life_1 = 101;
constexpr std::uint64_t life_2 = 102;
constexpr std::uint64_t life_3 = 103;

/// The registration request of a node of that deployment, as its slot describes it.
inline registration_request request_of(const membership_options& deployment,
                                       const std::string& name, std::uint64_t life,
                                       std::uint16_t port = 5000) {
  registration_request r;
  r.cluster = deployment.cluster;
  for (const expected_slot& slot : deployment.slots) {
    if (slot.name != name) continue;
    r.node.stage = slot.stage;
    r.node.role = static_cast<std::uint8_t>(slot.role);
    r.node.rank = slot.rank;
    r.node.ranks = slot.ranks;
  }
  r.node.name = name;
  r.node.host = "127.0.0.1";
  r.node.port = port;
  r.node.incarnation = life;
  r.node.pid = 42;
  return r;
}

struct clocked_membership : ::testing::Test {
  explicit clocked_membership(membership_options of) : deployment{std::move(of)} {}

  const membership_options deployment;
  membership_table table{deployment};
  steady_time now{std::chrono::hours{1}};
  std::uint64_t sequence{0};

  result<registration> join(const std::string& name, std::uint64_t life,
                            std::uint16_t port = 5000) {
    return table.registered(request_of(deployment, name, life, port), now);
  }
  void pass(std::chrono::milliseconds time) {
    using std::chrono::milliseconds;
    const steady_time end = now + time;
    while (now < end) {
      now += std::min(milliseconds{50}, std::chrono::duration_cast<milliseconds>(end - now));
      table.tick(now);
    }
  }
};

}  // namespace troupe::actors::testing
