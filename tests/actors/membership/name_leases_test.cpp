// Which node of a stage a process becomes when it was started for the stage alone.

#include "troupe/actors/membership/name_leases.hpp"

#include <functional>
#include <set>

#include <gmock/gmock.h>

namespace troupe::actors {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;
using kind = slot_use::kind;

constexpr milliseconds hold{5000};

/// A stage `decode` with some replicas, and the use of its names.
struct claims_of_a_stage : ::testing::Test {
  std::vector<expected_slot> slots;
  std::vector<slot_use> uses;
  std::optional<name_leases> claims;
  steady_time now{std::chrono::hours{1}};

  /// Hosts are assigned in turn.
  void expect(std::uint32_t replicas, std::uint32_t ranks = 1,
              const std::vector<std::string>& hosts = {"127.0.0.1"}) {
    for (std::uint32_t replica = 0; replica < replicas; ++replica) {
      for (std::uint32_t rank = 0; rank < ranks; ++rank) {
        slots.push_back({"decode-" + std::to_string(replica) + "-" + std::to_string(rank), "decode",
                         node_role::decode, replica, rank, ranks, hosts[replica % hosts.size()]});
      }
    }
    slots.push_back({"cache-0", "cache", node_role::store, 0, 0, 1, "127.0.0.1"});
    uses.resize(slots.size());
    claims.emplace("demo", slots, hold);
  }
  [[nodiscard]] result<name_lease> ask(std::uint64_t incarnation,
                                       const std::string& host = "127.0.0.1",
                                       const std::string& held = "") {
    name_request claim;
    claim.cluster = "demo";
    claim.stage = "decode";
    claim.incarnation = incarnation;
    claim.host = host;
    claim.pid = 42;
    claim.held = held;
    return claims->claim(claim, uses, now);
  }
  /// Returns the granted name, or the error.
  std::string granted(std::uint64_t incarnation, const std::string& host = "127.0.0.1") {
    const auto answer = ask(incarnation, host);
    return answer ? answer->name : to_string(answer.error());
  }
  /// Renews a name that some supervisor had granted to this process. Returns the name, or the
  /// error.
  std::string renewed(std::uint64_t incarnation, const std::string& held) {
    const auto answer = ask(incarnation, "127.0.0.1", held);
    return answer ? answer->name : to_string(answer.error());
  }
  /// The next supervisor knows nothing of the grants.
  void restart() { claims.emplace("demo", slots, hold); }
  slot_use& use(const std::string& name) {
    for (std::size_t i = 0; i < slots.size(); ++i) {
      if (slots[i].name == name) return uses[i];
    }
    ADD_FAILURE() << name;
    return uses.front();
  }
  /// That life registers under the name.
  void takes(const std::string& name, std::uint64_t incarnation) {
    EXPECT_FALSE(claims->refusal(name, incarnation, now));
    claims->registered(name, incarnation);
    use(name) = {kind::used, incarnation, 0};
  }
};

TEST_F(claims_of_a_stage, get_a_name_each_in_the_order_of_the_file) {
  expect(8);
  std::set<std::string> names;
  for (std::uint64_t life = 1; life <= 8; ++life) {
    const auto name = granted(life);
    EXPECT_EQ(name, "decode-" + std::to_string(life - 1) + "-0");
    names.insert(name);
  }
  EXPECT_EQ(names.size(), 8u);
}

TEST_F(claims_of_a_stage, are_answered_alike_when_the_same_life_asks_again) {
  expect(3);
  EXPECT_EQ(granted(7), "decode-0-0");
  EXPECT_EQ(granted(8), "decode-1-0");
  EXPECT_EQ(granted(7), "decode-0-0") << "the reply was lost";
  takes("decode-0-0", 7);
  EXPECT_EQ(granted(7), "decode-0-0") << "and so was the news of its registration";
}

TEST_F(claims_of_a_stage, hold_the_name_for_as_long_as_is_said_and_for_longer_when_asked_again) {
  expect(1);
  const auto first = ask(1);
  ASSERT_TRUE(first);
  EXPECT_EQ(first->held_ms, 5000u);
  now += milliseconds{4900};
  EXPECT_THAT(granted(2), HasSubstr("overloaded"));
  EXPECT_EQ(granted(1), "decode-0-0");
  now += milliseconds{4900};
  EXPECT_THAT(granted(2), HasSubstr("overloaded"));
  now += milliseconds{100};
  EXPECT_EQ(granted(2), "decode-0-0") << "its process never registered";
}

TEST_F(claims_of_a_stage, that_are_renewed_keep_their_names_when_the_supervisor_was_restarted) {
  expect(3);
  ASSERT_EQ(granted(1), "decode-0-0");
  ASSERT_EQ(granted(2), "decode-1-0");
  restart();
  EXPECT_EQ(renewed(2, "decode-1-0"), "decode-1-0") << "it asks first";
  EXPECT_EQ(renewed(1, "decode-0-0"), "decode-0-0");
  EXPECT_FALSE(claims->refusal("decode-0-0", 1, now));
  EXPECT_FALSE(claims->refusal("decode-1-0", 2, now));
  now += milliseconds{4900};
  EXPECT_EQ(renewed(1, "decode-0-0"), "decode-0-0");
  now += milliseconds{4900};
  EXPECT_TRUE(claims->refusal("decode-0-0", 9, now)) << "it holds it for longer";
  EXPECT_FALSE(claims->refusal("decode-1-0", 9, now));
}

TEST_F(claims_of_a_stage, that_are_renewed_get_their_name_or_none) {
  expect(3);
  ASSERT_EQ(granted(1), "decode-0-0");
  EXPECT_THAT(renewed(2, "decode-0-0"),
              HasSubstr("already_exists: node 'decode-0-0' was claimed by pid 42 on host"));
  takes("decode-1-0", 3);
  EXPECT_THAT(renewed(2, "decode-1-0"), HasSubstr("already_exists: node 'decode-1-0' is in use"));
  EXPECT_THAT(renewed(2, "cache-0"), HasSubstr("not_found: stage 'decode' has no node 'cache-0'"));
  EXPECT_THAT(renewed(2, "x\n"), HasSubstr("no node 'x?'"));
  EXPECT_FALSE(claims->refusal("decode-2-0", 9, now)) << "nor is any other held for it";
  // The former supervisor knew this name to be fenced; the new one has to learn that again.
  use("decode-2-0") = {kind::down, 8, 10};
  EXPECT_EQ(renewed(2, "decode-2-0"), "decode-2-0");
}

TEST_F(claims_of_a_stage, keep_a_name_that_was_used_before_when_the_supervisor_was_restarted) {
  expect(2);
  use("decode-0-0") = {kind::fenced, 7, 3};
  use("decode-1-0") = {kind::used, 8, 0};
  ASSERT_EQ(granted(1), "decode-0-0");
  restart();
  use("decode-0-0") = {kind::awaited, 7, 3};
  EXPECT_THAT(granted(2),
              HasSubstr("1 in use, 0 claimed by processes that are starting, 0 down, which "
                        "not every node has heard yet, 1 whose processes may still come "
                        "back to this supervisor, which was restarted; ask again"));
  EXPECT_EQ(renewed(1, "decode-0-0"), "decode-0-0");
  use("decode-0-0") = {kind::fenced, 7, 3};
  EXPECT_THAT(granted(2), HasSubstr("1 claimed by processes that are starting"));
}

TEST_F(claims_of_a_stage, last_longer_by_the_time_in_which_nobody_could_be_heard) {
  expect(2);
  ASSERT_EQ(granted(1), "decode-0-0");
  now += milliseconds{4000};
  ASSERT_EQ(granted(2), "decode-1-0");
  now += milliseconds{2000};  // the first hold has expired
  now += milliseconds{20000};
  claims->stood_still(milliseconds{20000}, now);
  EXPECT_FALSE(claims->refusal("decode-0-0", 9, now));
  EXPECT_TRUE(claims->refusal("decode-1-0", 9, now));
  now += milliseconds{3100};
  EXPECT_FALSE(claims->refusal("decode-1-0", 9, now)) << "not for ever";
}

TEST_F(claims_of_a_stage, are_held_no_more_once_their_process_was_taken_in) {
  expect(1);
  ASSERT_EQ(granted(1), "decode-0-0");
  takes("decode-0-0", 1);
  EXPECT_EQ(renewed(1, "decode-0-0"), "decode-0-0") << "it was on its way";
  EXPECT_EQ(granted(1), "decode-0-0");
  EXPECT_FALSE(claims->refusal("decode-0-0", 2, now)) << "whether it may is the table's to say";
}

TEST_F(claims_of_a_stage, wait_until_nodes_that_the_supervisor_cannot_know_had_time_to_register) {
  expect(2);
  claims->opens_at(now + hold);
  EXPECT_THAT(granted(1), HasSubstr("overloaded: this supervisor has no record of the cluster"));
  EXPECT_THAT(granted(1), HasSubstr("it gives names in 5 s"));
  EXPECT_FALSE(claims->refusal("decode-0-0", 7, now));
  takes("decode-0-0", 7);
  EXPECT_EQ(renewed(2, "decode-1-0"), "decode-1-0") << "who holds one keeps it";
  takes("decode-1-0", 2);
  use("decode-0-0") = {kind::fenced, 7, 3};
  now += hold - milliseconds{1};
  EXPECT_THAT(granted(1), HasSubstr("overloaded"));
  now += milliseconds{1};
  EXPECT_EQ(granted(1), "decode-0-0");
}

TEST_F(claims_of_a_stage, wait_for_as_long_though_the_supervisor_stood_still_meanwhile) {
  expect(1);
  claims->opens_at(now + hold);
  now += 4 * hold;
  claims->stood_still(4 * hold, now);
  EXPECT_THAT(granted(1), HasSubstr("overloaded"));
  now += hold;
  EXPECT_EQ(granted(1), "decode-0-0");
}

TEST_F(claims_of_a_stage, keep_other_lives_from_registering_under_the_name_and_say_who_claimed_it) {
  expect(2);
  ASSERT_EQ(granted(1, "127.0.0.1"), "decode-0-0");
  EXPECT_FALSE(claims->refusal("decode-0-0", 1, now));
  EXPECT_FALSE(claims->refusal("decode-1-0", 2, now));
  EXPECT_FALSE(claims->refusal("nobody", 2, now));
  const auto why = claims->refusal("decode-0-0", 2, now);
  ASSERT_TRUE(why);
  EXPECT_EQ(why->code, errc::already_exists);
  EXPECT_EQ(why->message,
            "node 'decode-0-0' was claimed by pid 42 on host '127.0.0.1', which is about to "
            "register; it is free again in 5 s if that does not");
  now += hold;
  EXPECT_FALSE(claims->refusal("decode-0-0", 2, now));
}

TEST_F(claims_of_a_stage, end_with_the_registration) {
  expect(2);
  ASSERT_EQ(granted(1), "decode-0-0");
  takes("decode-0-0", 1);
  EXPECT_FALSE(claims->refusal("decode-0-0", 2, now)) << "whether it may is the table's to say";
  EXPECT_EQ(granted(2), "decode-1-0");
}

TEST_F(claims_of_a_stage, prefer_what_was_never_used_then_what_is_down_for_longest_and_fenced) {
  expect(4);
  use("decode-0-0") = {kind::fenced, 11, 30};
  use("decode-1-0") = {kind::down, 12, 10};  // down for longest, but not all nodes know it yet
  use("decode-2-0") = {kind::fenced, 13, 20};
  EXPECT_EQ(granted(1), "decode-3-0");
  EXPECT_EQ(granted(2), "decode-2-0");
  EXPECT_EQ(granted(3), "decode-0-0");
  EXPECT_THAT(granted(4), HasSubstr("overloaded: none of the 4 nodes of stage 'decode' for this "
                                    "host is free: 0 in use, 3 claimed by processes that are "
                                    "starting, 1 down, which not every node has heard yet; ask"));
  use("decode-1-0").how = kind::fenced;
  EXPECT_EQ(granted(4), "decode-1-0");
}

TEST_F(claims_of_a_stage, say_what_to_do_where_all_names_are_in_use) {
  expect(2);
  takes("decode-0-0", 1);
  takes("decode-1-0", 2);
  EXPECT_THAT(granted(3), HasSubstr("2 in use, 0 claimed by processes that are starting, 0 down"));
  EXPECT_THAT(granted(3), HasSubstr("stop or drain one, or give the stage more replicas"));
}

TEST_F(claims_of_a_stage, fill_the_ranks_of_a_replica_before_they_begin_another) {
  expect(3, 2);
  EXPECT_EQ(granted(1), "decode-0-0");
  EXPECT_EQ(granted(2), "decode-0-1");
  EXPECT_EQ(granted(3), "decode-1-0");
  takes("decode-0-0", 1);
  takes("decode-0-1", 2);
  takes("decode-1-0", 3);
  EXPECT_EQ(granted(4), "decode-1-1");
  takes("decode-1-1", 4);
  // A lost rank is replaced before another replica is begun.
  use("decode-0-1") = {kind::fenced, 2, 99};
  EXPECT_EQ(granted(5), "decode-0-1");
  EXPECT_EQ(granted(6), "decode-2-0");
}

TEST_F(claims_of_a_stage, get_nodes_of_their_host_first_and_of_another_host_never) {
  expect(4, 1, {"10.0.0.1", "auto", "10.0.0.2", "127.0.0.1"});
  EXPECT_EQ(granted(1, "10.0.0.2"), "decode-2-0");
  EXPECT_EQ(granted(2, "10.0.0.2"), "decode-1-0");
  EXPECT_THAT(granted(3, "10.0.0.2"), HasSubstr("none of the 2 nodes of stage 'decode' for this"));
  EXPECT_EQ(granted(4, "127.0.0.9"), "decode-3-0") << "all loopback addresses are one host";
}

TEST_F(claims_of_a_stage, of_a_host_that_has_no_node_are_refused_with_those_that_have) {
  expect(2, 1, {"10.0.0.1", "10.0.0.2"});
  EXPECT_THAT(granted(1, "10.0.0.3"),
              HasSubstr("invalid_config: no node of stage 'decode' belongs to host '10.0.0.3'; its "
                        "hosts are 10.0.0.1, 10.0.0.2"));
}

TEST_F(claims_of_a_stage, that_make_no_sense_are_refused_in_a_sentence) {
  expect(1);
  const auto why = [&](const std::function<void(name_request&)>& change) {
    name_request claim;
    claim.cluster = "demo";
    claim.stage = "decode";
    claim.incarnation = 1;
    change(claim);
    const auto answer = claims->claim(claim, uses, now);
    return answer ? answer->name : to_string(answer.error());
  };
  EXPECT_EQ(why([](name_request&) {}), "decode-0-0");
  EXPECT_THAT(why([](name_request& c) { c.version = 1; }), HasSubstr("version_mismatch"));
  EXPECT_THAT(why([](name_request& c) { c.cluster = "x\n"; }),
              HasSubstr("belongs to cluster 'x?'"));
  EXPECT_THAT(why([](name_request& c) { c.incarnation = 0; }), HasSubstr("invalid_config"));
  EXPECT_THAT(why([](name_request& c) { c.host = std::string(256, 'h'); }),
              HasSubstr("host of at"));
  EXPECT_THAT(why([](name_request& c) { c.stage = "prefill"; }),
              HasSubstr("not_found: the deployment has no stage 'prefill'; it has cache, decode"));
}

}  // namespace
}  // namespace troupe::actors
