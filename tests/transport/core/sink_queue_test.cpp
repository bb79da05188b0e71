#include "troupe/transport/sink_queue.hpp"

#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

namespace troupe::transport {

namespace {

/// Checks that no two calls overlap, and records them in order.
struct one_at_a_time final : link_sink {
  struct inside {
    explicit inside(one_at_a_time& s) : of{s} { EXPECT_FALSE(of.busy.exchange(true)); }
    ~inside() { of.busy = false; }
    one_at_a_time& of;
  };
  void on_up() override { const inside call{*this}; }
  void on_completion(completion done) override {
    const inside call{*this};
    ids.push_back(done.id.value);
    if (when_completed) when_completed(done);
  }
  void on_frame(std::span<const std::byte> frame) override {
    const inside call{*this};
    ids.push_back(frame.size());
  }
  void on_quiescent(transfer_id t) override {
    const inside call{*this};
    ids.push_back(t.value);
  }
  void on_broken(troupe::error) override {
    const inside call{*this};
    broken = true;
  }
  std::atomic<bool> busy{false};
  std::function<void(const completion&)> when_completed;
  std::vector<std::uint64_t> ids;
  bool broken{false};
};

completion numbered(std::uint64_t id) {
  completion done;
  done.id = batch_id{id};
  return done;
}

struct sink_queue_test : ::testing::Test {
  std::shared_ptr<one_at_a_time> sink{std::make_shared<one_at_a_time>()};
  sink_queue queue{sink};
};

}  // namespace

TEST_F(sink_queue_test, calls_from_many_threads_never_overlap_and_none_is_lost_or_overtaken) {
  constexpr std::uint64_t threads = 4;
  constexpr std::uint64_t each = 20'000;
  std::vector<std::thread> all;
  for (std::uint64_t t = 0; t < threads; ++t) {
    all.emplace_back([&, t] {
      for (std::uint64_t i = 0; i < each; ++i) {
        const auto id = t * each + i;
        if (i % 3 == 0) {
          queue.put(numbered(id));
          queue.deliver();
        } else if (i % 3 == 1 && queue.try_begin()) {
          queue.end(numbered(id));
        } else {
          queue.deliver(numbered(id));
        }
      }
    });
  }
  for (auto& t : all) t.join();
  queue.deliver();
  ASSERT_EQ(sink->ids.size(), threads * each);
  std::vector<std::uint64_t> next(threads, 0);
  for (const auto id : sink->ids) EXPECT_EQ(id % each, next[id / each]++);
}

TEST_F(sink_queue_test, what_a_callback_causes_is_called_after_it) {
  sink->when_completed = [&](const completion& done) {
    if (done.id.value >= 3) return;
    queue.deliver(numbered(done.id.value + 1));
    queue.frame({});
  };
  queue.deliver(numbered(1));
  EXPECT_EQ(sink->ids, (std::vector<std::uint64_t>{1, 2, 0, 3, 0}));
  EXPECT_EQ(queue.waiting_frames(), 0U);
}

TEST_F(sink_queue_test, what_comes_during_a_turn_that_was_taken_waits_for_its_event) {
  ASSERT_TRUE(queue.try_begin());
  EXPECT_FALSE(queue.try_begin());
  queue.put(quiescent_event{transfer_id{7}});
  queue.deliver();
  const std::vector<std::byte> frame(5);
  queue.frame(frame);
  EXPECT_TRUE(sink->ids.empty());
  EXPECT_EQ(queue.waiting_frames(), 1U);
  EXPECT_EQ(queue.waiting_bytes(), 5U);
  queue.end(numbered(1));
  EXPECT_EQ(sink->ids, (std::vector<std::uint64_t>{1, 7, 5}));
  EXPECT_EQ(queue.waiting_bytes(), 0U);
}

TEST_F(sink_queue_test, an_owner_that_closed_hears_of_no_break) {
  queue.put(broken_event{{errc::link_broken, "late"}});
  queue.mute_broken();
  queue.deliver();
  EXPECT_FALSE(sink->broken);
}

}  // namespace troupe::transport
