#include "troupe/transport/progress_engine.hpp"

#include <atomic>
#include <functional>
#include <thread>

#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <sys/resource.h>

#include "counter.hpp"

namespace troupe::transport {

namespace {

double processor_ms() {
  rusage used{};
  ::getrusage(RUSAGE_SELF, &used);
  return static_cast<double>(used.ru_utime.tv_sec + used.ru_stime.tv_sec) * 1e3 +
         static_cast<double>(used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e3;
}

TEST(progress_engine_test, a_ready_descriptor_is_reported_with_its_key) {
  const auto engine = progress_engine::create({}).value();
  const auto who = std::make_shared<counter>();
  const auto watch = engine->watch(who->fd, EPOLLIN, who, 42).value();
  who->ring();
  ASSERT_TRUE(comes_true([&] { return who->ready == 1; }));
  EXPECT_EQ(who->last_key, 42U);
  engine->unwatch(watch);
  who->ring();
  std::this_thread::sleep_for(5ms);
  EXPECT_EQ(who->ready, 1);
}

TEST(progress_engine_test, an_object_lives_while_it_is_called_even_if_it_unregisters_itself) {
  const auto engine = progress_engine::create({}).value();
  auto who = std::make_shared<counter>();
  const std::weak_ptr<counter> gone = who;
  const auto watch = engine->watch(who->fd, EPOLLIN, who, 0).value();
  std::atomic<bool> alive{false};
  who->when_ready = [&, raw = who.get()] {
    engine->unwatch(watch);
    std::this_thread::sleep_for(2ms);
    alive = raw->fd >= 0;
  };
  who->ring();
  who.reset();
  ASSERT_TRUE(comes_true([&] { return gone.expired(); }));
  EXPECT_TRUE(alive);
}

TEST(progress_engine_test, timers_fire_in_time_once_and_not_when_cancelled) {
  const auto engine = progress_engine::create({}).value();
  const auto who = std::make_shared<counter>();
  const auto start = clock::now();
  engine->call_at(start + 20ms, who, 7);
  const auto never = engine->call_at(start + 10ms, who, 8);
  engine->cancel(never);
  ASSERT_TRUE(comes_true([&] { return who->timers == 1; }));
  EXPECT_GE(clock::now() - start, 20ms);
  EXPECT_EQ(who->last_key, 7U);
  std::this_thread::sleep_for(10ms);
  EXPECT_EQ(who->timers, 1);
}

TEST(progress_engine_test, an_idle_engine_takes_no_processor_time) {
  const auto engine = progress_engine::create({}).value();
  const auto who = std::make_shared<counter>();
  engine->add_poller(who);
  ASSERT_TRUE(comes_true([&] { return who->sleeps >= 1 && who->sleeps == who->wakes + 1; }));
  std::this_thread::sleep_for(20ms);
  const auto before = processor_ms();
  const auto polls = who->polls.load();
  std::this_thread::sleep_for(400ms);
  EXPECT_LT(processor_ms() - before, 200.0) << "it did not sleep";
  EXPECT_LT(who->polls - polls, 10);
  EXPECT_GE(who->sleeps, 1);
  engine->remove_poller(who.get());
}

TEST(progress_engine_test, after_work_it_polls_for_a_while_then_sleeps_again) {
  const auto engine =
      progress_engine::create({.own_thread = true, .spin = 2ms, .after_progress = {}}).value();
  const auto who = std::make_shared<counter>();
  engine->add_poller(who);
  const auto watch = engine->watch(who->fd, EPOLLIN, who, 0).value();
  // If the thread got no core during the whole polling time, it sleeps without having polled: ring
  // again.
  ASSERT_TRUE(comes_true([&] {
    std::this_thread::sleep_for(20ms);
    const auto polls = who->polls.load();
    who->ring();
    std::this_thread::sleep_for(20ms);
    return who->polls > polls + 5;  // one or two without polling
  }));
  ASSERT_TRUE(comes_true([&] {
    const auto sleeps = who->sleeps.load();
    std::this_thread::sleep_for(10ms);
    return who->sleeps == sleeps && who->sleeps == who->wakes + 1;
  }));
  engine->unwatch(watch);
  engine->remove_poller(who.get());
}

TEST(progress_engine_test, without_a_thread_nothing_happens_but_by_poll) {
  int rounds_with_work = 0;
  const auto engine =
      progress_engine::create(
          {.own_thread = false, .spin = 50us, .after_progress = [&] { ++rounds_with_work; }})
          .value();
  const auto who = std::make_shared<counter>();
  const auto watch = engine->watch(who->fd, EPOLLIN, who, 0).value();
  who->ring();
  std::this_thread::sleep_for(5ms);
  EXPECT_EQ(who->ready, 0);
  EXPECT_TRUE(engine->poll_once());
  EXPECT_EQ(who->ready, 1);
  EXPECT_EQ(rounds_with_work, 1);
  EXPECT_FALSE(engine->poll_once());
  EXPECT_EQ(rounds_with_work, 1);
  engine->unwatch(watch);
}

/// Throws instead of doing its work, as if out of memory.
struct thrower final : pollable {
  explicit thrower(int rung) : fd{rung} {}
  bool on_ready(std::uint64_t, std::uint32_t) override { throw std::bad_alloc{}; }
  int fd;
};

TEST(progress_engine_test, a_thread_that_ends_by_an_exception_says_so) {
  std::atomic<int> told{0};
  troupe::error why;
  const auto engine = progress_engine::create({.own_thread = true,
                                               .spin = 50us,
                                               .after_progress = {},
                                               .on_thread_lost =
                                                   [&](const troupe::error& thrown) {
                                                     why = thrown;
                                                     ++told;
                                                   }})
                          .value();
  const auto bell = std::make_shared<counter>();
  const auto who = std::make_shared<thrower>(bell->fd);
  const auto watch = engine->watch(who->fd, EPOLLIN, who, 0).value();
  bell->ring();
  ASSERT_TRUE(comes_true([&] { return told == 1; }));
  EXPECT_EQ(why.code, errc::pool_exhausted);
  engine->unwatch(watch);
  EXPECT_FALSE(engine->poll_once()) << "rounds go on where somebody makes them";
  engine->stop();
}

TEST(progress_engine_test, a_driver_that_ends_by_an_exception_leaves) {
  const auto engine =
      progress_engine::create({.own_thread = false, .spin = 50us, .after_progress = {}}).value();
  const auto bell = std::make_shared<counter>();
  const auto who = std::make_shared<thrower>(bell->fd);
  const auto watch = engine->watch(who->fd, EPOLLIN, who, 0).value();
  bell->ring();
  const auto later = std::chrono::steady_clock::now() + wait_limit;
  EXPECT_THROW((void)engine->drive(later, bell->fd, [] { return false; }), std::bad_alloc);
  engine->unwatch(watch);
  EXPECT_TRUE(engine->drive(later, bell->fd, [] { return true; })) << "it still drives";
  engine->stop();
}

/// Has work when the engine is about to sleep, like a link that finds bytes then.
struct last_minute final : pollable {
  bool on_ready(std::uint64_t, std::uint32_t) override { return false; }
  bool before_sleep() override { return !armed || done.exchange(true); }
  std::atomic<bool> armed{false}, done{false};
};

TEST(progress_engine_test, what_is_done_right_before_a_sleep_is_followed_up_as_all_else) {
  const auto who = std::make_shared<last_minute>();
  std::atomic<bool> followed_up{false};
  const auto engine = progress_engine::create({.own_thread = true,
                                               .spin = 50us,
                                               .after_progress =
                                                   [&] {
                                                     if (who->done) followed_up = true;
                                                   }})
                          .value();
  engine->add_poller(who);
  std::this_thread::sleep_for(20ms);  // until the engine sleeps: no other event is pending
  who->armed = true;
  engine->wake();  // the engine polls for a while, then prepares to sleep again
  EXPECT_TRUE(comes_true([&] { return followed_up.load(); }))
      << "what a link's last look brought up is left lying while the thread sleeps";
  engine->remove_poller(who.get());
}

TEST(progress_engine_test, the_thread_keeps_out_of_the_way_of_a_caller_that_polls_and_comes_back) {
  const auto engine = progress_engine::create({}).value();
  const auto who = std::make_shared<counter>();
  const auto watch = engine->watch(who->fd, EPOLLIN, who, 0).value();
  std::atomic<bool> by_caller{false};
  std::atomic<int> by_others{0};
  const auto caller = std::this_thread::get_id();
  who->when_ready = [&] {
    if (std::this_thread::get_id() == caller) {
      by_caller = true;
    } else {
      ++by_others;
    }
  };
  for (int i = 0; i < 2000; ++i) {
    who->ring();
    engine->poll_once();
  }
  EXPECT_TRUE(by_caller);
  const auto before = who->ready.load();
  who->ring();  // the engine has stopped polling
  EXPECT_TRUE(comes_true([&] { return who->ready > before; }));
  engine->unwatch(watch);
}

TEST(progress_engine_test, a_poll_inside_a_callback_returns_at_once) {
  const auto engine =
      progress_engine::create({.own_thread = false, .spin = 50us, .after_progress = {}}).value();
  const auto who = std::make_shared<counter>();
  const auto watch = engine->watch(who->fd, EPOLLIN, who, 0).value();
  bool nested = true;
  who->when_ready = [&] { nested = engine->poll_once(); };
  who->ring();
  EXPECT_TRUE(engine->poll_once());
  EXPECT_FALSE(nested);
  engine->unwatch(watch);
}

}  // namespace

}  // namespace troupe::transport
