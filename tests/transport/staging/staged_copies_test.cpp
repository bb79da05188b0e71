#include "troupe/transport/staging/staged_copies.hpp"

#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "troupe/transport/progress_engine.hpp"

#include "gpu_double.hpp"

// Copies between chunks and memory of GPUs, without a link.
namespace troupe::transport::staging {
namespace {

using namespace std::chrono_literals;
using clock = std::chrono::steady_clock;

/// What a link does for its copies.
struct looker final : pollable {
  explicit looker(staged_copies& of) : copies{of} {}
  bool on_ready(std::uint64_t, std::uint32_t) override { return false; }
  bool on_poll(steady_time) override { return copies.any() && copies.look().ended; }
  bool before_sleep() override { return !copies.any() || copies.may_sleep(); }

  staged_copies& copies;
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
  /// Into a chunk.
  std::shared_ptr<staged_copy> start() {
    auto chunk = copies.lend(quota).value();
    EXPECT_TRUE(chunk);
    staged_copies::order what;
    what.dir = direction::write;
    what.runs = runs;
    what.bytes = size;
    return copies.start(std::move(chunk), what);
  }
  /// Without a look of its own: what it waits for must wake it. Its rounds.
  std::uint64_t drive(clock::duration longest, const std::function<bool()>& done) const {
    std::uint64_t rounds = 0;
    EXPECT_TRUE(engine->drive(clock::now() + longest, nothing, [&] {
      ++rounds;
      return done();
    }));
    return rounds;
  }

  static constexpr std::uint64_t size = 4096;
  xgmi::gpu_double* gpus{nullptr};
  std::shared_ptr<xgmi::gpu_site> site{[this] {
    auto owned = std::make_unique<xgmi::gpu_double>();
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
  EXPECT_LT(drive(100ms, [] { return false; }), 50U);
  EXPECT_TRUE(copies.any());
  std::thread releaser{[&] {
    while (!engine->asleep()) std::this_thread::yield();
    gpus->hold(false);
  }};
  // Nothing else would end that sleep for a minute.
  EXPECT_LT(drive(60s, [&] { return !copies.any(); }), 50U);
  releaser.join();
  ASSERT_TRUE(copy->ended);
  EXPECT_FALSE(copy->failure);
  EXPECT_EQ(std::memcmp(copy->chunk.bytes().data(), memory, size), 0);
}

TEST_F(staged, a_copy_that_begins_while_another_is_rung_for_is_heard_of_as_well) {
  gpus->hold(true);
  start();
  drive(10ms, [] { return false; });  // asleep with the bell behind the first
  start();
  std::thread releaser{[&] {
    while (!engine->asleep()) std::this_thread::yield();
    gpus->hold(false);
  }};
  drive(60s, [&] { return !copies.any(); });
  releaser.join();
  EXPECT_FALSE(copies.any());
}

}  // namespace
}  // namespace troupe::transport::staging
