#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "troupe/transport/endpoint.hpp"

#include "gpu_double.hpp"
#include "gpu_memory.hpp"
#include "slow_kernels.hpp"
#include "waiting.hpp"

// Points in the work of a GPU that an engine computes on: waiters are told once, in order.
namespace troupe::transport::xgmi {
namespace {

using namespace std::chrono_literals;
using troupe::testing::comes_true;

class compute : public ::testing::Test {
 protected:
  std::mutex mutex;
  std::string
      told;  ///< a letter for each point that was reached, in capitals for each that never will be
  std::string why;
  std::shared_ptr<gpu_site> site{std::make_shared<gpu_site>(std::make_unique<gpu_double>())};
  gpu_double& gpus{dynamic_cast<gpu_double&>(*site->runtime)};
  std::unique_ptr<endpoint> here{make()};

  std::unique_ptr<endpoint> make() {
    endpoint_options options;
    options.self = incarnation{7};
    options.xgmi.site = site;
    return endpoint::create(std::move(options)).value();
  }
  /// Launches one kernel, and waits for a point behind it.
  result<void> wait_behind(slow_kernels& kernels, char letter, std::uint64_t line) {
    kernels.launch();
    const auto event = kernels.mark();
    auto ok = here->after_compute({event.handle, 0}, line, [this, letter](auto failure) {
      const std::lock_guard lock{mutex};
      told += static_cast<char>(failure ? letter - 'a' + 'A' : letter);
      if (failure) why = failure->message;
    });
    gpus.release_event(event);  // the event is needed only for the call
    return ok;
  }
  std::string told_now() {
    const std::lock_guard lock{mutex};
    return told;
  }
  bool comes_to(const std::string& wanted) {
    return comes_true([&] { return told_now() == wanted; });
  }
};

TEST_F(compute, points_are_told_once_each_when_the_gpu_has_come_there) {
  slow_kernels kernels{gpus};
  for (const char letter : {'a', 'b', 'c'}) ASSERT_TRUE(wait_behind(kernels, letter, 1));
  std::this_thread::sleep_for(50ms);
  EXPECT_EQ(told_now(), "");
  kernels.finish(0);
  EXPECT_TRUE(comes_to("a")) << told_now();
  kernels.finish(2);  // behind a kernel that has not ended
  std::this_thread::sleep_for(50ms);
  EXPECT_EQ(told_now(), "a");
  kernels.finish(1);
  EXPECT_TRUE(comes_to("abc")) << told_now();
}

TEST_F(compute, one_line_does_not_wait_for_another) {
  slow_kernels first{gpus};
  slow_kernels second{gpus};
  ASSERT_TRUE(wait_behind(first, 'a', 1));
  ASSERT_TRUE(wait_behind(second, 'b', 2));
  second.finish(0);
  EXPECT_TRUE(comes_to("b")) << told_now();
  first.finish(0);
  EXPECT_TRUE(comes_to("ba")) << told_now();
}

TEST_F(compute, a_gpu_that_is_lost_is_told_to_all_that_wait_and_refused_to_who_comes_later) {
  slow_kernels kernels{gpus};
  ASSERT_TRUE(wait_behind(kernels, 'a', 1));
  ASSERT_TRUE(wait_behind(kernels, 'b', 1));
  int unused = 0;
  gpus.lose();
  EXPECT_TRUE(comes_to("AB")) << told_now();
  EXPECT_NE(why.find("GPU"), std::string::npos) << why;
  const auto late = here->after_compute({&unused, 0}, 1, [](auto) { FAIL(); });
  ASSERT_FALSE(late);
  EXPECT_EQ(late.error().code, errc::no_device);
}

TEST_F(compute, nobody_is_told_once_the_endpoint_has_stopped) {
  slow_kernels kernels{gpus};
  ASSERT_TRUE(wait_behind(kernels, 'a', 1));
  here->stop();
  kernels.finish(0);
  std::this_thread::sleep_for(50ms);
  EXPECT_EQ(told_now(), "");
  EXPECT_FALSE(wait_behind(kernels, 'b', 1));
  kernels.finish(1);
}

TEST_F(compute, a_line_that_the_gpu_does_not_come_along_is_refused_more_and_others_are_not) {
  constexpr int most = 320;
  slow_kernels kernels{gpus};
  kernels.launch();
  const auto event = kernels.mark();
  std::atomic<int> came{0};
  const auto wait_on = [&](std::uint64_t line) {
    return here->after_compute({event.handle, 0}, line, [&](auto) { ++came; });
  };
  int taken = 0;
  auto waited = wait_on(1);
  while (waited && ++taken < 2 * most) waited = wait_on(1);
  EXPECT_EQ(taken, most);
  ASSERT_FALSE(waited);
  EXPECT_EQ(waited.error().code, errc::overloaded) << to_string(waited.error());
  EXPECT_TRUE(wait_on(2));
  kernels.finish(0);
  EXPECT_TRUE(comes_true([&] { return came >= most + 1; }));
  EXPECT_EQ(came, most + 1);
  EXPECT_TRUE(wait_on(1));
  here->stop();
  gpus.release_event(event);
}

TEST_F(compute, what_is_no_point_is_refused) {
  const auto nothing = here->after_compute({}, 1, [](auto) { FAIL(); });
  ASSERT_FALSE(nothing);
  EXPECT_EQ(nothing.error().code, errc::invalid_config);
  int unused = 0;
  const auto elsewhere = here->after_compute({&unused, 9}, 1, [](auto) { FAIL(); });
  ASSERT_FALSE(elsewhere);
  EXPECT_EQ(elsewhere.error().code, errc::no_device);
}

/// Work of a stream that blocks until it is let go.
class held_work final : public bell {
 public:
  void ring() noexcept override {
    while (!go_.load()) std::this_thread::sleep_for(1ms);
  }
  void let_go() { go_ = true; }

 private:
  std::atomic<bool> go_{false};
};

TEST(compute_on_a_real_gpu, a_point_is_told_when_the_stream_has_come_there) {
  if (!on_real_gpus()) GTEST_SKIP() << "TROUPE_TEST_GPU=1 takes the GPUs of this machine";
  std::atomic<int> told{0};
  std::atomic<bool> failed{false};
  endpoint_options options;
  options.self = incarnation{7};
  const auto here = endpoint::create(std::move(options)).value();
  auto& gpus = *gpu_site::of_process()->runtime;
  const auto stream = gpus.make_stream(0).value();
  std::vector<std::shared_ptr<held_work>> kernels;
  for (int i = 0; i < 3; ++i) {
    kernels.push_back(std::make_shared<held_work>());
    ASSERT_TRUE(gpus.ring_after(stream, kernels.back()));
    const auto event = gpus.make_event(0).value();
    ASSERT_TRUE(gpus.record(event, stream));
    const auto waited = here->after_compute({event.handle, 0}, 1, [&](auto failure) {
      failed = failed || failure.has_value();
      ++told;
    });
    ASSERT_TRUE(waited) << to_string(waited.error());
    gpus.release_event(event);
  }
  std::this_thread::sleep_for(300ms);
  EXPECT_EQ(told, 0);
  for (int i = 0; i < 3; ++i) kernels[static_cast<std::size_t>(i)]->let_go();
  EXPECT_TRUE(comes_true([&] { return told == 3; }));
  EXPECT_FALSE(failed);
  here->stop();
  gpus.release_stream(stream);
}

}  // namespace
}  // namespace troupe::transport::xgmi
