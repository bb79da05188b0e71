// Two processes of one host that `shm` cannot join: they are in different user namespaces, or one
// may not reach the other's engine memory. Real processes move a cache over another backend.

#include <functional>
#include <string>

#include <gmock/gmock.h>
#include <sched.h>

#include "hidden_memory.hpp"
#include "own_cache.hpp"

namespace troupe::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

const prompt small{"small", 2, 100, 0};

/// Serves the prompt once as prefill-0, in memory of its engine, in a process that is `prepared`.
/// Answers a question of the test with the backend of its link to decode-0.
int offer(const cluster& c, const std::function<bool()>& prepared, line_channel& channel) {
  if (!channel.order()) return 0;
  if (!prepared()) {
    channel.say("unprepared");
    return 0;
  }
  const own_cache own{c, "prefill-0", small};
  if (own.node() == nullptr) return 1;
  auto& node = *own.node();
  const auto blocks = small.shuffled(1);
  cache_bytes{node}.fill(blocks, 0, small.layers, 0, small.tokens, 7);
  listener events{node};
  const auto send = node.send({"r", blocks});
  if (!send || !node.seal(*send, small.tokens)) return 2;
  channel.say("sealed");
  if (!events.unpinned(*send)) return 3;
  const auto links = node.report().links;
  channel.say(links.empty() ? "no link" : links.front().backend);
  (void)channel.order();
  return 0;
}

cluster_options over(const std::string& backend) {
  auto options = unhurried();
  options.backend = backend;
  options.model = small.model();
  if (backend != "auto") options.transport_more = ", fallback: [tcp]";
  return options;
}

class apart : public ::testing::TestWithParam<std::string> {
 protected:
  cluster c{over(GetParam())};

  /// Expects the prompt to arrive whole over another backend than shm. Returns the reason for the
  /// choice.
  std::string taken_from(forked& prefill) {
    const own_cache own{c, "decode-0", small};
    if (own.node() == nullptr) return "no node";
    EXPECT_EQ(prefill.channel().hear().value_or("silence"), "sealed");
    cache_bytes cache{*own.node()};
    cache.poison();
    const auto blocks = small.shuffled(2);
    listener events{*own.node()};
    const auto receive = own.node()->receive(
        {"r", {"prefill-0"}, actors::transfer_mode::write, small.tokens, 0, blocks});
    if (!receive) return to_string(receive.error());
    EXPECT_TRUE(events.unpinned(*receive));
    EXPECT_EQ(events.of(*receive).done, 1) << to_string(events.of(*receive).why);
    EXPECT_EQ(cache.differing(blocks, 0, small.tokens, 7), 0U);
    const auto links = own.node()->report().links;
    if (links.size() != 1) return "not one link";
    EXPECT_NE(links.front().backend, "shm");
    EXPECT_EQ(prefill.channel().hear().value_or("silence"), links.front().backend)
        << "both sides name the same backend";
    return links.front().reason;
  }
};

TEST_P(apart, in_another_user_namespace_is_known_before_anything_is_dialled) {
  forked prefill{[this](line_channel& channel) {
    return offer(
        c, [] { return ::unshare(CLONE_NEWUSER) == 0; }, channel);
  }};
  forked trial{[](line_channel& channel) {
    channel.say(::unshare(CLONE_NEWUSER) == 0 ? "yes" : "no");
    return 0;
  }};
  if (trial.channel().hear() != "yes") GTEST_SKIP() << "no user namespace can be made here";
  prefill.channel().say("go");
  const auto why = taken_from(prefill);
  EXPECT_THAT(why, HasSubstr("same host, another user namespace"));
  if (GetParam() == "auto") {
    EXPECT_THAT(why, Not(HasSubstr("failed")));
  }
}

TEST_P(apart, without_the_right_to_reach_memory_of_the_engine_goes_on_over_the_next_backend) {
  forked trial{[](line_channel& channel) {
    if (!channel.order()) return 0;
    channel.say(give_up_rights() && !reaches_parent() ? "yes" : "no");
    return 0;
  }};
  forked prefill{[this](line_channel& channel) { return offer(c, give_up_rights, channel); }};
  const hidden_memory no_longer_reached;
  trial.channel().say("try");
  if (trial.channel().hear() != "yes") {
    GTEST_SKIP() << "this process cannot hide its memory from another one";
  }
  prefill.channel().say("go");
  EXPECT_THAT(taken_from(prefill),
              AllOf(HasSubstr("shm failed: backend_unavailable: "), HasSubstr("may not reach")));
}

INSTANTIATE_TEST_SUITE_P(as, apart, ::testing::Values("auto", "shm"),
                         [](const auto& tested) { return tested.param; });

}  // namespace
}  // namespace troupe::testing
