#include <cstring>
#include <ostream>

#include <gmock/gmock.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "gpu_nodes.hpp"
#include "memory_reach.hpp"

// GPU memory by way of chunks on the host: what the backends that use it have in common, on GPU
// doubles. The promises of every link are tested in tests/transport/contract.
namespace troupe::transport::contract {
namespace {

using xgmi::gpu_double;
using namespace std::chrono_literals;
using ::testing::HasSubstr;

constexpr std::uint64_t mib = std::uint64_t{1} << 20;
constexpr segment all{0, 0, mib, 0, 0, 1};

struct joined_by {
  backend_kind kind;
  std::uint32_t lanes;

  friend std::ostream& operator<<(std::ostream& out, const joined_by& by) {
    return out << to_string(by.kind) << ", lanes " << by.lanes;
  }
};

struct two_nodes : gpu_nodes {
  explicit two_nodes(const joined_by& by, std::uint32_t workers = 0)
      : gpu_nodes{by.kind, by.lanes, workers} {}
};

std::uint64_t copies_of(const gpu_double& gpus) {
  return gpus.launches() + gpus.engine_copies();
}

class by_way_of_the_host : public ::testing::TestWithParam<joined_by> {};

}  // namespace

TEST_P(by_way_of_the_host, a_transfer_far_larger_than_its_chunks_goes_through_them_every_way) {
  for (const auto on_gpus : two_nodes::every_way) {
    two_nodes n{GetParam()};
    constexpr std::uint64_t size = 40 * mib;
    n.allocate(on_gpus, size);
    const auto given = two_nodes::grant(n.b);
    // One run, unaligned at both ends, and rows longer than a chunk.
    const std::vector<segment> long_run{{3, 1, size - 77, 0, 0, 1}};
    const std::vector<segment> rows{{0, 5, 300'001, 300'001, 300'100, 100}};
    for (const auto* segments : {&long_run, &rows}) {
      for (const auto dir : {direction::write, direction::read}) {
        fill(n.a.memory, 1);
        fill(n.b.memory, 2);
        const auto done = n.run(n.a, n.work(dir, {{n.a.region, given, *segments}}));
        ASSERT_FALSE(done.failure) << to_string(*done.failure);
        EXPECT_EQ(done.bytes, total_bytes(*segments));
        const bool writes = dir == direction::write;
        expect_moved(writes ? n.a.memory : n.b.memory, writes ? n.b.memory : n.a.memory, *segments,
                     dir);
      }
    }
    // Each lane has chunks for sending and for receiving, and tables with them.
    EXPECT_LE(n.gpus_a->pinned_now(), 16 * mib * GetParam().lanes);
  }
}

TEST_P(by_way_of_the_host, a_batch_may_hold_memory_of_the_host_and_of_several_gpus_on_both_sides) {
  const auto why = testing::why_memory_is_out_of_reach();
  if (why && GetParam().kind == backend_kind::shm) GTEST_SKIP() << *why;
  for (const auto dir : {direction::write, direction::read}) {
    two_nodes n{GetParam()};
    std::vector<std::byte> engines(8 * mib);
    std::vector<std::shared_ptr<const remote_grant>> given;
    std::vector<std::span<std::byte>> there;
    two_nodes::gpu_memory(n.b, 8 * mib);
    given.push_back(two_nodes::grant(n.b));
    there.push_back(n.b.memory);
    two_nodes::host_memory(n.b, 8 * mib);
    given.push_back(two_nodes::grant(n.b));
    there.push_back(n.b.memory);
    n.b.region = n.b.place->register_memory(engines, "engine").value();
    n.b.memory = engines;
    given.push_back(two_nodes::grant(n.b));
    there.emplace_back(engines);
    for (std::uint32_t i = 0; i < 3; ++i) fill(there[i], 90 + i);
    std::vector<piece> pieces;
    std::vector<std::span<std::byte>> here;
    for (std::uint32_t i = 0; i < 9; ++i) {
      const auto region = i % 3 == 0 ? n.a.place->allocate(mib, "host").value()
                                     : n.a.place->allocate_on_gpu(i % 3 - 1, mib, "gpu").value();
      here.push_back(n.a.place->bytes(region).value());
      fill(here.back(), i);
      pieces.push_back({region, given[i / 3], {{i, i % 3 * mib, 300'003, 0, 0, 1}}});
    }
    const auto done = n.run(n.a, n.work(dir, pieces));
    ASSERT_FALSE(done.failure) << to_string(*done.failure);
    for (std::size_t i = 0; i < here.size(); ++i) {
      const bool writes = dir == direction::write;
      expect_moved(writes ? here[i] : there[i / 3], writes ? there[i / 3] : here[i],
                   pieces[i].segments, dir);
    }
  }
}

TEST_P(by_way_of_the_host, batches_in_flight_both_ways_wait_for_chunks_and_all_arrive) {
  for (const auto on_gpus : two_nodes::every_way) {
    two_nodes n{GetParam(), 1};
    n.allocate(on_gpus, 16 * mib);
    for (const auto* e : {&n.a, &n.b}) fill(e->memory, 3);
    const auto to_b = two_nodes::grant(n.b);
    const auto to_a = two_nodes::grant(n.a, transfer_id{2});
    constexpr std::uint64_t batches = 150;
    n.gpus_a->hold(true);  // so that they pile up
    for (std::uint64_t i = 0; i < batches; ++i) {
      const auto dir = i % 2 == 0 ? direction::write : direction::read;
      const segment s{(i % 8) * mib + i, (8 + i % 8) * mib, 10'000 + 997 * i, 0, 0, 1};
      ASSERT_TRUE(n.a.wire->post(n.work(dir, {{n.a.region, to_b, {s}}})));
      ASSERT_TRUE(n.b.wire->post(n.work(dir, {{n.b.region, to_a, {s}}})));
    }
    n.gpus_a->hold(false);
    ASSERT_TRUE(n.until(
        [&] { return n.a.sink->completed() == batches && n.b.sink->completed() == batches; }));
    for (const auto* e : {&n.a, &n.b}) {
      for (const auto& done : e->sink->completions) {
        EXPECT_FALSE(done.failure) << to_string(*done.failure);
      }
    }
  }
}

TEST_P(by_way_of_the_host, a_frame_is_delivered_and_a_batch_completes_when_the_gpu_has_the_bytes) {
  two_nodes n{GetParam()};
  fill(two_nodes::host_memory(n.a, mib), 1);
  const auto there = two_nodes::gpu_memory(n.b, mib);
  auto work = n.work(direction::write, {{n.a.region, two_nodes::grant(n.b), {all}}});
  work.frame.assign(5, std::byte{'f'});
  bool landed = false;
  n.b.sink->when_frame = [&](const std::string&) {
    landed = std::memcmp(n.a.memory.data(), there.data(), mib) == 0;
  };
  n.gpus_b->hold(true);
  ASSERT_TRUE(n.a.wire->post(work));
  ASSERT_TRUE(n.until([&] { return copies_of(*n.gpus_b) == GetParam().lanes; }));
  n.drive_for(30ms);
  EXPECT_EQ(n.b.sink->framed(), 0U);
  EXPECT_EQ(n.a.sink->completed(), 0U);
  n.gpus_b->hold(false);
  ASSERT_TRUE(n.until([&] { return n.a.sink->completed() == 1 && n.b.sink->framed() == 1; }));
  EXPECT_FALSE(n.a.sink->completions[0].failure);
  EXPECT_TRUE(landed);
}

TEST_P(by_way_of_the_host, a_fence_is_pending_while_a_gpu_touches_the_memory_at_either_end) {
  for (const auto dir : {direction::write, direction::read}) {
    for (const bool at_target : {false, true}) {
      two_nodes n{GetParam()};
      // More than fits into the chunks of all lanes. What already has a chunk may still arrive
      // whole.
      constexpr std::uint64_t size = 16 * mib;
      two_nodes::gpu_memory(n.a, size);
      two_nodes::gpu_memory(n.b, size);
      auto& fenced = at_target ? n.b : n.a;
      auto* gpus = at_target ? n.gpus_b : n.gpus_a;
      gpus->hold(true);
      ASSERT_TRUE(n.a.wire->post(
          n.work(dir, {{n.a.region, two_nodes::grant(n.b), {{0, 0, size, 0, 0, 1}}}})));
      ASSERT_TRUE(n.until([&] { return copies_of(*gpus) > 0; }));
      EXPECT_EQ(fenced.wire->fence(t1), fence_state::pending);
      EXPECT_EQ(fenced.wire->fence(t1), fence_state::pending);
      n.drive_for(20ms);
      EXPECT_FALSE(fenced.sink->is_quiescent(t1));
      EXPECT_FALSE(fenced.place->deregister(fenced.region)) << "a GPU works on it";
      gpus->hold(false);
      ASSERT_TRUE(n.until([&] { return fenced.sink->is_quiescent(t1); }));
      EXPECT_TRUE(fenced.place->deregister(fenced.region));
      ASSERT_TRUE(n.until([&] { return n.a.sink->completed() == 1; }));
      EXPECT_TRUE(n.a.sink->completions[0].failure);
      EXPECT_EQ(n.a.sink->completions[0].bad_segments, std::vector{0U});
      EXPECT_FALSE(n.a.sink->is_broken() || n.b.sink->is_broken());
    }
  }
}

TEST_P(by_way_of_the_host,
       a_gpu_that_is_lost_under_a_batch_fails_it_at_either_end_and_the_link_goes_on) {
  for (const auto dir : {direction::write, direction::read}) {
    for (const bool at_target : {false, true}) {
      two_nodes n{GetParam()};
      two_nodes::gpu_memory(n.a, 8 * mib);
      two_nodes::gpu_memory(n.b, 8 * mib);
      auto* gpus = at_target ? n.gpus_b : n.gpus_a;
      gpus->hold(true);
      for (int i = 0; i < 3; ++i) {
        ASSERT_TRUE(n.a.wire->post(
            n.work(dir, {{n.a.region, two_nodes::grant(n.b), {{0, 0, 8 * mib, 0, 0, 1}}}})));
      }
      ASSERT_TRUE(n.until([&] { return copies_of(*gpus) > 0; }));
      gpus->lose();
      gpus->hold(false);
      ASSERT_TRUE(n.until([&] { return n.a.sink->completed() == 3; }));
      for (const auto& done : n.a.sink->completions) {
        ASSERT_TRUE(done.failure);
        EXPECT_EQ(done.failure->code, errc::backend_unavailable) << to_string(*done.failure);
        EXPECT_THAT(done.failure->message, HasSubstr("GPU 0000:0a:00.0")) << "which one";
        EXPECT_EQ(done.bytes, 0U);
        EXPECT_EQ(done.bad_segments, std::vector{0U});
      }
      if (GetParam().kind == backend_kind::tcp) {  // no other work is in flight
        EXPECT_EQ(n.a.wire->fence(t1), fence_state::quiescent);
        EXPECT_EQ(n.b.wire->fence(t1), fence_state::quiescent);
      }
      EXPECT_TRUE(n.fenced(n.a) && n.fenced(n.b));
      // Memory of the host is not affected.
      fill(two_nodes::host_memory(n.a, mib), 1);
      const auto there = two_nodes::host_memory(n.b, mib);
      const auto good = two_nodes::grant(n.b, transfer_id{2});
      const auto done = n.run(n.a, n.work(direction::write, {{n.a.region, good, {all}}}));
      EXPECT_FALSE(done.failure) << to_string(*done.failure);
      EXPECT_EQ(std::memcmp(n.a.memory.data(), there.data(), mib), 0);
      EXPECT_FALSE(n.a.sink->is_broken() || n.b.sink->is_broken());
    }
  }
}

namespace {

/// Drives one end, which may sleep. Returns the number of its rounds.
std::uint64_t rounds_of(end& e, std::chrono::milliseconds time) {
  const int nothing = ::eventfd(0, EFD_CLOEXEC);
  std::uint64_t rounds = 0;
  EXPECT_TRUE(e.place->drive(clock::now() + time, nothing, [&] {
    ++rounds;
    return false;
  }));
  ::close(nothing);
  return rounds;
}

}  // namespace

TEST_P(by_way_of_the_host, who_makes_progress_sleeps_while_a_gpu_takes_long) {
  for (const auto dir : {direction::write, direction::read}) {
    for (const bool at_target : {false, true}) {
      two_nodes n{GetParam()};
      two_nodes::gpu_memory(n.a, mib);
      two_nodes::gpu_memory(n.b, mib);
      auto* gpus = at_target ? n.gpus_b : n.gpus_a;
      gpus->hold(true);
      ASSERT_TRUE(n.a.wire->post(n.work(dir, {{n.a.region, two_nodes::grant(n.b), {all}}})));
      ASSERT_TRUE(n.until([&] { return copies_of(*gpus) > 0; }));
      // It polls for 250 us after work; polling all the time would take hundreds of thousands of
      // rounds.
      EXPECT_LT(rounds_of(at_target ? n.b : n.a, 150ms), 10'000U);
      gpus->hold(false);
      ASSERT_TRUE(n.until([&] { return n.a.sink->completed() == 1; }));
      EXPECT_FALSE(n.a.sink->completions[0].failure);
    }
  }
}

TEST_P(by_way_of_the_host, a_gpu_that_is_lost_while_everybody_sleeps_is_noticed_all_the_same) {
  for (const auto dir : {direction::write, direction::read}) {
    for (const bool at_target : {false, true}) {
      two_nodes n{GetParam(), 1};
      two_nodes::gpu_memory(n.a, mib);
      two_nodes::gpu_memory(n.b, mib);
      auto* gpus = at_target ? n.gpus_b : n.gpus_a;
      gpus->hold(true);
      ASSERT_TRUE(n.a.wire->post(n.work(dir, {{n.a.region, two_nodes::grant(n.b), {all}}})));
      ASSERT_TRUE(n.until([&] { return copies_of(*gpus) > 0; }));
      std::this_thread::sleep_for(20ms);
      gpus->lose();  // a lost GPU rings nobody
      ASSERT_TRUE(n.until([&] { return n.a.sink->completed() == 1; }));
      const auto done = n.a.sink->outcome_of(1);
      ASSERT_TRUE(done.failure);
      EXPECT_EQ(done.failure->code, errc::backend_unavailable) << to_string(*done.failure);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(every, by_way_of_the_host,
                         ::testing::Values(joined_by{backend_kind::shm, 1},
                                           joined_by{backend_kind::tcp, 1},
                                           joined_by{backend_kind::tcp, 4}),
                         [](const auto& named) {
                           return std::string{to_string(named.param.kind)} + "_lanes" +
                                  std::to_string(named.param.lanes);
                         });

}  // namespace troupe::transport::contract
