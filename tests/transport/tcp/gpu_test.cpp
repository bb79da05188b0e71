#include <array>
#include <cstring>
#include <thread>

#include <gmock/gmock.h>
#include <sys/socket.h>
#include <unistd.h>

#include "troupe/transport/owned_fd.hpp"
#include "troupe/transport/tcp/sender.hpp"

#include "fails_with.hpp"
#include "gpu_double.hpp"
#include "gpu_nodes.hpp"
#include "waiting.hpp"

// GPU memory over sockets, on GPU doubles: what is specific to tcp. The promises of every link are
// tested in tests/transport/contract.
namespace troupe::transport::tcp {
namespace {

using contract::end;
using xgmi::copy_way;
using namespace std::chrono_literals;
using ::testing::HasSubstr;
using troupe::testing::fails_with;

constexpr transfer_id t1{0x1111};
constexpr std::uint64_t mib = std::uint64_t{1} << 20;

struct two_nodes : contract::gpu_nodes {
  explicit two_nodes(std::uint32_t lane_count = 1, std::uint32_t workers = 0)
      : gpu_nodes{backend_kind::tcp, lane_count, workers} {}
};

const segment all{0, 0, mib, 0, 0, 1};

}  // namespace

TEST(tcp_gpu, scattered_blocks_cross_the_bus_with_one_launch_per_chunk) {
  two_nodes n;
  const auto here = two_nodes::gpu_memory(n.a, 8 * mib);
  const auto there = two_nodes::gpu_memory(n.b, 8 * mib);
  contract::fill(here, 1);
  std::vector<segment> blocks;
  for (std::uint64_t i = 0; i < 1024; ++i) {
    blocks.push_back({i * 8192, (1023 - i) * 8192, 4096, 0, 0, 1});
  }
  const auto done =
      n.run(n.a, n.work(direction::write, {{n.a.region, two_nodes::grant(n.b), blocks}}));
  ASSERT_FALSE(done.failure);
  contract::expect_moved(here, there, blocks, direction::write);
  EXPECT_EQ(n.gpus_a->launches(), 4U) << "4 MiB are four chunks";
  EXPECT_EQ(n.gpus_a->engine_copies(), 0U);
  // A frame has at most 192 entries: 768 KiB of these segments.
  EXPECT_LE(n.gpus_b->launches(), 8U);
  const auto whole = n.run(
      n.a,
      n.work(direction::write, {{n.a.region, two_nodes::grant(n.b), {{0, 0, 4 * mib, 0, 0, 1}}}}));
  ASSERT_FALSE(whole.failure);
  EXPECT_EQ(n.gpus_a->engine_copies(), 4U) << "long runs are the copy engine's";
  EXPECT_EQ(n.gpus_a->launches(), 4U);
}

// Chunks come back at any time. If later jobs took them all while an earlier one had none, the lane
// would stall: the later jobs wait for the earlier one, which waits for a chunk.
TEST(tcp_gpu, no_job_takes_a_chunk_that_one_before_it_waits_for) {
  const auto pool = std::make_shared<staging::staging_pool>(xgmi::double_site(), xgmi_options{});
  ASSERT_TRUE(pool->prepare(0));
  const auto engine = progress_engine::create({}).value();
  staging::staged_copies copies{pool, *engine};
  const auto quota = std::make_shared<staging::chunk_quota>();
  std::array<int, 2> ends{};
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()), 0);
  const owned_fd ours{ends[0]}, theirs{ends[1]};
  lane_sender sender{ours.get(), 1024, [](bool) {}};
  const std::jthread lends_and_gives_back{[&](const std::stop_token& over) {
    while (!over.stop_requested()) {
      std::uint32_t taken = 0;
      while (taken < staging::chunk_quota::most && quota->take()) ++taken;
      for (; taken > 0; --taken) quota->give_back();
    }
  }};
  constexpr int jobs = 60000;
  constexpr std::uint64_t length = 512;
  std::vector<std::byte> memory(length);
  revocable guard;
  for (int i = 0; i < jobs; ++i) {
    auto job = std::make_shared<outgoing>();
    job->guard = &guard;
    job->runs.push_back({memory.data(), length, 0, 1});
    job->remote.push_back({});
    job->bytes = length;
    job->stage = std::make_unique<outgoing_stage>(copies, quota);
    sender.push_write(std::move(job));
  }
  std::array<std::byte, 65536> sent{};
  EXPECT_TRUE(troupe::testing::comes_true(
      [&] {
        static_cast<void>(copies.look());
        sender.flush();
        while (::recv(theirs.get(), sent.data(), sent.size(), MSG_DONTWAIT) > 0) continue;
        return sender.queued_bytes() == 0;
      },
      0ms))
      << sender.queued_bytes() / length << " jobs stand still";
  sender.stop();
}

TEST(tcp_gpu, a_fence_of_a_link_that_has_ended_waits_for_its_copies_too) {
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
      ASSERT_TRUE(n.until([&] { return gpus->launches() + gpus->engine_copies() > 0; }));
      (closes ? fenced : at_target ? n.a : n.b).wire->close();
      ASSERT_TRUE(closes || n.until([&] { return fenced.sink->is_broken(); }));
      ASSERT_TRUE(n.until([&] { return n.a.sink->completed() == 1; }));
      EXPECT_EQ(fenced.wire->fence(t1), fence_state::pending);
      EXPECT_FALSE(fenced.place->deregister(fenced.region));
      gpus->hold(false);
      ASSERT_TRUE(n.until([&] { return fenced.sink->is_quiescent(t1); }));
      EXPECT_TRUE(fenced.place->deregister(fenced.region));
      EXPECT_EQ(fenced.wire->fence(t1), fence_state::quiescent);
    }
  }
}

// A batch that reads by a standing grant belongs to another transfer than the grant, whose fence
// takes the grant back.
TEST(tcp_gpu, a_standing_grant_is_taken_back_once_the_gpu_has_read_for_the_peer) {
  two_nodes n;
  two_nodes::gpu_memory(n.a, 2 * mib);
  two_nodes::gpu_memory(n.b, 2 * mib);
  const auto given = std::make_shared<const remote_grant>(
      n.b.wire
          ->grant(n.b.region, {{0, 2 * mib, 0, 1}}, access::read, grant_scope::for_all_transfers())
          .value());
  n.gpus_b->hold(true);
  auto reads = n.work(direction::read, {{n.a.region, given, {{0, 0, 2 * mib, 0, 0, 1}}}});
  reads.transfer = t1;
  ASSERT_TRUE(n.a.wire->post(std::move(reads)));
  ASSERT_TRUE(n.until([&] { return n.gpus_b->launches() + n.gpus_b->engine_copies() > 0; }));
  EXPECT_EQ(n.b.wire->revoke(*given), fence_state::pending);
  EXPECT_FALSE(n.b.place->deregister(n.b.region));
  n.gpus_b->hold(false);
  ASSERT_TRUE(n.until([&] { return n.b.sink->is_quiescent(given->transfer); }));
  EXPECT_TRUE(n.b.place->deregister(n.b.region));
  EXPECT_EQ(n.b.wire->revoke(*given), fence_state::quiescent);
}

TEST(tcp_gpu, the_chunks_of_a_link_that_ended_are_used_by_the_next) {
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
      if (e->wire->fence(t1) == fence_state::pending) {
        ASSERT_TRUE(n.until([&] { return e->sink->is_quiescent(t1); }));
      }
      kept.push_back(e->wire);
    }
    if (round == 1) pinned = n.gpus_a->pinned_now();
    n.join();
  }
  EXPECT_EQ(n.gpus_a->pinned_now(), pinned);
  n.a.sink->forget();
  const auto done =
      n.run(n.a, n.work(direction::write, {{n.a.region, two_nodes::grant(n.b), {all}}}));
  EXPECT_FALSE(done.failure);
  for (const auto& one : kept) one->close();
}

TEST(tcp_gpu, what_a_driver_refuses_fails_its_batch_alone_and_only_once_the_gpu_is_done_with_it) {
  using call = xgmi::gpu_double::call;
  for (const auto what : {call::launch, call::copy, call::record, call::query}) {
    for (const auto dir : {direction::write, direction::read}) {
      SCOPED_TRACE(static_cast<int>(what));
      two_nodes n;
      two_nodes::gpu_memory(n.a, mib);
      two_nodes::gpu_memory(n.b, mib);
      const auto given = two_nodes::grant(n.b);
      // Kernels copy the short segments, the copy engine the long one.
      const std::vector<segment> kernels{{0, 0, 4096, 0, 0, 1}, {8192, 8192, 4096, 0, 0, 1}};
      const std::vector<segment> engine{all};
      const auto& segments = what == call::copy ? engine : kernels;
      n.gpus_a->hold(true);
      // Calls that are retried are refused for as long as another thread captures a graph.
      const bool asked_again = what == call::record || what == call::query;
      n.gpus_a->refuse(what, asked_again ? 3000 : 1);
      ASSERT_TRUE(n.a.wire->post(n.work(dir, {{n.a.region, given, segments}})));
      if (asked_again) {
        ASSERT_TRUE(n.until([&] { return n.gpus_a->launches() > 0; }));
        for (int i = 0; i < 1500; ++i) {
          n.a.place->poll();
          n.b.place->poll();
        }
        EXPECT_EQ(n.a.sink->completed(), 0U) << "the GPU still copies";
      }
      n.gpus_a->hold(false);
      ASSERT_TRUE(n.until([&] { return n.a.sink->completed() == 1; }));
      const auto& done = n.a.sink->completions[0];
      ASSERT_TRUE(done.failure);
      EXPECT_EQ(done.failure->code, errc::internal) << to_string(*done.failure);
      EXPECT_THAT(done.failure->message, HasSubstr("invalid value"));
      contract::fill(n.a.memory, 1);
      contract::fill(n.b.memory, 2);
      for (int i = 0; i < 4; ++i) {  // over every lane of the GPU
        const auto next = n.run(n.a, n.work(dir, {{n.a.region, given, segments}}));
        EXPECT_FALSE(next.failure) << to_string(*next.failure);
      }
      const bool writes = dir == direction::write;
      contract::expect_moved(writes ? n.a.memory : n.b.memory, writes ? n.b.memory : n.a.memory,
                             segments, dir);
      EXPECT_FALSE(n.a.sink->is_broken() || n.b.sink->is_broken());
    }
  }
}

TEST(tcp_gpu, a_gpu_that_is_lost_is_out_of_service_and_says_so_at_once) {
  two_nodes n;
  two_nodes::gpu_memory(n.a, mib);
  two_nodes::gpu_memory(n.b, mib);
  const auto given = two_nodes::grant(n.b);
  n.gpus_a->lose();
  const auto posted = n.a.wire->post(n.work(direction::write, {{n.a.region, given, {all}}}));
  ASSERT_THAT(posted, fails_with(errc::backend_unavailable, HasSubstr("fallen off the bus")));
  const auto granted = n.a.wire->grant(n.a.region, {{0, mib, 0, 1}}, access::read_write, t1);
  ASSERT_FALSE(granted);
  EXPECT_EQ(granted.error().code, errc::backend_unavailable);
}

TEST(tcp_gpu, memory_that_cannot_be_pinned_is_said_at_once_or_waited_for) {
  two_nodes n{4};
  two_nodes::gpu_memory(n.a, 16 * mib);
  const auto there = two_nodes::gpu_memory(n.b, 16 * mib);
  n.gpus_b->pin_at_most(0);
  const auto refused = n.b.wire->grant(n.b.region, {{0, mib, 0, 1}}, access::write, t1);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, errc::pool_exhausted) << to_string(refused.error());
  // Enough for the tables of a GPU's copies and the first chunks; four lanes want more.
  for (auto* gpus : {n.gpus_a, n.gpus_b}) gpus->pin_at_most(14 * mib);
  const auto given = two_nodes::grant(n.b);
  contract::fill(n.a.memory, 1);
  for (int i = 0; i < 8; ++i) {
    ASSERT_TRUE(n.a.wire->post(
        n.work(direction::write, {{n.a.region, given, {{0, 0, 16 * mib, 0, 0, 1}}}})));
  }
  ASSERT_TRUE(n.until([&] { return n.a.sink->completed() == 8; }));
  for (const auto& done : n.a.sink->completions) {
    EXPECT_FALSE(done.failure) << to_string(*done.failure);
  }
  EXPECT_EQ(std::memcmp(n.a.memory.data(), there.data(), 16 * mib), 0);
}

TEST(tcp_gpu, a_device_that_is_no_gpu_of_this_process_is_refused_with_what_is_in_the_way) {
  two_nodes n;
  std::vector<std::byte> pages(8192);
  auto* const page = reinterpret_cast<std::byte*>(
      (reinterpret_cast<std::uintptr_t>(pages.data()) + 4095) & ~std::uintptr_t{4095});
  const int none = ::memfd_create("no dma-buf", MFD_CLOEXEC);
  const auto region = n.b.place->register_memory({page, 4096}, "device", {.dmabuf = none}).value();
  ::close(none);
  const auto refused = n.b.wire->grant(region, {{0, 4096, 0, 1}}, access::write, t1);
  ASSERT_THAT(refused,
              fails_with(errc::backend_unavailable, HasSubstr("not a GPU of this process")));
}

}  // namespace troupe::transport::tcp
