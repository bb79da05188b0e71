#include "troupe/transport/staging/staged_copies.hpp"

#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "troupe/transport/progress_engine.hpp"

#include "gpu_double.hpp"
#include "waiting.hpp"

// Copies between chunks and memory of GPUs, without a link.
namespace troupe::transport::staging {
namespace {

using namespace std::chrono_literals;
using clock = std::chrono::steady_clock;

/// Does for the copies what a link does.
struct looker final : pollable {
  explicit looker(staged_copies& of) : copies{of} {}
  bool on_ready(std::uint64_t, std::uint32_t) override { return false; }
  bool on_poll(steady_time) override {
    if (!copies.any()) return false;
    ++looks;
    return copies.look().ended;
  }
  bool before_sleep() override { return !copies.any() || copies.may_sleep(); }

  staged_copies& copies;
  std::uint64_t looks{0};
};

/// Lets another link's end look at the copies in the middle of a call.
struct interrupted_double final : xgmi::gpu_double {
  [[nodiscard]] result<void> ring_after(xgmi::gpu_stream on,
                                        std::shared_ptr<xgmi::bell> what) override {
    if (const auto meanwhile = std::exchange(before_next_ring, {})) meanwhile();
    return gpu_double::ring_after(on, std::move(what));
  }
  std::function<void()> before_next_ring;
};

struct staged : ::testing::Test {
  staged() {
    EXPECT_TRUE(pool->prepare(0));
    engine->add_poller(who);
  }
  ~staged() override {
    gpus->hold(false);
    engine->remove_poller(who.get());
    engine->poll_once();
    site->runtime->release(0, memory);
    ::close(nothing);
  }
  /// Starts a copy into a chunk.
  std::shared_ptr<staged_copy> start() { return start_by(copies); }
  std::shared_ptr<staged_copy> start_by(staged_copies& by) {
    auto chunk = by.lend(quota).value();
    EXPECT_TRUE(chunk);
    staged_copies::order what;
    what.dir = direction::write;
    what.runs = runs;
    what.bytes = size;
    return by.start(std::move(chunk), what);
  }
  /// Does not poll by itself: the copies must wake it. Returns the number of rounds.
  std::uint64_t drive(clock::time_point end, const std::function<bool()>& done) const {
    std::uint64_t rounds = 0;
    EXPECT_TRUE(engine->drive(end, nothing, [&] {
      ++rounds;
      return done();
    }));
    return rounds;
  }
  /// Drives until nothing is in flight, which must also end the sleep.
  std::uint64_t drive_to_the_end() const {
    const auto end = troupe::testing::end_of_wait();
    const auto rounds = drive(end, [&] { return !copies.any(); });
    EXPECT_LT(clock::now(), end) << "nothing woke it";
    return rounds;
  }

  static constexpr std::uint64_t size = 4096;
  interrupted_double* gpus{nullptr};
  std::shared_ptr<xgmi::gpu_site> site{[this] {
    auto owned = std::make_unique<interrupted_double>();
    gpus = owned.get();
    return std::make_shared<xgmi::gpu_site>(std::move(owned));
  }()};
  std::byte* memory{site->runtime->allocate(0, size).value()};
  std::vector<memory_run> runs{{memory, size, 0, 1, 0}};
  std::unique_ptr<progress_engine> engine{
      progress_engine::create({.own_thread = false, .spin = 0us, .after_progress = {}}).value()};
  std::shared_ptr<staging_pool> pool{std::make_shared<staging_pool>(site, xgmi_options{})};
  std::shared_ptr<chunk_quota> quota{std::make_shared<chunk_quota>()};
  staged_copies copies{pool, *engine};
  std::shared_ptr<looker> who{std::make_shared<looker>(copies)};
  int nothing{::eventfd(0, EFD_CLOEXEC)};
};

TEST_F(staged, a_copy_that_takes_long_takes_no_rounds_and_its_end_wakes_who_sleeps) {
  gpus->hold(true);
  std::memset(memory, 0x42, size);
  const auto copy = start();
  EXPECT_LT(drive(clock::now() + 100ms, [] { return false; }), 50U);
  EXPECT_TRUE(copies.any());
  std::thread releaser{[&] {
    while (!engine->asleep()) std::this_thread::yield();
    gpus->hold(false);
  }};
  EXPECT_LT(drive_to_the_end(), 50U);
  releaser.join();
  ASSERT_TRUE(copy->ended);
  EXPECT_FALSE(copy->failure);
  EXPECT_EQ(std::memcmp(copy->chunk.bytes().data(), memory, size), 0);
}

TEST_F(staged, a_copy_that_begins_while_another_is_rung_for_is_heard_of_as_well) {
  gpus->hold(true);
  start();
  drive(clock::now() + 10ms, [] { return false; });  // asleep with the bell behind the first
  start();
  std::thread releaser{[&] {
    while (!engine->asleep()) std::this_thread::yield();
    gpus->hold(false);
  }};
  drive_to_the_end();
  releaser.join();
  EXPECT_FALSE(copies.any());
}

TEST_F(staged, nobody_sleeps_whose_copy_ended_while_the_bell_was_put_behind_another_links) {
  staged_copies of_another_link{pool, *engine};
  gpus->hold(true);
  start_by(of_another_link);
  const auto ours = start();
  gpus->before_next_ring = [&] {
    gpus->hold(false);
    // `may_sleep` arms the bell behind the other link's copy; meanwhile the other link sees that
    // ours has ended.
    std::thread other{[&] {
      const auto last = troupe::testing::end_of_wait();
      while (!ours->flown() && clock::now() < last) static_cast<void>(of_another_link.look());
    }};
    other.join();
    EXPECT_TRUE(ours->flown());
  };
  EXPECT_FALSE(copies.may_sleep()) << "it has something to look at";
  EXPECT_TRUE(copies.look().ended);
  while (of_another_link.any()) static_cast<void>(of_another_link.look());
}

TEST_F(staged, who_sleeps_when_there_is_no_chunk_is_woken_since_they_may_all_be_back) {
  gpus->pin_at_most(0);
  std::vector<staging_chunk> all;
  for (bool starved = false; !starved;) {
    auto chunk = pool->lend(std::make_shared<chunk_quota>(), starved).value();
    if (chunk) all.push_back(std::move(chunk));
  }
  std::thread starving{[&] {
    while (!engine->asleep()) std::this_thread::yield();
    EXPECT_FALSE(copies.lend(quota).value());
    all.clear();
  }};
  const auto end = clock::now() + 10s;
  drive(end, [&] { return who->looks != 0; });
  EXPECT_LT(clock::now(), end) << "nothing woke it";
  starving.join();
}

}  // namespace
}  // namespace troupe::transport::staging
