#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "troupe/transport/endpoint.hpp"
#include "troupe/transport/xgmi/opened_events.hpp"

#include "gpu_double.hpp"
#include "gpu_memory.hpp"
#include "slow_kernels.hpp"
#include "waiting.hpp"

// Points in the work of a GPU that a worker, another process, has recorded.
namespace troupe::transport::xgmi {
namespace {

using namespace std::chrono_literals;
using troupe::testing::comes_true;

/// The worker, as the test sees it. Create it before the test has threads.
class worker {
 public:
  /// Runs `body` in the worker with its end of a socket. Without a body, runs this program again:
  /// drivers do not survive a fork.
  explicit worker(const std::function<void(int)>& body, const char* test = nullptr) {
    std::array<int, 2> ends{};
    if (::socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()) != 0) return;
    pid_ = ::fork();
    if (pid_ == 0) {
      ::close(ends[0]);
      if (test != nullptr) {
        ::setenv("TROUPE_TEST_WORKER", std::to_string(ends[1]).c_str(), 1);
        const auto only = std::string{"--gtest_filter="} + test;
        ::execl("/proc/self/exe", "worker", only.c_str(), nullptr);
      } else {
        body(ends[1]);
      }
      ::_exit(0);
    }
    ::close(ends[1]);
    fd_ = ends[0];
  }
  worker(const worker&) = delete;
  worker& operator=(const worker&) = delete;
  ~worker() {
    kill();
    ::close(fd_);
  }
  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(std::exchange(pid_, -1), nullptr, 0);
  }
  /// Sends an order and returns the answer.
  event_handle ask(std::uint32_t order) const {
    event_handle answer{};
    EXPECT_EQ(::send(fd_, &order, sizeof order, MSG_NOSIGNAL), ssize_t{sizeof order});
    EXPECT_EQ(::recv(fd_, answer.data(), answer.size(), MSG_WAITALL), ssize_t{sizeof answer});
    return answer;
  }

 private:
  pid_t pid_{-1};
  int fd_{-1};
};

/// Carries out each order in the worker, until there are no more.
void serve(int fd, const std::function<event_handle(std::uint32_t)>& obey) {
  std::uint32_t order = 0;
  while (::recv(fd, &order, sizeof order, MSG_WAITALL) == ssize_t{sizeof order}) {
    const auto answer = obey(order);
    static_cast<void>(::send(fd, answer.data(), answer.size(), MSG_NOSIGNAL));
  }
}

/// Orders to a worker with doubles: a smaller number launches a kernel and records that event
/// behind it; from this number on, the order ends that kernel.
constexpr std::uint32_t end_kernel = 10'000;

void work_on_doubles(int fd) {
  gpu_double gpus;
  {
    std::map<std::uint32_t, gpu_event> events;
    slow_kernels kernels{gpus};
    serve(fd, [&](std::uint32_t order) {
      if (order >= end_kernel) {
        kernels.finish(order - end_kernel);
        return event_handle{};
      }
      auto at = events.find(order);
      if (at == events.end()) at = events.emplace(order, gpus.make_shared_event(0)).first;
      kernels.launch();
      kernels.record(at->second);
      return gpus.export_event(at->second);
    });
    for (const auto& [order, event] : events) gpus.release_event(event);
  }
}

class shared_events : public ::testing::Test {
 protected:
  worker other{work_on_doubles};
  worker stuck{work_on_doubles};  ///< never comes to its points
  std::uint32_t launched{0};
  std::atomic<int> told{0};
  std::atomic<bool> failed{false};
  std::shared_ptr<gpu_site> site{std::make_shared<gpu_site>(std::make_unique<gpu_double>())};
  gpu_double& gpus{dynamic_cast<gpu_double&>(*site->runtime)};
  std::unique_ptr<endpoint> here{make()};

  std::unique_ptr<endpoint> make() const {
    endpoint_options options;
    options.self = incarnation{7};
    options.xgmi.site = site;
    return endpoint::create(std::move(options)).value();
  }
  result<void> wait_for(const compute_point& point, std::uint64_t line = 1) {
    return here->after_compute(point, line, [this](auto failure) {
      failed = failed || failure.has_value();
      ++told;
    });
  }
  static compute_point named(const event_handle& handle) { return {nullptr, 0, handle}; }
  bool are_told(int count) const {
    return comes_true([&] { return told == count; });
  }
};

TEST_F(shared_events, are_told_when_the_other_process_has_come_there) {
  const auto first = other.ask(0);
  const auto second = other.ask(1);
  ASSERT_TRUE(wait_for(named(first)));
  ASSERT_TRUE(wait_for(named(second)));
  std::this_thread::sleep_for(50ms);
  EXPECT_EQ(told, 0);
  static_cast<void>(other.ask(end_kernel));
  EXPECT_TRUE(are_told(1));
  static_cast<void>(other.ask(end_kernel + 1));
  EXPECT_TRUE(are_told(2));
  EXPECT_FALSE(failed);
}

TEST_F(shared_events, are_opened_once_however_often_they_are_recorded) {
  for (std::uint32_t i = 0; i < 50; ++i) {
    ASSERT_TRUE(wait_for(named(other.ask(0))));
    EXPECT_EQ(told, static_cast<int>(i));
    static_cast<void>(other.ask(end_kernel + i));
    ASSERT_TRUE(are_told(static_cast<int>(i) + 1));
  }
  EXPECT_EQ(gpus.events_opened_ever(), 1u);
  EXPECT_EQ(gpus.events_open_now(), 1u);
}

TEST_F(shared_events, that_were_used_longest_ago_are_closed_and_opened_anew_when_they_come_back) {
  constexpr auto all = static_cast<std::uint32_t>(opened_events::per_gpu);
  const auto use = [&](std::uint32_t event) {
    const auto handle = other.ask(event);
    static_cast<void>(other.ask(end_kernel + launched++));
    ASSERT_TRUE(wait_for(named(handle)));
    ASSERT_TRUE(are_told(static_cast<int>(launched)));
  };
  for (std::uint32_t i = 0; i < all; ++i) ASSERT_NO_FATAL_FAILURE(use(i));
  EXPECT_EQ(gpus.events_open_now(), all);
  use(0);  // now the second was used longest ago
  EXPECT_EQ(gpus.events_opened_ever(), all);
  use(all);
  use(0);
  EXPECT_EQ(gpus.events_opened_ever(), all + 1);
  EXPECT_EQ(gpus.events_open_now(), all);
  use(1);
  EXPECT_EQ(gpus.events_opened_ever(), all + 2);
  EXPECT_EQ(gpus.events_open_now(), all);
  EXPECT_EQ(gpus.events_closed_early(), 0u);
}

TEST_F(shared_events, that_a_stream_waits_for_stay_open_until_it_has_come_there) {
  constexpr auto all = static_cast<std::uint32_t>(opened_events::per_gpu);
  const auto slow = other.ask(0);
  ASSERT_TRUE(wait_for(named(slow), 1));
  for (std::uint32_t i = 1; i <= all; ++i) {
    ASSERT_TRUE(wait_for(named(other.ask(i)), 2));
  }
  EXPECT_EQ(gpus.events_open_now(), all + 1)
      << "room was made by an event that is still waited for";
  for (std::uint32_t i = 0; i <= all; ++i) static_cast<void>(other.ask(end_kernel + i));
  EXPECT_TRUE(are_told(static_cast<int>(all) + 1));
  EXPECT_TRUE(comes_true([&] { return gpus.events_open_now() == all; }));
  EXPECT_EQ(gpus.events_closed_early(), 0u);
  EXPECT_FALSE(failed);
}

TEST_F(shared_events, that_are_waited_for_when_the_endpoint_ends_are_not_closed_under_the_stream) {
  ASSERT_TRUE(wait_for(named(other.ask(0))));
  here->stop();
  std::thread later{[&] {
    std::this_thread::sleep_for(100ms);
    static_cast<void>(other.ask(end_kernel));
  }};
  here.reset();
  later.join();
  EXPECT_EQ(gpus.events_closed_early(), 0u);
  EXPECT_EQ(told, 0);
}

TEST_F(shared_events, of_a_worker_that_dies_before_them_hold_up_nobody_who_comes_later) {
  ASSERT_TRUE(wait_for(named(stuck.ask(0)), 1));
  stuck.kill();
  std::this_thread::sleep_for(1300ms);  // until the endpoint sees that nothing moves
  ASSERT_TRUE(wait_for(named(other.ask(0)), 2));
  static_cast<void>(other.ask(end_kernel));
  EXPECT_TRUE(are_told(1));
  EXPECT_FALSE(failed);
  gpus.lose();  // otherwise the streams of the double never end
}

TEST_F(shared_events, of_one_line_are_told_in_their_order_also_when_the_first_takes_long) {
  ASSERT_TRUE(wait_for(named(stuck.ask(0)), 1));
  std::this_thread::sleep_for(1300ms);
  ASSERT_TRUE(wait_for(named(other.ask(0)), 1));
  static_cast<void>(other.ask(end_kernel));
  std::this_thread::sleep_for(50ms);
  EXPECT_EQ(told, 0);
  static_cast<void>(stuck.ask(end_kernel));
  EXPECT_TRUE(are_told(2));
}

TEST_F(shared_events, that_nobody_comes_to_are_waited_for_by_so_many_and_no_more) {
  constexpr int most = 4 * 320;
  const auto point = named(stuck.ask(0));
  int taken = 0;
  auto waited = wait_for(point, 0);
  while (waited && taken < 2 * most) waited = wait_for(point, static_cast<std::uint64_t>(++taken));
  EXPECT_EQ(taken, most);
  ASSERT_FALSE(waited);
  EXPECT_EQ(waited.error().code, errc::overloaded) << to_string(waited.error());
  static_cast<void>(stuck.ask(end_kernel));
  EXPECT_TRUE(are_told(taken));
  EXPECT_TRUE(wait_for(point, 1));
  EXPECT_TRUE(are_told(taken + 1));
}

TEST_F(shared_events, that_no_driver_opens_are_refused_with_what_to_do) {
  const auto refusal = [&](const compute_point& point) {
    const auto waited = wait_for(point);
    return waited ? std::string{"none"} : to_string(waited.error());
  };
  const auto handle = other.ask(0);
  event_handle garbage{};
  garbage.fill(std::byte{0x5a});
  const auto own = gpus.make_shared_event(0);
  for (const auto& wrong : {garbage, event_handle{}, gpus.export_event(own)}) {
    const auto said = refusal(named(wrong));
    EXPECT_EQ(said.find("invalid_config: "), 0u) << said;
    EXPECT_NE(said.find("interprocess"), std::string::npos) << said;
  }
  EXPECT_EQ(refusal({own.handle, 0, handle}).find("invalid_config: "), 0u) << "two events";
  EXPECT_EQ(refusal({}).find("invalid_config: "), 0u) << "no event";
  EXPECT_EQ(refusal({nullptr, 9, handle}).find("no_device: "), 0u);
  other.kill();
  EXPECT_EQ(refusal(named(handle)).find("invalid_config: "), 0u) << "its process is gone";
  EXPECT_EQ(gpus.events_open_now(), 0u);
  EXPECT_EQ(told, 0);
  gpus.release_event(own);
}

// -- on a real GPU

/// The few calls of the CUDA driver that an engine's worker makes, without linking it.
struct cuda {
  void* library{::dlopen("libcuda.so.1", RTLD_NOW)};
  template <class... Args>
  void call(const char* name, Args... args) const {
    auto* const found = reinterpret_cast<int (*)(Args...)>(::dlsym(library, name));
    if (found == nullptr || found(args...) != 0) ::_exit(3);
  }
};

/// The worker's side of the next test: a stream that a host call holds, with an event behind it.
TEST(a_worker_on_a_real_gpu, records_what_it_is_told_to) {
  const char* fd = std::getenv("TROUPE_TEST_WORKER");
  if (fd == nullptr) GTEST_SKIP() << "the other process of compute_on_a_real_gpu";
  static std::atomic<int> may_end{0};
  const cuda driver;
  void* context = nullptr;
  void* stream = nullptr;
  void* event = nullptr;
  driver.call("cuInit", 0U);
  driver.call("cuDevicePrimaryCtxRetain", &context, 0);
  driver.call("cuCtxSetCurrent", context);
  driver.call("cuStreamCreate", &stream, 1U);
  driver.call("cuEventCreate", &event, 2U | 4U);  // no timing, for other processes
  serve(std::atoi(fd), [&](std::uint32_t order) {
    event_handle handle{};
    if (order >= end_kernel) {
      ++may_end;
      return handle;
    }
    static std::atomic<int> begun{0};
    void (*const work)(void*) = [](void*) {
      const int mine = ++begun;
      while (may_end < mine) std::this_thread::sleep_for(1ms);
    };
    driver.call("cuLaunchHostFunc", stream, work, static_cast<void*>(nullptr));
    driver.call("cuEventRecord", event, stream);
    driver.call("cuIpcGetEventHandle", &handle, event);
    return handle;
  });
}

TEST(compute_on_a_real_gpu, a_point_of_another_process_is_told_when_its_stream_has_come_there) {
  if (!on_real_gpus()) GTEST_SKIP() << "TROUPE_TEST_GPU=1 takes the GPUs of this machine";
  if (cuda{}.library == nullptr) GTEST_SKIP() << "HIP's events between processes are not ready";
  worker other{{}, "a_worker_on_a_real_gpu.*"};
  std::atomic<int> told{0};
  std::atomic<bool> failed{false};
  endpoint_options options;
  options.self = incarnation{7};
  const auto here = endpoint::create(std::move(options)).value();
  for (int i = 0; i < 5; ++i) {
    const compute_point point{nullptr, 0, other.ask(0)};
    const auto waited = here->after_compute(point, 1, [&](auto failure) {
      failed = failed || failure.has_value();
      ++told;
    });
    ASSERT_TRUE(waited) << to_string(waited.error());
    std::this_thread::sleep_for(200ms);
    EXPECT_EQ(told, i);
    static_cast<void>(other.ask(end_kernel));
    ASSERT_TRUE(comes_true([&] { return told == i + 1; }));
  }
  EXPECT_FALSE(failed);
  event_handle garbage{};
  garbage.fill(std::byte{0x5a});
  const auto refused = here->after_compute({nullptr, 0, garbage}, 1, [](auto) { FAIL(); });
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, errc::invalid_config) << to_string(refused.error());
}

}  // namespace
}  // namespace troupe::transport::xgmi
