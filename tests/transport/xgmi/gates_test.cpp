#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "troupe/transport/endpoint.hpp"
#include "troupe/transport/xgmi/gate_words.hpp"

#include "engine_stream.hpp"
#include "gpu_double.hpp"
#include "gpu_memory.hpp"
#include "slow_kernels.hpp"
#include "waiting.hpp"

// Streams that an endpoint holds until a gate is opened.
namespace troupe::transport::xgmi {
namespace {

using namespace std::chrono_literals;
using troupe::testing::comes_true;

class gates : public ::testing::Test {
 protected:
  std::shared_ptr<gpu_site> site{std::make_shared<gpu_site>(std::make_unique<gpu_double>())};
  gpu_double& gpus{dynamic_cast<gpu_double&>(*site->runtime)};
  std::unique_ptr<endpoint> here{make()};

  std::unique_ptr<endpoint> make() const {
    endpoint_options options;
    options.self = incarnation{7};
    options.xgmi.site = site;
    return endpoint::create(std::move(options)).value();
  }
  [[nodiscard]] bool stand(std::uint64_t streams) const {
    return comes_true([&] { return gpus.standing() == streams; });
  }
  errc refusal(const compute_stream& stream) const {
    const auto gate = here->hold(stream);
    return gate ? errc::internal : gate.error().code;
  }
};

TEST_F(gates, a_stream_does_what_it_had_and_nothing_more_until_its_gate_is_opened) {
  engine_stream stream{gpus};
  stream.work();
  const auto gate = here->hold(stream.name());
  ASSERT_TRUE(gate) << to_string(gate.error());
  stream.work();
  stream.work();
  ASSERT_TRUE(stand(1));
  EXPECT_EQ(stream.done(), 1);
  (*gate)->open();
  EXPECT_TRUE(comes_true([&] { return stream.done() == 3; })) << stream.done();
  (*gate)->open();  // opening it repeatedly is allowed
}

TEST_F(gates, a_gate_that_is_opened_before_the_stream_comes_there_holds_nobody) {
  slow_kernels kernels{gpus};
  engine_stream stream{gpus};
  kernels.launch();
  const auto ended = kernels.mark();
  ASSERT_TRUE(gpus.wait_for(stream.stream(), ended.handle));
  const auto gate = here->hold(stream.name()).value();
  stream.work();
  gate->open();
  kernels.finish(0);
  EXPECT_TRUE(comes_true([&] { return stream.done() == 1; }));
  gpus.release_event(ended);
}

TEST_F(gates, several_on_one_stream_are_passed_in_order_whatever_is_opened_first) {
  engine_stream stream{gpus};
  const auto first = here->hold(stream.name()).value();
  stream.work();
  const auto second = here->hold(stream.name()).value();
  stream.work();
  ASSERT_TRUE(stand(1));
  second->open();
  EXPECT_EQ(stream.done(), 0);
  first->open();
  EXPECT_TRUE(comes_true([&] { return stream.done() == 2; }));
}

TEST_F(gates, one_stream_does_not_wait_at_the_gate_of_another) {
  engine_stream held{gpus};
  engine_stream other{gpus, 1};
  const auto gate = here->hold(held.name()).value();
  const auto its = here->hold(other.name()).value();
  held.work();
  other.work();
  ASSERT_TRUE(stand(2));
  its->open();
  EXPECT_TRUE(comes_true([&] { return other.done() == 1; }));
  EXPECT_EQ(held.done(), 0);
}

TEST_F(gates, a_gate_is_opened_by_the_end_of_its_last_owner) {
  engine_stream stream{gpus};
  auto gate = here->hold(stream.name()).value();
  auto another = gate;
  stream.work();
  ASSERT_TRUE(stand(1));
  gate.reset();
  EXPECT_EQ(stream.done(), 0);
  another.reset();
  EXPECT_TRUE(comes_true([&] { return stream.done() == 1; }));
}

TEST_F(gates, all_are_opened_when_the_endpoint_stops_and_no_stream_is_held_afterwards) {
  engine_stream one{gpus};
  engine_stream two{gpus, 1};
  const auto first = here->hold(one.name()).value();
  const auto second = here->hold(two.name()).value();
  one.work();
  two.work();
  ASSERT_TRUE(stand(2));
  here->stop();
  EXPECT_TRUE(comes_true([&] { return one.done() == 1 && two.done() == 1; }));
  EXPECT_EQ(refusal(one.name()), errc::aborted);
  one.work();
  EXPECT_TRUE(comes_true([&] { return one.done() == 2; })) << "a refusal holds nobody";
}

TEST_F(gates, the_end_of_the_endpoint_opens_them_and_leaves_the_words_to_late_streams) {
  slow_kernels kernels{gpus};
  engine_stream stream{gpus};
  kernels.launch();
  const auto ended = kernels.mark();
  ASSERT_TRUE(gpus.wait_for(stream.stream(), ended.handle));
  const auto gate = here->hold(stream.name()).value();
  stream.work();
  here.reset();
  kernels.finish(0);  // only now it reads the word
  EXPECT_TRUE(comes_true([&] { return stream.done() == 1; }));
  gate->open();
  gpus.release_event(ended);
}

TEST_F(gates, words_are_used_again_as_soon_as_their_gate_is_open) {
  engine_stream stream{gpus};
  for (int i = 0; i < 1000; ++i) {
    const auto gate = here->hold(stream.name()).value();
    stream.work();
    gate->open();
  }
  EXPECT_TRUE(comes_true([&] { return stream.done() == 1000; }));
  EXPECT_LE(site->gates.made(), 8u);
}

TEST_F(gates, a_stream_that_comes_late_passes_a_word_at_which_another_one_is_held_by_then) {
  slow_kernels kernels{gpus};
  engine_stream late{gpus};
  engine_stream next{gpus};
  kernels.launch();
  const auto ended = kernels.mark();
  ASSERT_TRUE(gpus.wait_for(late.stream(), ended.handle));
  std::vector<std::shared_ptr<stream_gate>> before;
  for (int i = 0; i < 8; ++i) before.push_back(here->hold(late.name()).value());
  late.work();
  for (const auto& gate : before) gate->open();
  std::vector<std::shared_ptr<stream_gate>> shut;
  for (int i = 0; i < 8; ++i) shut.push_back(here->hold(next.name()).value());
  next.work();
  ASSERT_EQ(site->gates.made(), 8u) << "they are the same words";
  ASSERT_TRUE(stand(1));
  kernels.finish(0);
  EXPECT_TRUE(comes_true([&] { return late.done() == 1; }));
  EXPECT_EQ(next.done(), 0);
  for (const auto& gate : shut) gate->open();
  EXPECT_TRUE(comes_true([&] { return next.done() == 1; }));
  gpus.release_event(ended);
}

TEST_F(gates, a_word_that_has_risen_to_its_end_is_used_no_more) {
  gate_words words{gpus};
  const auto word = words.take(0, nullptr).value();
  words.give_back({word.word, gate_words::last_value});
  for (int i = 0; i < 20; ++i) EXPECT_NE(words.take(0, nullptr).value().word.host, word.word.host);
}

TEST_F(gates, threads_that_hold_and_open_at_once_leave_no_stream_behind) {
  constexpr int threads = 4;
  constexpr int each = 200;
  std::vector<std::unique_ptr<engine_stream>> streams;
  for (int i = 0; i < threads; ++i) streams.push_back(std::make_unique<engine_stream>(gpus));
  std::vector<std::thread> all;
  for (int i = 0; i < threads; ++i) {
    all.emplace_back([&, i] {
      std::mt19937 random{static_cast<unsigned>(i)};
      std::vector<std::shared_ptr<stream_gate>> shut;
      auto& stream = *streams[static_cast<std::size_t>(i)];
      for (int n = 0; n < each; ++n) {
        if (auto gate = here->hold(stream.name())) shut.push_back(std::move(*gate));
        stream.work();
        if (random() % 3 != 0) continue;
        std::shuffle(shut.begin(), shut.end(), random);
        shut.pop_back();
      }
    });
  }
  for (auto& thread : all) thread.join();
  for (const auto& stream : streams) {
    EXPECT_TRUE(comes_true([&] { return stream->done() == each; })) << stream->done();
  }
}

TEST_F(gates, too_many_are_refused_until_one_is_opened) {
  engine_stream stream{gpus};
  std::vector<std::shared_ptr<stream_gate>> shut;
  for (std::size_t i = 0; i < gate_words::per_gpu; ++i) {
    shut.push_back(here->hold(stream.name()).value());
  }
  EXPECT_EQ(refusal(stream.name()), errc::overloaded);
  shut.pop_back();
  EXPECT_TRUE(here->hold(stream.name()));
}

TEST_F(gates, half_of_the_queues_of_a_gpu_are_left_to_copies) {
  std::vector<std::unique_ptr<engine_stream>> streams;
  std::vector<std::shared_ptr<stream_gate>> shut;
  for (std::uint32_t i = 0; i < gpus.devices()[0].queues / 2; ++i) {
    streams.push_back(std::make_unique<engine_stream>(gpus));
    shut.push_back(here->hold(streams.back()->name()).value());
  }
  engine_stream more{gpus};
  EXPECT_EQ(refusal(more.name()), errc::overloaded);
  engine_stream elsewhere{gpus, 1};
  EXPECT_TRUE(here->hold(elsewhere.name())) << "another GPU has its own";
  shut.push_back(here->hold(streams.front()->name()).value());  // it is already held
  shut.front()->open();
  EXPECT_EQ(refusal(more.name()), errc::overloaded) << "held at another gate";
  shut.back()->open();
  EXPECT_TRUE(here->hold(more.name()));
  more.work();
  EXPECT_TRUE(comes_true([&] { return more.done() == 1; }));
}

/// A GPU with so many queues.
class narrow_double final : public gpu_double {
 public:
  explicit narrow_double(std::uint32_t queues) : devices_{gpu_double::devices()} {
    for (auto& each : devices_) each.queues = queues;
  }
  [[nodiscard]] const std::vector<gpu_device>& devices() const override { return devices_; }

 private:
  std::vector<gpu_device> devices_;
};

TEST(queues_of_a_gpu, that_are_few_hold_no_stream) {
  for (const std::uint32_t queues : {1U, 2U, 3U, 4U}) {
    gpu_site site{std::make_unique<narrow_double>(queues)};
    const auto first = site.gates.take(0, &site);
    ASSERT_EQ(first.has_value(), queues == 4) << queues;
    if (!first) {
      EXPECT_EQ(first.error().code, errc::backend_unavailable);
      EXPECT_NE(first.error().message.find("CUDA_DEVICE_MAX_CONNECTIONS"), std::string::npos);
    }
  }
}

TEST_F(gates, what_cannot_be_held_is_refused_with_the_reason) {
  engine_stream stream{gpus};
  EXPECT_EQ(refusal({stream.name().handle, 9}), errc::invalid_config);
  EXPECT_EQ(refusal({stream.name().handle, 1}), errc::invalid_config) << "of another GPU";
  int none = 0;
  EXPECT_EQ(refusal({&none, 0}), errc::invalid_config);
  stream.work();
  EXPECT_TRUE(comes_true([&] { return stream.done() == 1; }));
  gpus.lose();
  EXPECT_EQ(refusal(stream.name()), errc::no_device);
}

TEST_F(gates, a_driver_without_such_waits_is_said_to_have_none) {
  engine_stream stream{gpus};
  gpus.never_waits();
  EXPECT_EQ(refusal(stream.name()), errc::backend_unavailable);
}

TEST(gates_without_gpus, are_refused) {
  if (gpu_site::of_process()->runtime->state().usable) GTEST_SKIP() << "GPUs are built in";
  endpoint_options options;
  options.self = incarnation{7};
  const auto here = endpoint::create(std::move(options)).value();
  const auto gate = here->hold({nullptr, 0});
  ASSERT_FALSE(gate);
  EXPECT_EQ(gate.error().code, errc::no_device);
}

TEST(compute_on_a_real_gpu, a_stream_is_held_while_copies_of_ours_go_on) {
  if (!on_real_gpus()) GTEST_SKIP() << "TROUPE_TEST_GPU=1 takes the GPUs of this machine";
  endpoint_options options;
  options.self = incarnation{7};
  const auto here = endpoint::create(std::move(options)).value();
  auto& gpus = *gpu_site::of_process()->runtime;
  engine_stream engine{gpus};
  engine_stream ours{gpus};
  const auto gate = here->hold(engine.name());
  ASSERT_TRUE(gate) << to_string(gate.error());
  engine.work();
  // Launches a kernel for the first time, and uses the copy engine, from memory that is pinned now.
  // Neither may wait for the held stream, which waits for them.
  const auto from = gpus.allocate_pinned(0, 1 << 20).value();
  auto* const to = gpus.allocate(0, 1 << 20).value();
  std::fill_n(from.host, from.size, std::byte{7});
  const auto item = make_run_item(from.device_address, reinterpret_cast<std::uint64_t>(to), 64);
  copy_launch launch;
  launch.way = copy_way::vector;
  launch.count = 1;
  launch.blocks = 1;
  launch.here = &item;
  const auto launched = gpus.launch(ours.stream(), launch);
  ASSERT_TRUE(launched) << to_string(launched.error());
  ASSERT_TRUE(gpus.copy(ours.stream(), reinterpret_cast<std::uint64_t>(to) + 4096,
                        from.device_address, 65536));
  ours.work();
  EXPECT_TRUE(comes_true([&] { return ours.done() == 1; }));
  EXPECT_EQ(engine.done(), 0);
  (*gate)->open();
  EXPECT_TRUE(comes_true([&] { return engine.done() == 1; }));
  std::vector<std::byte> seen(4096 + 65536);
  ASSERT_TRUE(gpus.copy_now(seen.data(), to, seen.size()));
  EXPECT_EQ(std::count(seen.begin(), seen.begin() + 64, std::byte{7}), 64);
  EXPECT_EQ(std::count(seen.begin() + 4096, seen.end(), std::byte{7}), 65536);
  gpus.release(0, to);
  gpus.release_pinned(from);
  // Uses the same words many times.
  for (int i = 2; i <= 2000; ++i) {
    const auto next = here->hold(engine.name());
    ASSERT_TRUE(next) << to_string(next.error());
    engine.work();
    EXPECT_LT(engine.done(), i);
    (*next)->open();
    ASSERT_TRUE(comes_true([&] { return engine.done() == i; })) << i;
  }
}

}  // namespace
}  // namespace troupe::transport::xgmi
