// A process is killed while a link with it is being made or rebuilt, at several moments of both:
// the other side learns of it once and gets its blocks back, and the next life under that name is
// reached at once.

#include <algorithm>
#include <cstdio>
#include <random>

#include "rebuild_fixture.hpp"
#include "seed.hpp"

namespace troupe::testing {
namespace {

using moment = std::chrono::microseconds;
using steady = std::chrono::steady_clock;

const int rounds = sanitized ? 2 : have_verbs() ? 3 : 4;
/// One life that is timed, two per round that are killed, and the last one.
const int lives = 2 * rounds + 2;
/// A cold process's first link takes longer than those that are broken off here.
constexpr auto longest = 250ms;

moment since(steady::time_point then) {
  return std::chrono::duration_cast<moment>(steady::now() - then);
}

class killed_while_linking : public breakable {
 protected:
  std::vector<std::unique_ptr<forked>> next;
  std::mt19937_64 dice{troupe::testing::printed_seed()};
  /// How long it takes to make a link, and to rebuild it.
  moment making{0}, remaking{0};

  void start(const std::string& survivor, const std::string& other,
             const std::function<int(engine&, line_channel&)>& body) {
    for (int i = 0; i < lives; ++i) next.push_back(later(c, other, body));
    survive_as(survivor);
    next_known_life();
  }
  void next_life() {
    first = std::move(next.back());
    next.pop_back();
    begin(*first);
  }
  /// A life that the other side already knows, so that it is dialled as soon as it is needed.
  void next_known_life() {
    next_life();
    events->listen_for(150ms);
  }
  /// Waits until the link is up and has been rebuilt that often. Returns how long that took, at
  /// most `longest`.
  moment until_up(std::uint32_t rebuilds) {
    const auto began = steady::now();
    const bool is_up = comes_true(
        [&] {
          const auto now = link();
          return now.rebuilds >= rebuilds && now.state == "up";
        },
        0ms);
    EXPECT_TRUE(is_up) << "the link is " << link().state;
    return std::min<moment>(since(began), longest);
  }
  /// Kills the peer at a moment of `all` or a little later, a different one in each round.
  void kill_within(moment all, int round, const char* what) {
    const auto part = all.count() * 5 / 4 / rounds + 1;
    const moment when{part * round + static_cast<moment::rep>(dice() % part)};
    const auto began = steady::now();
    while (since(began) < when) {
    }
    first->signal(SIGKILL);
    const auto state = link().state;
    first->end(SIGKILL);
    std::printf("  killed %.1f ms into %s, of %.1f; right afterwards that link is %s\n",
                static_cast<double>(when.count()) / 1000, what,
                static_cast<double>(all.count()) / 1000,
                state.empty() ? "not there" : state.c_str());
  }
  /// Expects one outcome, done or one of these codes for the loss of the peer, and every block
  /// back.
  void expect_one_outcome(operation_id id, std::initializer_list<errc> codes) {
    ASSERT_TRUE(events->outcome(id));
    ASSERT_TRUE(events->unpinned(id));
    events->listen_for(100ms);
    const auto& t = events->of(id);
    EXPECT_EQ(t.done + t.failed, 1);
    EXPECT_EQ(t.unpinned, 1);
    if (t.failed > 0) {
      EXPECT_NE(std::ranges::find(codes, t.why.code), codes.end()) << to_string(t.why);
      EXPECT_FALSE(was_silent(t.why)) << to_string(t.why);
    }
    std::printf("    %s\n", t.failed > 0 ? to_string(t.why).c_str() : "done before");
  }
};

// -- the prefill process is killed

class killed_prefill : public killed_while_linking {
 protected:
  void offer(const std::string& request, std::uint64_t seed, bool whole_of_it) {
    ASSERT_EQ(ask(*first, "send " + request + " 50 " + std::to_string(seed)), "ok");
    ASSERT_EQ(ask(*first, whole_of_it ? "ready 4" : "ready 2"), "ok");
    if (whole_of_it) {
      ASSERT_EQ(ask(*first, "seal"), "ok");
    }
  }
  void expect_one_true_outcome(operation_id id, std::uint64_t seed,
                               std::initializer_list<errc> codes) {
    expect_one_outcome(id, codes);
    auto& t = events->of(id);
    ASSERT_TRUE(t.allocated);
    if (t.done > 0) {
      EXPECT_EQ(cache->differing(t.allocated->blocks, 0, 50, seed), 0u);
    }
    give_back(*t.allocated);
  }
};

TEST_P(killed_prefill, while_a_link_is_made_or_made_again_is_lost_once_and_its_next_life_reached) {
  start("decode-0", "prefill-0", scripted_prefill);
  offer("timed", 1, true);
  const auto timed = receive("timed", 50);
  making = until_up(0);
  ASSERT_TRUE(events->unpinned(timed));
  cut();
  remaking = until_up(1);
  auto& t = events->of(timed);
  ASSERT_TRUE(node->free_blocks(t.allocated->owner, t.allocated->blocks));
  first->end(SIGKILL);
  for (int round = 0; round < rounds; ++round) {
    SCOPED_TRACE(round);
    const auto seed = static_cast<std::uint64_t>(round) + 2;
    const auto name = std::to_string(round);
    const bool may_be_done = dice() % 2 == 0;
    next_known_life();
    offer("made" + name, seed, may_be_done);
    const auto made = receive("made" + name, 50);
    kill_within(making, round, "making a link");
    // A peer that dies before any link was up has another reason: it was never reached.
    expect_one_true_outcome(made, seed, {errc::peer_lost, errc::peer_unreachable});

    // A wait for a timeout would take longer than the test allows.
    next_life();
    take_from(*first, "next" + name, seed);
    offer("again" + name, seed, false);
    const auto again = receive("again" + name, 50);
    ASSERT_TRUE(events->moving());
    events->listen_for(20ms);
    cut();
    if (may_be_done) {
      first->channel().say("ready 4");
      first->channel().say("seal");
    }
    kill_within(remaking, round, "making it again");
    expect_one_true_outcome(again, seed, {errc::peer_lost});
    if (HasFatalFailure()) return;
  }
  next_life();
  take_from(*first, "last", 100);
  EXPECT_TRUE(whole(*node));
}

INSTANTIATE_TEST_SUITE_P(every_way, killed_prefill, ::testing::ValuesIn(every_way()), name_of);

// -- the decode process is killed

class killed_decode : public killed_while_linking {
 protected:
  operation_id offer(const std::string& request, std::uint64_t seed, bool whole_of_it) {
    const auto id = send(request, 50, blocks);
    cache->fill(blocks.blocks, 0, 4, 0, 50, seed);
    EXPECT_TRUE(node->layers_ready(id, 0, whole_of_it ? 4 : 2, 50));
    if (whole_of_it) {
      EXPECT_TRUE(node->seal(id, 50));
    }
    return id;
  }
  /// Whether the link with the killed process is gone and its transfers have ended.
  bool settled(operation_id id) {
    const bool gone = events->until([&] { return node->report().links.empty(); });
    events->listen_for(100ms);
    return gone &&
           (events->of(id).done + events->of(id).failed > 0 || node->report().transfers.empty());
  }

  kvcache::allocation blocks;
};

TEST_P(killed_decode, while_a_link_is_made_or_made_again_is_lost_once_and_its_next_life_served) {
  start("prefill-0", "decode-0",
        [](engine& e, line_channel& l) { return scripted_decode(GetParam(), e, l); });
  const auto timed = offer("timed", 1, true);
  first->channel().say("receive timed 50");
  making = until_up(0);
  ASSERT_TRUE(events->unpinned(timed));
  cut();
  remaking = until_up(1);
  give_back(blocks);
  first->end(SIGKILL);
  for (int round = 0; round < rounds; ++round) {
    SCOPED_TRACE(round);
    const auto seed = static_cast<std::uint64_t>(round) + 2;
    const auto name = std::to_string(round);
    const bool may_be_done = dice() % 2 == 0;
    next_known_life();
    ASSERT_TRUE(events->until([&] { return node->report().links.empty(); }));
    const auto made = offer("made" + name, seed, may_be_done);
    first->channel().say("receive made" + name + " 50");
    kill_within(making, round, "making a link");
    EXPECT_TRUE(settled(made)) << node->report().links.size() << " links, "
                               << node->report().transfers.size() << " transfers";
    const bool asked_for = events->of(made).done + events->of(made).failed > 0;
    if (asked_for) {
      expect_one_outcome(made, {errc::peer_lost});
      give_back(blocks);
    }
    next_life();
    if (asked_for) {
      give_to(*first, "next" + name, seed);
    } else {
      // An offer that was never requested serves the next peer that asks.
      std::printf("    not asked for\n");
      ASSERT_EQ(ask(*first, "receive made" + name + " 50"), "ok");
      if (!may_be_done) {
        ASSERT_TRUE(node->layers_ready(made, 2, 4, 50));
        ASSERT_TRUE(node->seal(made, 50));
      }
      EXPECT_EQ(ask(*first, "outcome " + std::to_string(seed)), "done");
      ASSERT_TRUE(events->unpinned(made));
      EXPECT_EQ(events->of(made).done, 1) << to_string(events->of(made).why);
      give_back(blocks);
    }

    const auto again = offer("again" + name, seed, false);
    ASSERT_EQ(ask(*first, "receive again" + name + " 50"), "ok");
    ASSERT_TRUE(events->moving());
    cut();
    if (may_be_done) {
      ASSERT_TRUE(node->layers_ready(again, 2, 4, 50));
      ASSERT_TRUE(node->seal(again, 50));
    }
    kill_within(remaking, round, "making it again");
    expect_one_outcome(again, {errc::peer_lost});
    give_back(blocks);
    if (HasFatalFailure()) return;
  }
  next_life();
  give_to(*first, "last", 100);
  EXPECT_TRUE(whole(*node));
}

INSTANTIATE_TEST_SUITE_P(every_way, killed_decode, ::testing::ValuesIn(every_way()), name_of);

}  // namespace
}  // namespace troupe::testing
