#include <cstring>

#include <gmock/gmock.h>

#include "troupe/transport/shm/chunk_memory.hpp"

#include "gpu_nodes.hpp"

// GPU memory by way of chunks that both processes map, on GPU doubles: what is specific to shm. The
// promises of every link are tested in tests/transport/contract; what a peer may write into the
// chunks in chunk_hostile_test.cpp.
namespace troupe::transport::shm {
namespace {

using contract::end;
using contract::t1;
using xgmi::gpu_double;
using namespace std::chrono_literals;
using ::testing::HasSubstr;

constexpr std::uint64_t mib = std::uint64_t{1} << 20;
constexpr segment all{0, 0, mib, 0, 0, 1};

struct two_nodes : contract::gpu_nodes {
  explicit two_nodes(std::uint32_t workers = 0) : gpu_nodes{backend_kind::shm, 1, workers} {}
};

std::uint64_t copies_of(const gpu_double& gpus) {
  return gpus.launches() + gpus.engine_copies();
}

}  // namespace

TEST(shm_gpu, scattered_blocks_cross_the_bus_with_one_launch_per_chunk_and_long_runs_with_none) {
  two_nodes n;
  const auto here = two_nodes::gpu_memory(n.a, 8 * mib);
  const auto there = two_nodes::gpu_memory(n.b, 8 * mib);
  contract::fill(here, 1);
  std::vector<segment> blocks;
  for (std::uint64_t i = 0; i < 1024; ++i) {
    blocks.push_back({i * 8192, (1023 - i) * 8192, 4096, 0, 0, 1});
  }
  const auto given = two_nodes::grant(n.b);
  ASSERT_FALSE(n.run(n.a, n.work(direction::write, {{n.a.region, given, blocks}})).failure);
  contract::expect_moved(here, there, blocks, direction::write);
  for (const auto* gpus : {n.gpus_a, n.gpus_b}) {
    EXPECT_EQ(gpus->launches(), 4U) << "4 MiB are four chunks";
    EXPECT_EQ(gpus->engine_copies(), 0U);
  }
  const std::vector<segment> whole{{0, 0, 4 * mib, 0, 0, 1}};
  ASSERT_FALSE(n.run(n.a, n.work(direction::write, {{n.a.region, given, whole}})).failure);
  for (const auto* gpus : {n.gpus_a, n.gpus_b}) {
    EXPECT_EQ(gpus->launches(), 4U);
    EXPECT_EQ(gpus->engine_copies(), 4U) << "long runs are the copy engine's";
  }
}

TEST(shm_gpu, blocks_of_a_few_bytes_and_gaps_between_them_arrive) {
  for (const auto on_gpus : two_nodes::every_way) {
    for (const auto dir : {direction::write, direction::read}) {
      two_nodes n;
      n.allocate(on_gpus, 4 * mib);
      contract::fill(n.a.memory, 1);
      contract::fill(n.b.memory, 2);
      std::vector<segment> blocks;  // more runs than a request has
      for (std::uint64_t i = 0; i < 5000; ++i) {
        blocks.push_back({i * 64 + 1, (4999 - i) * 64, 33, 0, 0, 1});
      }
      blocks.push_back({3 * mib, 3 * mib, 0, 0, 0, 1});
      blocks.push_back({2 * mib, mib, 7, 11, 13, 9000});
      const auto done = n.run(n.a, n.work(dir, {{n.a.region, two_nodes::grant(n.b), blocks}}));
      ASSERT_FALSE(done.failure) << to_string(*done.failure);
      EXPECT_EQ(done.bytes, total_bytes(blocks));
      const bool writes = dir == direction::write;
      contract::expect_moved(writes ? n.a.memory : n.b.memory, writes ? n.b.memory : n.a.memory,
                             blocks, dir);
    }
  }
}

TEST(shm_gpu, no_more_is_under_way_than_there_are_chunks) {
  for (const auto dir : {direction::write, direction::read}) {
    two_nodes n;
    two_nodes::gpu_memory(n.a, 32 * mib);
    two_nodes::gpu_memory(n.b, 32 * mib);
    auto* const first = dir == direction::write ? n.gpus_a : n.gpus_b;
    first->hold(true);
    const auto given = two_nodes::grant(n.b);
    for (int i = 0; i < 4; ++i) {
      ASSERT_TRUE(n.a.wire->post(n.work(dir, {{n.a.region, given, {{0, 0, 32 * mib, 0, 0, 1}}}})));
    }
    ASSERT_TRUE(n.until([&] { return copies_of(*first) == chunk_count; }));
    n.drive_for(5ms);
    EXPECT_EQ(copies_of(*first), chunk_count);
    // Tables of the GPU's copies, and our chunks; also the peer's chunks where the peer copies for
    // us.
    EXPECT_LE(n.gpus_a->pinned_now(), 16 * mib);
    first->hold(false);
    ASSERT_TRUE(n.until([&] { return n.a.sink->completed() == 4; }));
    EXPECT_EQ(copies_of(*first), 4U * 32U);
  }
}

TEST(shm_gpu, a_fence_does_not_wait_for_a_peer_that_answers_nothing) {
  for (const auto dir : {direction::write, direction::read}) {
    two_nodes n;
    two_nodes::gpu_memory(n.a, 32 * mib);
    const auto there = two_nodes::gpu_memory(n.b, 32 * mib);
    std::memset(there.data(), 0x77, there.size());
    const auto given = two_nodes::grant(n.b);
    ASSERT_TRUE(n.a.wire->post(n.work(dir, {{n.a.region, given, {{0, 0, 32 * mib, 0, 0, 1}}}})));
    // Drives only our side, until it can go no further.
    const auto asked = [&] {
      for (int i = 0; i < 200; ++i) n.a.place->poll();
      std::this_thread::sleep_for(100us);
      return dir == direction::read || copies_of(*n.gpus_a) == chunk_count;
    };
    const auto last = testing::end_of_wait();
    while (!asked()) ASSERT_LT(contract::clock::now(), last);
    while (n.a.wire->fence(t1) == fence_state::pending && !n.a.sink->is_quiescent(t1)) {
      ASSERT_LT(contract::clock::now(), last) << "it waits for the peer";
      n.a.place->poll();
    }
    EXPECT_EQ(n.a.sink->completed(), 1U);
    EXPECT_TRUE(n.a.place->deregister(n.a.region));
    // The peer wakes after its grant was withdrawn.
    ASSERT_TRUE(n.fenced(n.b));
    std::memset(there.data(), 0x55, there.size());
    n.drive_for(20ms);
    EXPECT_TRUE(contract::all_are(there, std::byte{0x55}));
    // All chunks are usable again.
    two_nodes::gpu_memory(n.a, 32 * mib);
    const auto good = two_nodes::grant(n.b, transfer_id{2});
    const auto done = n.run(n.a, n.work(dir, {{n.a.region, good, {{0, 0, 32 * mib, 0, 0, 1}}}}));
    EXPECT_FALSE(done.failure) << to_string(*done.failure);
  }
}

TEST(shm_gpu, a_fence_of_a_link_that_has_ended_waits_for_its_copies_too) {
  for (const bool at_target : {false, true}) {
    for (const bool closes : {false, true}) {
      SCOPED_TRACE(std::string{at_target ? "target" : "initiator"} +
                   (closes ? ", closed here" : ", closed there"));
      two_nodes n;
      two_nodes::gpu_memory(n.a, 2 * mib);
      two_nodes::gpu_memory(n.b, 2 * mib);
      auto& fenced = at_target ? n.b : n.a;
      auto* gpus = at_target ? n.gpus_b : n.gpus_a;
      gpus->hold(true);
      ASSERT_TRUE(n.a.wire->post(n.work(
          direction::write, {{n.a.region, two_nodes::grant(n.b), {{0, 0, 2 * mib, 0, 0, 1}}}})));
      ASSERT_TRUE(n.until([&] { return copies_of(*gpus) > 0; }));
      (closes ? fenced : at_target ? n.a : n.b).wire->close();
      EXPECT_EQ(fenced.wire->fence(t1), fence_state::pending);
      n.drive_for(20ms);
      EXPECT_FALSE(fenced.sink->is_quiescent(t1));
      EXPECT_FALSE(fenced.place->deregister(fenced.region));
      gpus->hold(false);
      ASSERT_TRUE(n.until([&] { return fenced.sink->is_quiescent(t1); }));
      EXPECT_TRUE(fenced.place->deregister(fenced.region));
      EXPECT_EQ(fenced.wire->fence(t1), fence_state::quiescent);
      ASSERT_TRUE(closes || n.until([&] { return fenced.sink->is_broken(); }));
      ASSERT_TRUE(n.until([&] { return n.a.sink->completed() == 1; }));
    }
  }
}

TEST(shm_gpu, the_chunks_of_a_link_go_with_it) {
  two_nodes n;
  two_nodes::gpu_memory(n.a, 8 * mib);
  two_nodes::gpu_memory(n.b, 8 * mib);
  std::uint64_t pinned = 0;
  std::vector<std::shared_ptr<link>> kept;  // a careless owner keeps its links
  for (int round = 0; round < 12; ++round) {
    const auto given = two_nodes::grant(n.b);
    for (const auto dir : {direction::write, direction::read, direction::write}) {
      ASSERT_TRUE(n.a.wire->post(n.work(dir, {{n.a.region, given, {{0, 0, 8 * mib, 0, 0, 1}}}})));
    }
    n.drive_for(2ms);
    n.a.wire->close();
    ASSERT_TRUE(n.until([&] { return n.b.sink->is_broken(); }));
    for (auto* e : {&n.a, &n.b}) {
      ASSERT_TRUE(n.fenced(*e));
      kept.push_back(e->wire);
    }
    // Waits for the last copies to end.
    const auto left = [&] { return n.gpus_a->pinned_now() + n.gpus_b->pinned_now(); };
    if (round == 0) {
      n.drive_for(100ms);
      pinned = left();
    }
    ASSERT_TRUE(n.until([&] { return left() <= pinned; })) << left() << " of " << pinned;
    n.join();
  }
  n.a.sink->forget();
  const auto done =
      n.run(n.a, n.work(direction::write, {{n.a.region, two_nodes::grant(n.b), {all}}}));
  EXPECT_FALSE(done.failure);
  for (const auto& one : kept) one->close();
}

TEST(shm_gpu, memory_that_cannot_be_pinned_is_said_at_either_end) {
  two_nodes n;
  two_nodes::gpu_memory(n.a, mib);
  two_nodes::gpu_memory(n.b, mib);
  n.gpus_b->pin_at_most(0);
  const auto refused = n.b.wire->grant(n.b.region, {{0, mib, 0, 1}}, access::write, t1);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, errc::pool_exhausted) << to_string(refused.error());
  // Enough for the tables of the GPU's copies, and for no chunks.
  for (auto* gpus : {n.gpus_a, n.gpus_b}) gpus->pin_at_most(8 * mib - 1);
  const auto given = two_nodes::grant(n.b);
  const auto posted = n.a.wire->post(n.work(direction::write, {{n.a.region, given, {all}}}));
  ASSERT_FALSE(posted);
  EXPECT_EQ(posted.error().code, errc::pool_exhausted) << to_string(posted.error());
  n.gpus_a->pin_at_most(64 * mib);
  const auto done = n.run(n.a, n.work(direction::write, {{n.a.region, given, {all}}}));
  ASSERT_TRUE(done.failure);
  EXPECT_EQ(done.failure->code, errc::pool_exhausted) << to_string(*done.failure);
  n.gpus_b->pin_at_most(64 * mib);
  EXPECT_FALSE(n.run(n.a, n.work(direction::write, {{n.a.region, given, {all}}})).failure);
}

TEST(shm_gpu, a_process_without_gpus_writes_into_and_reads_from_those_of_another) {
  contract::two_ends n{1};
  auto* gpus = new gpu_double;
  n.make(n.a, incarnation{1}, {.site = std::make_shared<xgmi::gpu_site>(xgmi::make_gpu_runtime())});
  n.make(n.b, incarnation{2},
         {.site = std::make_shared<xgmi::gpu_site>(std::unique_ptr<xgmi::gpu_runtime>{gpus})});
  link_options with{.role = link_role::initiator, .peer = n.b.self};
  with.connect_timeout = contract::longer_than_any_wait;
  n.a.wire = n.a.place->open(backend_kind::shm, with, n.a.sink).value();
  with.role = link_role::acceptor;
  with.peer = n.a.self;
  n.b.wire = n.b.place->open(backend_kind::shm, with, n.b.sink).value();
  n.connect();
  contract::fill(two_nodes::host_memory(n.a, 4 * mib), 1);
  const auto there = two_nodes::gpu_memory(n.b, 4 * mib);
  const auto given = two_nodes::grant(n.b);
  const segment first{0, 0, 2 * mib, 0, 0, 1};
  ASSERT_FALSE(n.run(n.a, n.work(direction::write, {{n.a.region, given, {first}}})).failure);
  const segment back{2 * mib, 0, 2 * mib, 0, 0, 1};
  ASSERT_FALSE(n.run(n.a, n.work(direction::read, {{n.a.region, given, {back}}})).failure);
  EXPECT_EQ(std::memcmp(n.a.memory.data(), there.data(), 2 * mib), 0);
  EXPECT_EQ(std::memcmp(n.a.memory.data(), n.a.memory.data() + 2 * mib, 2 * mib), 0);
  // The other GPU can also move what the node grants.
  const auto to_us = two_nodes::grant(n.a, transfer_id{2});
  const segment down{2 * mib, mib, mib, 0, 0, 1};
  contract::fill(there, 9);
  ASSERT_FALSE(n.run(n.b, n.work(direction::write, {{n.b.region, to_us, {down}}})).failure);
  EXPECT_EQ(std::memcmp(n.a.memory.data() + mib, there.data() + 2 * mib, mib), 0);
  n.a.wire->close();
  n.b.wire->close();
}

TEST(shm_gpu, a_device_that_is_no_gpu_of_this_process_is_refused_with_what_is_in_the_way) {
  two_nodes n;
  std::vector<std::byte> pages(8192);
  auto* const page = reinterpret_cast<std::byte*>(
      (reinterpret_cast<std::uintptr_t>(pages.data()) + 4095) & ~std::uintptr_t{4095});
  const int none = ::memfd_create("no dma-buf", MFD_CLOEXEC);
  const auto region = n.b.place->register_memory({page, 4096}, "device", {.dmabuf = none}).value();
  ::close(none);
  const auto refused = n.b.wire->grant(region, {{0, 4096, 0, 1}}, access::write, t1);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, errc::backend_unavailable);
  EXPECT_THAT(refused.error().message, HasSubstr("not a GPU of this process"));
  two_nodes::gpu_memory(n.a, 4096);
  const auto given = two_nodes::grant(n.a);
  const auto posted =
      n.b.wire->post(n.work(direction::read, {{region, given, {{0, 0, 4096, 0, 0, 1}}}}));
  ASSERT_FALSE(posted);
  EXPECT_EQ(posted.error().code, errc::backend_unavailable) << to_string(posted.error());
}

}  // namespace troupe::transport::shm
