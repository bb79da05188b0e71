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

#include "comes_true.hpp"
#include "gpu_double.hpp"

// Memory of other processes that is open here: what happens while a driver closes it, or may not yet.
namespace troupe::transport::xgmi {
namespace {

using namespace std::chrono_literals;

/// Counts what was opened and closed of other processes' memory, which it does not have. Closes no
/// faster than the test lets it.
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
  /// Opens it, and lets go of it at once.
  void use(const allocation_key& key) { static_cast<void>(site.opened.open(key, 1).value()); }
  [[nodiscard]] bool are_closed(int count) const {
    return comes_true([&] { return gpus.closed == count; });
  }
  template <class Result>
  [[nodiscard]] static bool comes(const std::future<Result>& what,
                                  std::chrono::milliseconds within) {
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
  EXPECT_TRUE(comes(elsewhere, 5s));
  EXPECT_FALSE(comes(here, 100ms)) << "the driver waits for all that this GPU was given";
  gpus.may_close = true;
  ends.join();
  EXPECT_TRUE(elsewhere.get());
  EXPECT_TRUE(here.get());
}

}  // namespace
}  // namespace troupe::transport::xgmi
