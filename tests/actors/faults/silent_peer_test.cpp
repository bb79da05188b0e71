// A peer is frozen or cut off while something is in flight: it is lost within `peer_silence`. Peers
// that only look silent, because they are idle, busy or slow, are not.

#include <gmock/gmock.h>

#include "gpu_ways.hpp"
#include "own_network.hpp"
#include "rebuild_fixture.hpp"

namespace troupe::testing {
namespace {

using ::testing::HasSubstr;

/// The default of `peer_silence`.
constexpr auto silence = 1000ms;

class silent : public breakable {
 protected:
  /// Only the links watch: the supervisor and the network layer take every node for alive. Without
  /// a `peer_silence`, and in the virtual machine, the default applies.
  static cluster_options watched_by_links(const std::string& peer_silence = {}) {
    auto options = patient(GetParam());
    options.peer_silence = have_verbs() ? "" : peer_silence;
    return options;
  }
  silent() : breakable{watched_by_links()} {}
  explicit silent(cluster_options options) : breakable{std::move(options)} {}

  /// Expects the operation's one outcome to be the loss of a peer silent since `from`.
  void expect_noticed(operation_id id, std::chrono::steady_clock::time_point from) {
    ASSERT_TRUE(events->outcome(id));
    EXPECT_GE(std::chrono::steady_clock::now() - from, silence / 2)
        << "by something else than its silence";
    const auto& t = events->of(id);
    EXPECT_EQ(t.failed, 1);
    EXPECT_EQ(t.why.code, errc::peer_lost) << to_string(t.why);
    EXPECT_THAT(t.why.message, HasSubstr("has been silent for "));
    EXPECT_THAT(t.why.message, HasSubstr(" ms"));
  }
  /// Expects that the link of this node has never broken.
  void expect_never_broken() {
    EXPECT_EQ(link().rebuilds, 0u) << link().last_break;
    EXPECT_EQ(link().state, "up");
  }
  /// A transfer whose first half of layers has been reported to the decode side.
  operation_id half_received() {
    const auto id = receive_two_layers(7);
    events->listen_for(100ms);
    return id;
  }
};

TEST_P(silent, frozen_prefill_is_lost_to_the_decode_side_and_served_by_another_life_of_itself) {
  start_prefill();
  const auto id = half_received();
  const auto froze = std::chrono::steady_clock::now();
  first->stop();
  expect_noticed(id, froze);
  ASSERT_TRUE(events->unpinned(id)) << "the blocks wait for a peer that is not inside";
  auto& t = events->of(id);
  give_back(*t.allocated);
  // When it continues, it gets the same error, and is usable like any other peer.
  first->signal(SIGCONT);
  EXPECT_THAT(ask(*first, "outcome"), HasSubstr("peer_lost"));
  take_from(*first, "after", 9);
}

TEST_P(silent, frozen_decode_is_lost_to_the_prefill_side) {
  start_decode();
  kvcache::allocation blocks;
  const auto id = send_two_layers(blocks, 3);
  events->listen_for(100ms);
  const auto froze = std::chrono::steady_clock::now();
  first->stop();
  expect_noticed(id, froze);
  ASSERT_TRUE(events->unpinned(id));
  give_back(blocks);
  first->signal(SIGCONT);
  EXPECT_THAT(ask(*first, "outcome 3"), HasSubstr("peer_lost"));
  give_to(*first, "after", 4);
}

TEST_P(silent, peer_is_lost_also_while_its_link_is_being_made_again) {
  start_prefill();
  const auto id = half_received();
  const auto spared = cluster_ports();
  first->stop();
  const auto froze = std::chrono::steady_clock::now();
  ASSERT_GT(cut_connections(spared), 0);
  expect_noticed(id, froze);
  EXPECT_THAT(events->of(id).why.message, HasSubstr("broke before"));
}

TEST_P(silent, idle_peer_keeps_its_link) {
  start_prefill();
  take_from(*first, "before", 1);
  first->stop();
  events->listen_for(3s);
  first->signal(SIGCONT);
  take_from(*first, "after", 2);
  expect_never_broken();
  EXPECT_EQ(node->report().links.size(), 1u);
}

TEST_P(silent, peer_that_waits_for_long_is_no_silent_peer) {
  start_prefill();
  const auto id = half_received();
  events->listen_for(3s);
  expect_rest_taken(id, 7);
  expect_never_broken();
}

TEST_P(silent, peer_is_not_blamed_for_the_time_in_which_this_process_stood_still_itself) {
  start_prefill();
  take_from(*first, "before", 1);
  // The other side has nothing in flight yet and waits for nothing, so it does not blame this
  // process either.
  const auto id = receive("r", 50);
  events->listen_for(100ms);
  // A third process sends SIGCONT, since a stopped process cannot wake itself.
  const auto self = ::getpid();
  const auto waker = ::fork();
  if (waker == 0) {
    ::usleep(3'000'000);
    ::kill(self, SIGCONT);
    ::_exit(0);
  }
  ::kill(self, SIGSTOP);
  int status = 0;
  ::waitpid(waker, &status, 0);
  events->listen_for(500ms);
  EXPECT_EQ(events->of(id).failed, 0) << to_string(events->of(id).why);
  ASSERT_EQ(ask(*first, "send r 50 7"), "ok");
  expect_rest_taken(id, 7);
  expect_never_broken();
}

TEST_P(silent, engine_that_polls_and_computes_for_long_is_not_blamed) {
  start_decode(progress::polling);
  kvcache::allocation blocks;
  const auto id = send_two_layers(blocks, 3);
  // The engine waits for the next line, and does not poll.
  events->listen_for(4s);
  EXPECT_EQ(events->of(id).failed, 0) << to_string(events->of(id).why);
  ASSERT_TRUE(node->layers_ready(id, 2, 4, 50));
  ASSERT_TRUE(node->seal(id, 50));
  EXPECT_EQ(ask(*first, "outcome 3"), "done");
  // Its release may have to wait for its next poll.
  EXPECT_EQ(events->of(id).failed, 0) << to_string(events->of(id).why);
  expect_never_broken();
}

INSTANTIATE_TEST_SUITE_P(every_way, silent, ::testing::ValuesIn(every_way()), name_of);

/// Caches on GPUs, over the GPU backend.
std::vector<way> over_xgmi() {
  std::vector<way> ways;
  for (const auto& w : gpu_ways()) {
    if (w.backend == "xgmi") ways.push_back(w);
  }
  return ways;
}
INSTANTIATE_TEST_SUITE_P(over_gpus, silent, ::testing::ValuesIn(over_xgmi()), name_of);

// -- short silences

/// Each silence is much shorter than `peer_silence`, and all of them together are longer.
class silent_for_short_times : public silent {
 protected:
  silent_for_short_times() : silent{watched_by_links("4s")} {}
};

TEST_P(silent_for_short_times, again_and_again_is_a_peer_that_is_not_blamed) {
  start_prefill();
  const auto id = half_received();
  for (int i = 0; i < 8; ++i) {
    first->stop();
    events->listen_for(400ms);
    first->signal(SIGCONT);
    events->listen_for(200ms);
  }
  expect_rest_taken(id, 7);
  expect_never_broken();
}

INSTANTIATE_TEST_SUITE_P(every_way, silent_for_short_times, ::testing::ValuesIn(every_way()),
                         name_of);
INSTANTIATE_TEST_SUITE_P(over_gpus, silent_for_short_times, ::testing::ValuesIn(over_xgmi()),
                         name_of);

// -- large transfers

class silent_under_load : public silent {
 protected:
  /// `peer_silence` is longer than each silence, and shorter than all silences of one transfer
  /// together.
  silent_under_load() : silent{watched_by_links("4s")} {}
  static constexpr std::uint32_t tokens = 12'000;
};

TEST_P(silent_under_load, slow_peer_with_large_batches_is_not_blamed) {
  start_prefill();
  take_from(*first, "first", 1);
  for (int round = 0; round < 2; ++round) {
    const auto request = "big" + std::to_string(round);
    ASSERT_EQ(ask(*first, "send " + request + " " + std::to_string(tokens) + " 7"), "ok");
    const auto id = receive(request, tokens);
    first->channel().say("ready 4");
    first->channel().say("seal");
    // The peer runs for a tenth of the time.
    for (int i = 0; i < 12; ++i) {
      events->listen_for(40ms);
      first->stop();
      events->listen_for(360ms);
      first->signal(SIGCONT);
    }
    ASSERT_EQ(first->channel().hear().value_or("silence"), "ok");
    ASSERT_EQ(first->channel().hear().value_or("silence"), "ok");
    expect_taken(*first, id, 7, tokens);
    ASSERT_FALSE(HasFatalFailure());
  }
  expect_never_broken();
}

INSTANTIATE_TEST_SUITE_P(every_way, silent_under_load, ::testing::ValuesIn(every_way()), name_of);

// -- a wire that is cut

/// The prefill node has an address of its own, which can be cut off from the decode node but not
/// from the supervisor.
class cut_off : private own_network, public silent {
 protected:
  explicit cut_off(const std::string& peer_silence = {}) : silent{apart(peer_silence)} {}
  static cluster_options apart(const std::string& peer_silence) {
    auto options = watched_by_links(peer_silence);
    options.prefill_host = "127.0.0.2";
    return options;
  }
  void SetUp() override {
    if (!made()) GTEST_SKIP() << "no network of its own: needs root and `ip`";
  }
  static bool cut_prefill() { return own_network::cut("127.0.0.2"); }
  static bool mend_wire() { return own_network::mend(); }
};

TEST_P(cut_off, prefill_is_lost_to_the_decode_side_and_hears_the_same_when_the_wire_is_back) {
  start_prefill();
  const auto id = half_received();
  const auto at = std::chrono::steady_clock::now();
  ASSERT_TRUE(cut_prefill());
  expect_noticed(id, at);
  ASSERT_TRUE(events->unpinned(id));
  // The prefill node is alive, and has given up as well.
  EXPECT_THAT(ask(*first, "outcome"), HasSubstr("peer_lost"));
  ASSERT_TRUE(mend_wire());
}

TEST_P(cut_off, decode_is_lost_to_the_prefill_side) {
  start_decode();
  kvcache::allocation blocks;
  const auto id = send_two_layers(blocks, 3);
  events->listen_for(100ms);
  const auto at = std::chrono::steady_clock::now();
  ASSERT_TRUE(cut_prefill());
  expect_noticed(id, at);
  ASSERT_TRUE(events->unpinned(id));
  EXPECT_THAT(ask(*first, "outcome 3"), HasSubstr("peer_lost"));
  ASSERT_TRUE(mend_wire());
}

/// The cut is shorter than `peer_silence` even where the machine takes seconds to cut and mend.
class cut_off_briefly : public cut_off {
 protected:
  cut_off_briefly() : cut_off{"20s"} {}
};

TEST_P(cut_off_briefly, goes_on_where_it_was) {
  start_prefill();
  const auto id = half_received();
  ASSERT_TRUE(cut_prefill());
  events->listen_for(200ms);
  ASSERT_TRUE(mend_wire());
  expect_rest_taken(id, 7);
  expect_never_broken();
}

/// Of the backends only tcp uses an address.
std::vector<way> over_addresses() {
  if (have_verbs()) return {};
  return {{"tcp", "write"}, {"tcp", "read"}};
}
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(cut_off);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(cut_off_briefly);
INSTANTIATE_TEST_SUITE_P(every_way, cut_off, ::testing::ValuesIn(over_addresses()), name_of);
INSTANTIATE_TEST_SUITE_P(every_way, cut_off_briefly, ::testing::ValuesIn(over_addresses()),
                         name_of);

}  // namespace
}  // namespace troupe::testing
