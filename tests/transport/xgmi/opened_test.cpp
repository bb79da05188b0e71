#include <array>
#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "troupe/transport/xgmi/gpu_site.hpp"

#include "gpu_double.hpp"
#include "waiting.hpp"

// Memory of other processes that is open here: what happens while a driver closes it, or may not
// close it yet.
namespace troupe::transport::xgmi {
namespace {

using namespace std::chrono_literals;
using troupe::testing::comes_true;

/// Counts opening and closing of other processes' memory, which does not exist. Closes no faster
/// than the test allows.
class noting_double final : public gpu_double {
 public:
  result<std::byte*> open_memory(std::uint32_t, const memory_handle&) override {
    return &nothing_.at(static_cast<std::size_t>(opened++));
  }
  void close_memory(std::uint32_t, std::byte*) noexcept override {
    ++closing;
    while (!may_close) std::this_thread::sleep_for(1ms);
    ++closed;
  }
  std::atomic<int> opened{0}, closing{0}, closed{0};
  std::atomic<bool> may_close{true};

 private:
  std::array<std::byte, 16> nothing_{};
};

struct memory_of_a_peer : ::testing::Test {
  ~memory_of_a_peer() override { gpus.may_close = true; }
  /// Opens the memory and releases it at once.
  void use(const allocation_key& key) { static_cast<void>(site.opened.open(key, 1).value()); }
  [[nodiscard]] bool are_closed(int count) const {
    return comes_true([&] { return gpus.closed == count; });
  }
  template <class Result>
  [[nodiscard]] static bool comes(const std::future<Result>& what,
                                  std::chrono::milliseconds within = testing::wait_limit) {
    return what.wait_for(within) == std::future_status::ready;
  }

  std::unique_ptr<noting_double> made{std::make_unique<noting_double>()};
  noting_double& gpus{*made};
  gpu_site site{std::move(made)};
  const allocation_key first{1, 0, 1, {}};
  const allocation_key second{2, 0, 2, {}};
};

TEST_F(memory_of_a_peer, is_not_closed_while_a_stream_of_the_gpu_is_held) {
  use(first);
  EXPECT_TRUE(are_closed(1)) << "no stream is held";
  const auto gate = site.gates.take(0, nullptr).value();
  use(first);
  EXPECT_EQ(gpus.opened, 2);
  std::this_thread::sleep_for(100ms);
  EXPECT_EQ(gpus.closing, 1) << "this would wait for the stream";
  use(first);
  EXPECT_EQ(gpus.opened, 2) << "it was still open";
  site.gates.give_back(gate);
  EXPECT_TRUE(are_closed(2)) << "nobody has to ask";
  use(second);
  EXPECT_TRUE(are_closed(3));
}

TEST_F(memory_of_a_peer, is_closed_on_one_gpu_while_streams_of_another_are_held_and_let_go) {
  gpus.may_close = false;
  std::thread ends{[&] { use(first); }};
  ASSERT_TRUE(comes_true([&] { return gpus.closing == 1; }));
  auto elsewhere = std::async(std::launch::async, [&] { return site.gates.take(1, nullptr); });
  auto here = std::async(std::launch::async, [&] { return site.gates.take(0, nullptr); });
  EXPECT_TRUE(comes(elsewhere));
  EXPECT_FALSE(comes(here, 100ms)) << "the driver waits for all that this GPU was given";
  gpus.may_close = true;
  ends.join();
  EXPECT_TRUE(elsewhere.get());
  EXPECT_TRUE(here.get());
}

TEST_F(memory_of_a_peer, that_is_being_closed_is_opened_anew_only_when_it_is_closed) {
  gpus.may_close = false;
  std::thread ends{[&] { use(first); }};
  ASSERT_TRUE(comes_true([&] { return gpus.closing == 1; }));
  auto again = std::async(std::launch::async, [&] { return site.opened.open(first, 1); });
  EXPECT_FALSE(comes(again, 100ms));
  EXPECT_EQ(gpus.opened, 1) << "a driver opens nothing twice";
  auto other = std::async(std::launch::async, [&] { return site.opened.open(second, 1); });
  EXPECT_TRUE(comes(other)) << "another allocation has nothing to do with that";
  gpus.may_close = true;
  ends.join();
  const auto open = again.get();
  ASSERT_TRUE(open);
  EXPECT_EQ(gpus.closed, 1);
  EXPECT_EQ(site.opened.size(), 1U + (other.get() ? 1U : 0U));
}

TEST_F(memory_of_a_peer, is_let_go_of_without_waiting_for_the_driver) {
  gpus.may_close = false;
  auto ends = std::async(std::launch::async, [&] { use(first); });
  EXPECT_TRUE(comes(ends));
  gpus.may_close = true;
  EXPECT_TRUE(are_closed(1));
}

TEST_F(memory_of_a_peer, is_said_to_be_closed_once_the_driver_has_closed_it_on_every_gpu) {
  std::atomic<int> told{0};
  const auto tell = [&] { ++told; };
  site.opened.after_closing(first, tell);
  EXPECT_EQ(told, 1) << "it is not open";
  auto elsewhere = first;
  elsewhere.device = 1;
  const auto gate = site.gates.take(1, nullptr).value();
  use(elsewhere);
  gpus.may_close = false;
  use(first);
  site.opened.after_closing(first, tell);
  site.opened.after_closing(second, tell);
  EXPECT_EQ(told, 2) << "the other one";
  gpus.may_close = true;
  EXPECT_TRUE(are_closed(1));
  std::this_thread::sleep_for(50ms);
  EXPECT_EQ(told, 2);
  site.gates.give_back(gate);
  EXPECT_TRUE(comes_true([&] { return told == 3; }));
  EXPECT_EQ(gpus.closed, 2);
}

TEST_F(memory_of_a_peer, that_is_used_again_before_it_is_closed_counts_as_closed_by_who_left_it) {
  std::atomic<int> told{0};
  const auto gate = site.gates.take(0, nullptr).value();
  use(first);
  site.opened.after_closing(first, [&] { ++told; });
  EXPECT_EQ(told, 0);
  auto open = site.opened.open(first, 1).value();
  EXPECT_EQ(told, 1);
  EXPECT_EQ(gpus.opened, 1);
  site.gates.give_back(gate);
  std::this_thread::sleep_for(100ms);
  EXPECT_EQ(gpus.closed, 0);
  open.reset();
  EXPECT_TRUE(are_closed(1));
}

TEST_F(memory_of_a_peer, that_threads_open_and_leave_at_once_is_open_once_at_any_time) {
  const auto gate = site.gates.take(0, nullptr).value();
  std::vector<std::thread> all;
  for (int i = 0; i < 4; ++i) {
    all.emplace_back([&] {
      for (int n = 0; n < 500; ++n) use(first);
    });
  }
  for (auto& thread : all) thread.join();
  EXPECT_EQ(gpus.opened, 1) << "none was closed, so none had to be opened";
  site.gates.give_back(gate);
  EXPECT_TRUE(are_closed(1));
  EXPECT_EQ(site.opened.size(), 0U);
}

}  // namespace
}  // namespace troupe::transport::xgmi
