// An engine that watches its cluster, in which engines join, leave, are killed and come back, and a
// supervisor is restarted. Every process is real. The events are compared with the true course,
// life by life.

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>

#include "troupe/actors/membership/membership_store.hpp"

#include "cluster_fixture.hpp"
#include "parsed_deployment.hpp"
#include "scratch_folder.hpp"
#include "watch_judge.hpp"

namespace troupe::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

enum class record { kept, not_kept };

/// Supervisors and engines that wait for orders, forked before there are threads. In this process:
/// an engine that watches, and a store that the file names.
class watching_engine : public ::testing::Test {
 protected:
  /// `timeout`: of heartbeats. No engine here is slow, so only those that are gone are silent for
  /// that long.
  watching_engine(const std::string& timeout, record of) : timeout_{timeout}, record_{of} {
    first_ = std::make_unique<forked>([this](line_channel& c) { return supervise(c); });
    second_ = std::make_unique<forked>([this](line_channel& c) { return supervise(c); });
    for (const auto* replica : {"a", "b", "c", "d"}) engines_.push_back(engine_of(replica));
    second_b_ = engine_of("b");
    first_->channel().say("0");
    port_ = std::stoi(first_->channel().hear().value_or("0"));
    cluster::quiet("watch");
  }

  void SetUp() override {
    ASSERT_NE(port_, 0);
    engine_options options;
    options.join = announced("w");
    options.watch = true;
    watcher_ = start("", std::move(options));
    ASSERT_TRUE(watcher_);
  }
  void TearDown() override { watcher_.reset(); }

  [[nodiscard]] int port() const { return port_; }

  /// The first process of that replica.
  [[nodiscard]] forked& engine_called(char replica) {
    return *engines_.at(static_cast<std::size_t>(replica - 'a'));
  }
  /// Returns the incarnation of the new life.
  std::uint64_t join(forked& engine) {
    engine.channel().say("join " + std::to_string(port_));
    return joined(engine);
  }
  static std::uint64_t joined(forked& engine) {
    const auto life = engine.channel().hear().value_or("0");
    EXPECT_NE(life, "0") << "it was not taken in";
    return std::stoull(life);
  }
  static void leave(forked& engine) {
    engine.channel().say("leave");
    EXPECT_EQ(engine.channel().hear().value_or("silence"), "left");
  }
  [[nodiscard]] std::unique_ptr<engine> start(const std::string& name,
                                              engine_options options = {}) const {
    auto started = engine::start(deployment(port_), name, std::move(options));
    if (!started || !(*started)->wait_registered(wait_limit)) {
      ADD_FAILURE() << (started ? "not registered" : to_string(started.error()));
      return nullptr;
    }
    return std::move(*started);
  }
  /// Kills the first supervisor, runs `meanwhile`, and starts the second at its port.
  template <class Meanwhile>
  void replace_supervisor(Meanwhile&& meanwhile) {
    first_->end(SIGKILL);
    meanwhile();
    second_->channel().say(std::to_string(port_));
    EXPECT_EQ(second_->channel().hear().value_or("silence"), std::to_string(port_));
  }

  // -- events of the watching engine

  /// Waits for an event with that life of a replica in that state.
  bool hears(const std::string& replica, std::uint64_t life, member_state state) {
    return hears_of("engines." + replica + ".0", life, state);
  }
  bool hears_of(const std::string& node, std::uint64_t life, member_state state) {
    const auto is_told = [&] {
      return std::ranges::any_of(heard_, [&](const event_member& e) {
        return e.node == node && e.incarnation == life && e.state == state;
      });
    };
    for (const auto end = end_of_wait(); !is_told();) {
      if (std::chrono::steady_clock::now() >= end) return false;
      hear(watcher_->wait(20ms));
    }
    return true;
  }
  void hear(const std::vector<event>& events) {
    for (const auto& e : events) {
      const auto* of_member = std::get_if<event_member>(&e.what);
      ASSERT_TRUE(of_member != nullptr);
      EXPECT_EQ(e.operation, operation_id{});
      EXPECT_EQ(judge_.hear(*of_member), "");
      heard_.push_back(*of_member);
    }
  }
  /// The first and last event of each life of a node, in order: "7 there", "7 gone". The states in
  /// between depend on chance.
  [[nodiscard]] std::vector<std::string> lives_of(const std::string& replica) const {
    std::vector<std::string> lives;
    bool there = false;
    for (const auto& e : heard_) {
      if (e.node != "engines." + replica + ".0") continue;
      const bool gone = e.state == member_state::gone;
      if (!there || gone) {
        lives.push_back(std::to_string(e.incarnation) + (gone ? " gone" : " there"));
      }
      there = !gone;
    }
    return lives;
  }
  [[nodiscard]] std::string last_reason_of(const std::string& replica) const {
    for (auto e = heard_.rbegin(); e != heard_.rend(); ++e) {
      if (e->node == "engines." + replica + ".0") return e->reason;
    }
    return {};
  }
  static std::string there(std::uint64_t life) { return std::to_string(life) + " there"; }
  static std::string gone(std::uint64_t life) { return std::to_string(life) + " gone"; }

  std::unique_ptr<engine> watcher_;
  std::unique_ptr<forked> second_b_;  ///< another process that joins as `b`
  std::vector<event_member> heard_;

 private:
  static announcement announced(const std::string& replica) {
    return {"engines", replica, 0, 1, {{"http", replica + ":8000"}}};
  }
  [[nodiscard]] config::deployment deployment(int port) const {
    return parsed_deployment(
        "cluster: test\nsupervisor: {host: 127.0.0.1, port: " + std::to_string(port) +
        ", heartbeat_interval: 500ms, heartbeat_timeout: " + timeout_ +
        "}\nsecurity: {mode: none}\nstages:\n"
        "  - {name: cache, role: store, pool: {size: 1MiB}}\n"
        "  - {name: engines, role: both, open: {max_nodes: 8}}\n"
        "edges:\n  - {from: engines, to: engines, mode: read}\n");
  }

  /// Waits for a port, then runs the supervisor there.
  int supervise(line_channel& channel) const {
    cluster::quiet("supervisor");
    const auto port = channel.order();
    if (!port) return 0;
    const auto of = deployment(std::stoi(*port));
    auto options = actors::supervisor_options_from(of);
    if (record_ == record::kept) {
      auto store = actors::membership_store::open(folder_.path() + "/test.state", "test");
      if (!store) {
        channel.say(to_string(store.error()));
        return 1;
      }
      options.store = std::move(*store);
    }
    auto made = actors::host_options_of(of);
    if (!made) {
      channel.say(to_string(made.error()));
      return 1;
    }
    actors::actor_host host{std::move(*made)};
    auto bound = host.publish(actors::spawn_supervisor(host.system(), std::move(options)),
                              "127.0.0.1", static_cast<std::uint16_t>(std::stoi(*port)));
    channel.say(bound ? std::to_string(*bound) : to_string(bound.error()));
    while (channel.order()) {
    }
    return 0;
  }

  /// A process that joins as that replica on each order, every time in another life.
  [[nodiscard]] std::unique_ptr<forked> engine_of(const std::string& replica) const {
    return std::make_unique<forked>([this, replica](line_channel& channel) {
      cluster::quiet(replica);
      std::unique_ptr<engine> node;
      while (const auto order = channel.order()) {
        if (*order == "leave") {
          node.reset();
          channel.say("left");
          continue;
        }
        engine_options options;
        options.join = announced(replica);
        auto started = engine::start(deployment(std::stoi(order->substr(order->find(' ')))), "",
                                     std::move(options));
        if (!started || !(*started)->wait_registered(wait_limit)) return 1;
        node = std::move(*started);
        channel.say(std::to_string(node->incarnation()));
      }
      return 0;
    });
  }

  const std::string timeout_;
  const record record_;
  scratch_folder folder_{"watch"};
  std::unique_ptr<forked> first_, second_;
  std::vector<std::unique_ptr<forked>> engines_;
  int port_{0};
  watch_judge judge_;
};

/// Here only an event at the supervisor ends a life, never silence.
struct of_a_steady_supervisor : watching_engine {
  of_a_steady_supervisor() : watching_engine{"10min", record::not_kept} {}
};

TEST_F(of_a_steady_supervisor, is_told_of_each_life_that_it_is_there_and_that_it_is_gone) {
  auto& a = engine_called('a');
  const auto a1 = join(a);
  const auto b1 = join(engine_called('b'));
  ASSERT_TRUE(hears("a", a1, member_state::up));
  ASSERT_TRUE(hears("b", b1, member_state::up));
  auto store = start("cache-0");
  ASSERT_TRUE(store);
  const auto of_store = store->incarnation();
  ASSERT_TRUE(hears_of("cache-0", of_store, member_state::up));

  leave(a);
  ASSERT_TRUE(hears("a", a1, member_state::gone));
  EXPECT_EQ(last_reason_of("a"), "left");
  engine_called('b').end(SIGKILL);
  ASSERT_TRUE(hears("b", b1, member_state::gone));
  EXPECT_THAT(last_reason_of("b"), StartsWith("connection lost: "));
  store->stop();
  ASSERT_TRUE(hears_of("cache-0", of_store, member_state::gone));

  const auto a2 = join(a);
  const auto b2 = join(*second_b_);
  ASSERT_TRUE(hears("a", a2, member_state::up));
  ASSERT_TRUE(hears("b", b2, member_state::up));
  EXPECT_THAT(lives_of("a"), ElementsAre(there(a1), gone(a1), there(a2)));
  EXPECT_THAT(lives_of("b"), ElementsAre(there(b1), gone(b1), there(b2)));
  EXPECT_THAT(lives_of("w"), IsEmpty()) << "it is told of itself";
  for (const auto& e : heard_) {
    EXPECT_EQ(e.stage, e.node == "cache-0" ? "cache" : "engines");
    if (e.node == "cache-0") {
      EXPECT_THAT(e.labels, IsEmpty());
      continue;
    }
    ASSERT_EQ(e.labels.size(), 1u);
    EXPECT_EQ(e.labels.front().value, e.node.substr(8, 1) + ":8000");
  }
}

TEST_F(of_a_steady_supervisor, is_told_first_of_those_that_were_there_before_it) {
  const auto a1 = join(engine_called('a'));
  const auto b1 = join(engine_called('b'));
  ASSERT_TRUE(hears("a", a1, member_state::up));
  ASSERT_TRUE(hears("b", b1, member_state::up));
  engine_called('b').end(SIGKILL);
  ASSERT_TRUE(hears("b", b1, member_state::gone));
  watcher_->stop();
  heard_.clear();
  engine_options options;
  options.join = announcement{"engines", "late", 0, 1, {}};
  options.watch = true;
  auto late = start("", std::move(options));
  ASSERT_TRUE(late);
  std::vector<std::string> lives;
  for (const auto end = end_of_wait(); lives.empty() && std::chrono::steady_clock::now() < end;) {
    for (const auto& e : late->wait(20ms)) {
      lives.push_back(std::get<event_member>(e.what).node);
    }
  }
  EXPECT_THAT(lives, ::testing::Contains("engines.a.0"));
  EXPECT_THAT(lives, Not(::testing::Contains("engines.b.0"))) << "who is gone already is not told";
}

TEST_F(of_a_steady_supervisor, is_told_nothing_more_once_it_has_stopped) {
  const auto a1 = join(engine_called('a'));
  ASSERT_TRUE(hears("a", a1, member_state::up));
  const auto b1 = join(engine_called('b'));
  ASSERT_NE(b1, 0u);
  // An event that is queued by then is not delivered either.
  ASSERT_TRUE(comes_true([this] {
    pollfd shown{watcher_->event_fd(), POLLIN, 0};
    return ::poll(&shown, 1, 0) == 1;
  }));
  watcher_->stop();
  engine_called('a').end(SIGKILL);
  EXPECT_THAT(watcher_->take(), IsEmpty());
  EXPECT_THAT(watcher_->wait(200ms), IsEmpty());
}

TEST_F(of_a_steady_supervisor, waits_for_its_operations_beside_what_it_is_told_of_members) {
  const std::vector<std::byte> value(64);
  const auto put = watcher_->put("engines.w.0", "key", value);
  ASSERT_TRUE(put) << to_string(put.error());
  const auto a1 = join(engine_called('a'));
  const auto stored = watcher_->wait(*put);
  ASSERT_TRUE(stored) << to_string(stored.error());
  ASSERT_TRUE(hears("a", a1, member_state::up)) << "nobody who waits for an operation may have it";
  const auto of_none = watcher_->wait(operation_id{});
  ASSERT_FALSE(of_none);
  EXPECT_EQ(of_none.error().code, errc::not_found);
}

/// Silence also ends a life, which is how the next supervisor finds out which nodes are gone.
class of_a_restarted_supervisor : public watching_engine,
                                  public ::testing::WithParamInterface<record> {
 protected:
  of_a_restarted_supervisor() : watching_engine{std::to_string(10 * slowness) + "s", GetParam()} {}
};

TEST_P(of_a_restarted_supervisor, is_told_gone_who_is_and_nobody_else) {
  auto& a = engine_called('a');
  auto& b = engine_called('b');
  auto& c = engine_called('c');
  auto& d = engine_called('d');
  const auto a1 = join(a);
  const auto b1 = join(b);
  const auto c1 = join(c);
  const auto d1 = join(d);
  for (const auto& [replica, life] : std::vector<std::pair<std::string, std::uint64_t>>{
           {"a", a1}, {"b", b1}, {"c", c1}, {"d", d1}}) {
    ASSERT_TRUE(hears(replica, life, member_state::up));
  }

  replace_supervisor([&] {
    b.end(SIGKILL);
    leave(c);  // no supervisor learns that it leaves
    leave(d);
    d.channel().say("join " + std::to_string(port()));
  });
  const auto d2 = joined(d);
  ASSERT_TRUE(hears("d", d2, member_state::up));
  ASSERT_TRUE(hears("b", b1, member_state::gone));
  ASSERT_TRUE(hears("c", c1, member_state::gone));
  EXPECT_THAT(lives_of("a"), ElementsAre(there(a1))) << "it was there all the time";

  const auto b2 = join(*second_b_);
  ASSERT_TRUE(hears("b", b2, member_state::up));
  leave(a);
  ASSERT_TRUE(hears("a", a1, member_state::gone));
  EXPECT_THAT(lives_of("a"), ElementsAre(there(a1), gone(a1)));
  EXPECT_THAT(lives_of("b"), ElementsAre(there(b1), gone(b1), there(b2)));
  EXPECT_THAT(lives_of("c"), ElementsAre(there(c1), gone(c1)));
  EXPECT_THAT(lives_of("d"), ElementsAre(there(d1), gone(d1), there(d2)));
}

INSTANTIATE_TEST_SUITE_P(whose_record, of_a_restarted_supervisor,
                         ::testing::Values(record::kept, record::not_kept),
                         [](const ::testing::TestParamInfo<record>& of) {
                           return of.param == record::kept ? "is_kept" : "is_not_kept";
                         });

}  // namespace
}  // namespace troupe::testing
