// Several engine threads at once: no waiting thread is forgotten, and `stop` may come at any time.

#include <algorithm>
#include <array>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <future>
#include <iterator>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>

#include <poll.h>

#include "troupe/actors/cluster_client.hpp"

#include "ways.hpp"

namespace troupe::testing {
namespace {

/// Sends every request that the test names, one per line, whole and at once.
int sends_at_once(engine& node, line_channel& channel) {
  listener events{node};
  auto blocks = node.allocate_blocks(1);
  if (!blocks) return 1;
  channel.say("up");
  while (auto line = channel.order()) {
    if (*line == "end") return 0;
    const auto send = node.send({*line, blocks->blocks});
    if (!send || !node.seal(*send, 16)) return 2;
    if (!events.unpinned(*send)) return 3;
    events.forget(*send);
  }
  return 0;
}

/// The cores that each thread of this process may run on, by thread id.
std::map<std::string, std::string> cores_of_threads() {
  std::map<std::string, std::string> out;
  for (const auto& thread : std::filesystem::directory_iterator{"/proc/self/task"}) {
    std::ifstream status{thread.path() / "status"};
    for (std::string line; std::getline(status, line);) {
      constexpr std::string_view key = "Cpus_allowed_list:\t";
      if (line.starts_with(key)) out[thread.path().filename()] = line.substr(key.size());
    }
  }
  return out;
}

TEST(engine_cores, are_those_of_its_threads_and_of_no_other) {
  const cluster c;
  cluster::quiet("decode-0");
  const auto before = cores_of_threads();
  cpu_set_t usable;
  ASSERT_EQ(sched_getaffinity(0, sizeof usable, &usable), 0);
  unsigned core = 0;
  while (!CPU_ISSET(core, &usable)) ++core;
  engine_options options;
  options.cores = {core};
  const auto node = c.start("decode-0", std::move(options));
  ASSERT_TRUE(node);
  std::size_t of_node = 0;
  for (const auto& [thread, cores] : cores_of_threads()) {
    if (const auto known = before.find(thread); known != before.end()) {
      EXPECT_EQ(cores, known->second) << "of a thread that was there before";
    } else {
      EXPECT_EQ(cores, std::to_string(core)) << "of a thread of the node";
      ++of_node;
    }
  }
  EXPECT_GT(of_node, 2U);
}

TEST(engine_cores, that_the_process_may_not_use_are_refused_by_number) {
  const cluster c;
  const auto before = cores_of_threads();
  for (const unsigned none : {60'000U, 4'000'000'000U}) {
    engine_options options;
    options.cores = {none};
    const auto node = engine::start(c.deployment(), "decode-0", std::move(options));
    ASSERT_FALSE(node);
    EXPECT_EQ(node.error().code, errc::invalid_config);
    EXPECT_NE(node.error().message.find("core " + std::to_string(none)), std::string::npos)
        << node.error().message;
  }
  EXPECT_EQ(cores_of_threads(), before);
}

/// Keeps the processors busy, so that threads have to wait for their turn.
class load {
 public:
  load() {
    for (auto& one : threads_) {
      one = std::thread{[this] {
        while (!over_) {
          for (int i = 0; i < 20'000; ++i) work_ = work_ + 1;
          std::this_thread::sleep_for(std::chrono::microseconds{50});
        }
      }};
    }
  }
  ~load() {
    over_ = true;
    for (auto& one : threads_) one.join();
  }
  load(const load&) = delete;
  load& operator=(const load&) = delete;

 private:
  std::atomic<bool> over_{false};
  std::atomic<std::uint64_t> work_{0};
  std::array<std::thread, 2> threads_;
};

// -- waiting threads are woken

/// How long a forgotten thread would wait.
const std::chrono::milliseconds very_long = 10 * wait_limit;

enum class waiting : std::uint8_t { by_wait, by_descriptor };

class wake : public ::testing::TestWithParam<way> {
 protected:
  std::unique_ptr<cluster> c;
  std::unique_ptr<forked> store, prefill;
  std::unique_ptr<engine> node;

  void SetUp() override {
    auto options = unhurried(options_of(GetParam()));
    options.deadline = "1h";
    options.decode_has_store = true;
    c = std::make_unique<cluster>(options);
    store = c->spawn("store-0", bystander);
    prefill = c->spawn("prefill-0", sends_at_once);
    cluster::quiet("decode-0");
    node = c->start("decode-0");
    ASSERT_TRUE(node);
    ASSERT_EQ(store->channel().hear().value_or("silence"), "up");
    ASSERT_EQ(prefill->channel().hear().value_or("silence"), "up");
  }
  std::vector<event> next(waiting how) {
    if (how == waiting::by_wait) return node->wait(very_long);
    pollfd readable{node->event_fd(), POLLIN, 0};
    (void)::poll(&readable, 1, static_cast<int>(very_long.count()));
    return node->take();
  }
  /// Runs the rounds on a thread that waits for events. Fails, without waiting for that thread, if
  /// it is forgotten.
  static void repeat(int rounds, const std::function<void(int)>& round) {
    std::atomic<int> ended{0};
    const auto all = std::async(std::launch::async, [&] {
      for (int i = 0; i < rounds; ++i) {
        if (!HasFailure()) round(i);
        ++ended;
      }
    });
    for (int seen = 0; seen < rounds; seen = ended) {
      ASSERT_TRUE(comes_true([&] { return ended > seen; })) << "nobody woke it in round " << seen;
    }
  }
};

/// These move no layers, whatever the mode.
class wake_of_questions : public wake {
 public:
  static std::vector<way> ways() {
    std::vector<way> all;
    for (const auto& backend : every_backend()) all.push_back({backend, "write"});
    return all;
  }
};

TEST_P(wake_of_questions, comes_to_a_thread_that_waits_for_a_peer_in_either_way_and_in_time) {
  const int rounds = 2000 / slowness;
  for (const auto how : {waiting::by_wait, waiting::by_descriptor}) {
    const load busy;
    repeat(rounds, [&](int i) {
      const auto asked = node->query("store-0", "no such key");
      ASSERT_TRUE(asked) << to_string(asked.error());
      const auto events = next(how);
      ASSERT_EQ(events.size(), 1u) << "nobody woke the engine in round " << i;
      ASSERT_EQ(events.front().operation, *asked);
    });
  }
}

TEST_P(wake, is_of_no_use_after_the_end_which_comes_though_threads_that_used_the_node_live_on) {
  std::promise<void> used, over;
  std::thread user{[&] {
    EXPECT_TRUE(node->query("store-0", "no such key"));
    EXPECT_EQ(node->wait(very_long).size(), 1u);
    EXPECT_EQ(node->report().node.name, "decode-0");
    used.set_value();
    over.get_future().wait();
  }};
  used.get_future().wait();
  auto ended = std::async(std::launch::async, [this] { node = nullptr; });
  EXPECT_EQ(ended.wait_for(wait_limit), std::future_status::ready);
  over.set_value();
  user.join();
}

TEST_P(wake, comes_for_what_a_peer_begins_by_itself) {
  const int rounds = 400 / slowness;
  const auto blocks = node->allocate_blocks(1);
  ASSERT_TRUE(blocks);
  repeat(rounds, [&](int i) {
    const auto how = i % 2 == 0 ? waiting::by_wait : waiting::by_descriptor;
    const auto request = "w" + std::to_string(i);
    const auto asked =
        node->receive({request, {"prefill-0"}, mode_of(GetParam()), 16, 0, blocks->blocks});
    ASSERT_TRUE(asked) << to_string(asked.error());
    if (i % 3 == 0) std::this_thread::sleep_for(1ms);  // so that the engine is asleep when it comes
    prefill->channel().say(request);
    for (bool over = false; !over;) {
      const auto events = next(how);
      ASSERT_FALSE(events.empty()) << "nobody woke the engine in round " << i;
      for (const auto& e : events) {
        ASSERT_FALSE(std::holds_alternative<event_failed>(e.what));
        over = over || std::holds_alternative<event_unpinned>(e.what);
      }
    }
  });
  prefill->channel().say("end");
}

TEST_P(wake_of_questions, comes_to_every_one_of_several_threads_that_wait_at_once) {
  const int rounds = 500 / slowness;
  constexpr int at_once = 4;
  std::atomic<int> heard{0};
  std::atomic<bool> over{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&, i] {
      while (!over) {
        heard += static_cast<int>(node->wait(i == 0 ? 20ms : 1s, i == 1 ? 1 : 64).size());
      }
    });
  }
  for (int i = 0; i < rounds; ++i) {
    for (int k = 0; k < at_once; ++k) {
      EXPECT_TRUE(node->query(k % 2 == 0 ? "store-0" : "decode-0", "no such key"));
    }
    const auto all_are_heard = [&] {
      std::this_thread::yield();
      return heard >= (i + 1) * at_once;
    };
    if (!comes_true(all_are_heard, 0ms) || heard != (i + 1) * at_once) {
      ADD_FAILURE() << heard << " events heard of " << (i + 1) * at_once;
      break;
    }
  }
  over = true;
  for (auto& one : threads) one.join();
}

INSTANTIATE_TEST_SUITE_P(every_way, wake, ::testing::ValuesIn(every_way()), name_of);
INSTANTIATE_TEST_SUITE_P(every_backend, wake_of_questions,
                         ::testing::ValuesIn(wake_of_questions::ways()), name_of);

// -- stop comes while other threads are in calls

/// Records every operation that was begun, and how many outcomes it got.
class ledger {
 public:
  void begun(const result<operation_id>& id) {
    if (!id) return;
    const std::lock_guard lock{mutex_};
    ++begun_[id->value];
  }
  void heard(const std::vector<event>& events) {
    const std::lock_guard lock{mutex_};
    for (const auto& e : events) {
      const bool on_the_way = std::holds_alternative<event_allocated>(e.what) ||
                              std::holds_alternative<event_layers>(e.what) ||
                              std::holds_alternative<event_unpinned>(e.what);
      if (!on_the_way) ++ended_[e.operation.value];
    }
  }
  bool any() {
    const std::lock_guard lock{mutex_};
    return !begun_.empty();
  }
  void expect_one_outcome_each() {
    const std::lock_guard lock{mutex_};
    for (const auto& [id, count] : begun_) {
      EXPECT_EQ(count, 1);
      EXPECT_EQ(ended_[id], 1) << "operation " << id;
    }
    EXPECT_EQ(ended_.size(), begun_.size());
  }

 private:
  std::mutex mutex_;
  std::map<std::uint64_t, int> begun_, ended_;
};

class stop : public ::testing::TestWithParam<std::string> {
 protected:
  std::unique_ptr<cluster> c;
  std::unique_ptr<forked> store;
  bool polling{GetParam() == "polling"};

  void SetUp() override {
    c = std::make_unique<cluster>();
    store = c->spawn("store-0", bystander);
    cluster::quiet("prefill-0");
    ASSERT_EQ(store->channel().hear().value_or("silence"), "up");
  }
  std::unique_ptr<engine> start() const {
    engine_options options;
    options.polling = polling;
    auto deployment = c->deployment();
    // No file can have this edge; with it, the single node here has calls of both kinds in flight.
    deployment.edges.push_back({"decode", "prefill", config::transfer_mode::read});
    auto started = engine::start(deployment, "prefill-0", std::move(options));
    if (!started) return nullptr;
    EXPECT_TRUE((*started)->wait_registered(wait_limit));
    return std::move(*started);
  }
};

/// Calls of every kind, as fast as they come, until `over`.
void call_at_random(engine& node, ledger& book, const std::atomic<bool>& over, unsigned seed) {
  std::mt19937 random{seed};
  const std::vector<std::byte> large(200'000, std::byte{1});
  auto blocks = node.allocate_blocks(2);
  std::vector<operation_id> mine;
  const auto began = [&](const result<operation_id>& id) {
    book.begun(id);
    if (id) mine.push_back(*id);
  };
  for (int i = 0; !over; ++i) {
    const auto key = "k" + std::to_string(random() % 5);
    const std::string peer = random() % 2 == 0 ? "store-0" : "prefill-0";
    const auto request = std::to_string(seed) + "-" + std::to_string(i);
    switch (random() % 10) {
      case 0:
        began(node.put(peer, key, {large.data(), random() % 2 == 0 ? 10 : large.size()}));
        break;
      case 1: began(node.get(peer, key)); break;
      case 2: began(node.remove(peer, key)); break;
      case 3:
        if (blocks) began(node.send({request, blocks->blocks, 0, 5s, 0}));
        if (!mine.empty()) (void)node.seal(mine.back(), 16);
        break;
      case 4:
        began(node.receive({request,
                            {"decode-0"},
                            actors::transfer_mode::read,
                            16,
                            0,
                            blocks ? blocks->blocks : std::vector<block_id>{},
                            0,
                            5s}));
        break;
      case 5: began(node.place({request, "prefill", "decode", 5000})); break;
      case 6:
        if (!mine.empty()) (void)node.abort(mine[random() % mine.size()], "at random");
        break;
      case 7:
        if (i % 16 == 0) (void)node.report();
        node.set_queue_length(3);
        node.placed_request_ended(request);
        break;
      case 8: book.heard(node.take(random() % 8)); break;
      case 9:
        if (auto one = node.allocate_blocks(1)) (void)node.free_blocks(one->owner, one->blocks);
        break;
    }
  }
}

TEST_P(stop, leaves_every_operation_that_any_thread_began_with_one_outcome) {
  for (unsigned round = 0; round < 8; ++round) {
    auto node = start();
    ASSERT_TRUE(node);
    ledger book;
    std::atomic<bool> over{false};
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < 3; ++i) {
      threads.emplace_back([&, i] { call_at_random(*node, book, over, round * 10 + i); });
    }
    threads.emplace_back([&] {
      while (!over) {
        if (polling) (void)node->poll();
        book.heard(node->wait(1ms));
      }
    });
    while (!book.any()) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds{5 + 7 * round});
    node->stop();
    std::this_thread::sleep_for(2ms);
    EXPECT_EQ(node->get("store-0", "key").error().code, errc::aborted);
    over = true;
    for (auto& one : threads) one.join();
    for (;;) {
      const auto rest = node->take();
      if (rest.empty()) break;
      book.heard(rest);
    }
    book.expect_one_outcome_each();
  }
}

TEST_P(stop, leaves_views_of_values_readable_while_other_threads_hold_them) {
  for (int round = 0; round < 4; ++round) {
    auto node = start();
    ASSERT_TRUE(node);
    listener events{*node};
    std::vector<value_view> views;
    std::vector<std::vector<std::byte>> values;
    for (const std::size_t size : {std::size_t{100}, std::size_t{300'000}}) {
      for (const std::string peer : {"store-0", "prefill-0"}) {
        const auto key = "v" + std::to_string(round) + "-" + std::to_string(size);
        values.emplace_back(size, static_cast<std::byte>(size + peer.size()));
        const auto put = node->put(peer, key, values.back());
        ASSERT_TRUE(put && events.outcome(*put));
        const auto got = node->get(peer, key);
        ASSERT_TRUE(got && events.outcome(*got));
        ASSERT_EQ(events.of(*got).done, 1) << to_string(events.of(*got).why);
        views.push_back(std::exchange(events.of(*got).value, {}));
      }
    }
    std::atomic<bool> over{false};
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < views.size(); ++i) {
      threads.emplace_back([&, i, view = views[i]]() mutable {
        while (!over) {
          ASSERT_TRUE(std::ranges::equal(view.bytes, values[i]));
          if (i % 2 == 0) {  // drops its view and takes another one
            view = {};
            view = views[i];
          }
        }
      });
    }
    std::this_thread::sleep_for(2ms);
    node->stop();
    for (std::size_t i = 0; i < views.size(); ++i) {
      EXPECT_TRUE(std::ranges::equal(views[i].bytes, values[i]));
    }
    over = true;
    for (auto& one : threads) one.join();
    views.clear();
  }
}

TEST_P(stop, waits_for_no_thread_that_waits_for_events) {
  auto node = start();
  ASSERT_TRUE(node);
  std::atomic<bool> over{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      while (!over) (void)node->wait(300ms);
    });
  }
  std::this_thread::sleep_for(20ms);
  const auto ended = std::async(std::launch::async, [&] { node->stop(); });
  EXPECT_EQ(ended.wait_for(wait_limit), std::future_status::ready);
  over = true;
  for (auto& one : threads) one.join();
}

TEST_P(stop, answers_those_who_ask_how_the_node_is) {
  for (unsigned round = 0; round < 10; ++round) {
    auto node = start();
    ASSERT_TRUE(node);
    ledger book;
    std::atomic<bool> over{false};
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < 2; ++i) {
      threads.emplace_back([&, i] { call_at_random(*node, book, over, round * 10 + i); });
    }
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&] {
        while (!over) EXPECT_EQ(node->report().node.name, "prefill-0");
      });
    }
    while (!book.any()) std::this_thread::yield();
    const auto ended = std::async(std::launch::async, [&] { node->stop(); });
    EXPECT_EQ(ended.wait_for(wait_limit), std::future_status::ready);
    over = true;
    for (auto& one : threads) one.join();
  }
}

INSTANTIATE_TEST_SUITE_P(of, stop, ::testing::Values("event_driven", "polling"),
                         [](const auto& which) { return which.param; });

TEST(a_call, that_the_engine_keeps_does_not_keep_the_node) {
  const cluster c{{}};
  std::promise<call> taken;
  auto token = std::make_shared<int>(0);  // destroyed together with the node's handler
  const std::weak_ptr<int> handler = token;
  engine_options options;
  options.on_call = [&taken, token = std::move(token)](call what) {
    taken.set_value(std::move(what));
  };
  auto node = c.start("decode-0", std::move(options));
  ASSERT_TRUE(node);
  const auto client =
      actors::cluster_client::connect({"127.0.0.1", static_cast<std::uint16_t>(c.port())});
  ASSERT_TRUE(client) << to_string(client.error());
  EXPECT_FALSE((*client)->call("decode-0", {"m", {}, 50}));
  const auto kept = taken.get_future().get();
  node = nullptr;
  EXPECT_TRUE(comes_true([&] { return handler.expired(); })) << "its actors were left behind";
  kept.reply(std::vector<std::uint8_t>{1});
}

std::ptrdiff_t threads_of_this_process() {
  return std::distance(std::filesystem::directory_iterator{"/proc/self/task"}, {});
}

/// The node's actor looks at the clock only once a minute. The end must not wait for that, nor give
/// up on the actor and leave its threads behind.
TEST(an_engine, that_beats_seldom_ends_as_any_other) {
  cluster_options slow;
  slow.heartbeat_interval = "1min";
  slow.heartbeat_timeout = "30min";
  const cluster c{slow};
  const auto live = [&] {
    const auto node = c.start("decode-0");
    ASSERT_TRUE(node);
    ASSERT_TRUE(node->wait_registered(wait_limit));
  };
  live();  // the first life may leave threads behind, such as a sanitizer's own
  const auto before = threads_of_this_process();
  live();
  EXPECT_TRUE(comes_true([&] { return threads_of_this_process() <= before; }));
}

// -- progress

std::size_t progress_threads() {
  std::size_t count = 0;
  for (const auto& task : std::filesystem::directory_iterator{"/proc/self/task"}) {
    std::ifstream comm{task.path() / "comm"};
    std::string name;
    std::getline(comm, name);
    count += name == "troupe-progress" ? 1 : 0;
  }
  return count;
}

/// A thread that was joined may still be listed for a moment.
bool are_progress_threads(std::size_t expected) {
  return comes_true([&] { return progress_threads() == expected; });
}

TEST(progress, has_as_many_threads_as_the_file_says_and_none_where_the_engine_polls) {
  const cluster c;
  for (const std::uint32_t workers : {1U, 3U}) {
    auto deployment = c.deployment();
    for (auto& stage : deployment.stages) stage.transport.num_workers = workers;
    for (const bool polling : {false, true}) {
      engine_options options;
      options.polling = polling;
      auto node = engine::start(deployment, "decode-0", options);
      ASSERT_TRUE(node) << to_string(node.error());
      const std::size_t expected = polling ? 0 : workers;
      EXPECT_TRUE(are_progress_threads(expected)) << progress_threads();
      (*node)->stop();
    }
    EXPECT_TRUE(are_progress_threads(0)) << progress_threads();
  }
}

}  // namespace
}  // namespace troupe::testing
