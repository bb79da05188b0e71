#include <future>

#include <gtest/gtest.h>
#include <sys/epoll.h>

#include "counter.hpp"

/// A caller that drives a progress engine instead of its thread.
namespace troupe::transport {

namespace {

const std::function<bool()> never = [] { return false; };

/// A descriptor of the caller's own that ends its sleep.
struct alarm {
  alarm() : fd{::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)} {}
  ~alarm() { ::close(fd); }
  void ring() const {
    const std::uint64_t one = 1;
    static_cast<void>(::write(fd, &one, sizeof one));
  }
  int fd;
};

struct driven : ::testing::Test {
  std::unique_ptr<progress_engine> engine =
      progress_engine::create({.own_thread = true, .spin = 100us, .after_progress = {}}).value();
  std::shared_ptr<counter> who = std::make_shared<counter>();
  alarm mine;
  std::atomic<std::thread::id> ran_on{};
  watch_id watch{};

  void SetUp() override {
    who->when_ready = [this] { ran_on = std::this_thread::get_id(); };
    watch = engine->watch(who->fd, EPOLLIN, who, 0).value();
    engine->add_poller(who);
  }
  void TearDown() override {
    engine->unwatch(watch);
    engine->remove_poller(who.get());
  }
};

TEST_F(driven, does_on_the_callers_thread_what_arrives_while_it_sleeps) {
  std::thread other{[this] {
    std::this_thread::sleep_for(20ms);
    who->ring();
  }};
  EXPECT_TRUE(engine->drive(end_of_wait(), mine.fd, [this] { return who->ready == 1; }));
  EXPECT_EQ(who->ready, 1);
  EXPECT_EQ(ran_on.load(), std::this_thread::get_id());
  other.join();
}

TEST_F(driven, runs_timers_in_time) {
  const auto due = clock::now() + 15ms;
  engine->call_at(due, who, 3);
  const auto end = end_of_wait();
  EXPECT_TRUE(engine->drive(end, mine.fd, [this] { return who->timers == 1; }));
  EXPECT_GE(clock::now(), due);
  EXPECT_LT(clock::now(), end) << "the timer did not end its sleep";
  EXPECT_EQ(who->timers, 1);
}

TEST_F(driven, gives_the_work_back_to_the_thread_when_it_leaves) {
  EXPECT_TRUE(engine->drive(clock::now() + 20ms, mine.fd, never));
  who->ring();
  ASSERT_TRUE(comes_true([this] { return who->ready == 1; }));
  EXPECT_NE(ran_on.load(), std::this_thread::get_id());
}

TEST_F(driven, wakes_by_the_callers_own_descriptor) {
  std::atomic<bool> said{false};
  std::thread other{[&] {
    std::this_thread::sleep_for(20ms);
    said = true;
    mine.ring();
  }};
  EXPECT_TRUE(engine->drive(end_of_wait(), mine.fd, [&] { return said.load(); }));
  EXPECT_TRUE(said);
  other.join();
}

TEST_F(driven, is_for_one_caller_at_a_time) {
  std::atomic<bool> second_done{false};
  std::atomic<bool> inside{false};
  auto first = std::async(std::launch::async, [&] {
    return engine->drive(clock::now() + 2 * wait_limit, mine.fd, [&] {
      inside = true;
      return second_done.load();
    });
  });
  ASSERT_TRUE(comes_true([&] { return inside.load(); }));
  EXPECT_FALSE(engine->drive(end_of_wait(), mine.fd, never));
  second_done = true;
  mine.ring();
  EXPECT_TRUE(first.get());
}

TEST_F(driven, ends_when_the_engine_is_stopped) {
  auto driver = std::async(std::launch::async, [&] {
    return engine->drive(clock::now() + 2 * wait_limit, mine.fd, never);
  });
  std::this_thread::sleep_for(20ms);
  engine->stop();
  EXPECT_EQ(driver.wait_for(wait_limit), std::future_status::ready);
  EXPECT_FALSE(engine->drive(end_of_wait(), mine.fd, never));
}

TEST_F(driven, is_over_when_the_engine_has_stopped) {
  std::atomic<bool> inside{false};
  std::atomic<bool> stopped{false};
  std::atomic<int> late{0};
  auto driver = std::async(std::launch::async, [&] {
    return engine->drive(clock::now() + 2 * wait_limit, mine.fd, [&] {
      inside = true;
      std::this_thread::sleep_for(20ms);
      if (stopped) ++late;
      return false;
    });
  });
  ASSERT_TRUE(comes_true([&] { return inside.load(); }));
  engine->stop();
  stopped = true;
  EXPECT_TRUE(driver.get());
  EXPECT_EQ(late, 0) << "whoever drove went on, and what it looks at may be gone";
}

TEST_F(driven, sleeps_while_there_is_nothing_to_do) {
  const auto polls = who->polls.load();
  EXPECT_TRUE(engine->drive(clock::now() + 200ms, mine.fd, never));
  EXPECT_LT(who->polls - polls, 100'000) << "it polled all the time";
  EXPECT_GE(who->sleeps, 1);
  EXPECT_TRUE(comes_true([this] { return who->wakes <= who->sleeps; }));
}

// Pollers' doorbells are armed before a sleep and disarmed after it. With two threads that come and
// go, neither may disarm a doorbell that the other sleeps on. Each ring must be answered.
TEST_F(driven, misses_no_doorbell_while_callers_come_and_go) {
  std::atomic<bool> stop{false};
  std::thread comes_and_goes{[&] {
    std::uint32_t pause = 1;
    while (!stop) {
      (void)engine->drive(clock::now() + std::chrono::microseconds{pause * 37 % 900}, mine.fd,
                          never);
      std::this_thread::sleep_for(std::chrono::microseconds{pause * 53 % 400});
      ++pause;
    }
  }};
  // Checks more often than other tests do, so that rings follow each other quickly.
  const auto heard = [&](int rings) {
    return [&, rings] {
      if (who->ready < rings) std::this_thread::sleep_for(100us);
      return who->ready >= rings;
    };
  };
  for (int i = 1; i <= 1500; ++i) {
    who->ring();
    ASSERT_TRUE(comes_true(heard(i), 0ms)) << "ring " << i << " was never heard";
    std::this_thread::sleep_for(std::chrono::microseconds{i * 29 % 500});
  }
  stop = true;
  comes_and_goes.join();
}

TEST(adaptive_spin, polls_longer_where_sleeps_are_short_and_less_where_they_are_long) {
  adaptive_spin spin{800us};
  EXPECT_EQ(spin.time(), 100us);
  spin.slept(300us);
  EXPECT_EQ(spin.time(), 800us);
  spin.slept(801us);
  EXPECT_EQ(spin.time(), 400us);
  for (int i = 0; i < 10; ++i) spin.slept(1s);
  EXPECT_EQ(spin.time(), 100us);
}

}  // namespace

}  // namespace troupe::transport
