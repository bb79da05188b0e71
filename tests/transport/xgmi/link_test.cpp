#include <algorithm>
#include <cstring>

#include <gmock/gmock.h>

#include "two_nodes.hpp"
#include "waiting.hpp"

// What is specific to xgmi in a link, on GPU doubles. The promises of every link are tested in
// tests/transport/contract.
namespace troupe::transport::xgmi {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;

}  // namespace

TEST(xgmi_link, memory_of_the_engine_is_registered_by_any_pointer_into_its_allocation) {
  two_nodes n;
  auto* const here = n.site->runtime->allocate(0, 8 * mib).value();
  auto* const there = n.site->runtime->allocate(1, 8 * mib).value();
  contract::fill({here, 8 * mib}, 1);
  std::vector<piece> pieces;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> places;
  for (std::uint64_t i = 0; i < 8; ++i) {
    const auto at_here = i * mib + i * 48;
    const auto at_there = (7 - i) * mib + 128;
    const auto local = n.a.place->register_memory({here + at_here, 65'536}, "a part").value();
    const auto remote = n.b.place->register_memory({there + at_there, 65'536}, "a part").value();
    pieces.push_back({local, n.grant(n.b, remote, 65'536), {{16, 32, 5000, 0, 0, 1}}});
    places.emplace_back(at_here + 16, at_there + 32);
  }
  const auto done = n.run(n.a, n.work(direction::write, pieces));
  ASSERT_FALSE(done.failure) << to_string(*done.failure);
  for (const auto& [from, to] : places) EXPECT_EQ(std::memcmp(here + from, there + to, 5000), 0);
  // shm and tcp learn that they cannot reach it.
  const auto behind = n.b.place->register_memory({there + 8 * mib - 4096, 4096}, "tail");
  EXPECT_TRUE(behind);
  n.b.wire->fence(t1);
  n.a.wire->close();
  n.b.wire->close();
  n.a.place.reset();
  n.b.place.reset();
  n.site->runtime->release(0, here);
  n.site->runtime->release(1, there);
}

TEST(xgmi_link, a_batch_whose_regions_lie_on_several_gpus_is_copied_by_each) {
  two_nodes n;
  const auto on_0 = n.a.place->allocate_on_gpu(0, mib, "0").value();
  const auto on_1 = n.a.place->allocate_on_gpu(1, mib, "1").value();
  const auto there = n.b.place->allocate_on_gpu(1, 2 * mib, "there").value();
  contract::fill(n.a.place->bytes(on_0).value(), 1);
  contract::fill(n.a.place->bytes(on_1).value(), 2);
  const auto grant = n.grant(n.b, there, 2 * mib);
  const auto done = n.run(n.a, n.work(direction::write, {{on_0, grant, {{0, 0, mib, 0, 0, 1}}},
                                                         {on_1, grant, {{0, mib, mib, 0, 0, 1}}}}));
  ASSERT_FALSE(done.failure) << to_string(*done.failure);
  EXPECT_EQ(done.bytes, 2 * mib);
  const auto landed = n.b.place->bytes(there).value();
  EXPECT_EQ(std::memcmp(landed.data(), n.a.place->bytes(on_0)->data(), mib), 0);
  EXPECT_EQ(std::memcmp(landed.data() + mib, n.a.place->bytes(on_1)->data(), mib), 0);
  EXPECT_GT(n.driver->launched(copy_way::bulk), 0U) << "the first GPU has them";
  EXPECT_GT(n.driver->launched(copy_way::vector), 0U) << "the second has not";
}

TEST(xgmi_link, long_runs_go_by_the_copy_engine) {
  xgmi_options with;
  with.engine_bytes = 2 * mib;
  two_nodes n{0, with};
  const auto here = n.a.place->allocate_on_gpu(0, 4 * mib, "here").value();
  const auto there = n.b.place->allocate_on_gpu(1, 4 * mib, "there").value();
  contract::fill(n.b.place->bytes(there).value(), 3);
  const auto done = n.run(
      n.a,
      n.work(direction::read, {{here, n.grant(n.b, there, 4 * mib), {{0, 0, 4 * mib, 0, 0, 1}}}}));
  ASSERT_FALSE(done.failure);
  EXPECT_EQ(n.driver->engine_copies(), 1U);
  EXPECT_EQ(n.driver->launched(copy_way::bulk), 0U);
  EXPECT_EQ(std::memcmp(n.a.place->bytes(here)->data(), n.b.place->bytes(there)->data(), 4 * mib),
            0);
}

TEST(xgmi_link, a_lost_gpu_ends_the_link_and_takes_the_backend_out_of_service) {
  two_nodes n;
  const auto here = n.a.place->allocate_on_gpu(0, mib, "here").value();
  const auto there = n.b.place->allocate_on_gpu(1, mib, "there").value();
  const auto grant = n.grant(n.b, there, mib);
  n.driver->hold(true);
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(n.a.wire->post(n.work(direction::write, {{here, grant, {{0, 0, mib, 0, 0, 1}}}})));
  }
  n.driver->lose();
  n.driver->hold(false);
  ASSERT_TRUE(n.until([&] { return n.a.sink->is_broken() && n.b.sink->is_broken(); }));
  EXPECT_EQ(n.a.sink->completions_when_broken, 3U);
  for (const auto& done : n.a.sink->completions) {
    ASSERT_TRUE(done.failure);
    EXPECT_EQ(done.failure->code, errc::backend_unavailable) << to_string(*done.failure);
    EXPECT_EQ(done.bad_segments, std::vector<std::uint32_t>{0});
  }
  const auto choice = n.a.place->choose(n.b.place->identity(), backend_kind::xgmi);
  ASSERT_FALSE(choice);
  EXPECT_THAT(choice.error().message, HasSubstr("fallen off the bus"));
  auto identity = n.b.place->identity();
  EXPECT_NE(n.a.place->choose(identity, std::nullopt)->kind, backend_kind::xgmi) << "it falls back";
}

TEST(xgmi_link, what_a_driver_refuses_fails_its_batch_alone_and_only_once_the_gpu_is_done_with_it) {
  using call = gpu_double::call;
  for (const auto what : {call::launch, call::record, call::query}) {
    SCOPED_TRACE(static_cast<int>(what));
    two_nodes n;
    const auto here = n.a.place->allocate_on_gpu(0, mib, "here").value();
    const auto there = n.b.place->allocate_on_gpu(1, mib, "there").value();
    const auto grant = n.grant(n.b, there, mib);
    const segment all{0, 0, mib, 0, 0, 1};
    n.driver->hold(true);
    n.driver->refuse(what, 1);
    ASSERT_TRUE(n.a.wire->post(n.work(direction::write, {{here, grant, {all}}})));
    ASSERT_TRUE(n.a.wire->post(n.work(direction::write, {{here, grant, {all}}})));
    for (int i = 0; i < 200; ++i) n.a.place->poll();
    EXPECT_LE(n.a.sink->completed(), what == call::launch ? 1U : 0U);
    n.driver->hold(false);
    ASSERT_TRUE(n.until([&] { return n.a.sink->completed() == 2; }));
    EXPECT_EQ(std::ranges::count_if(n.a.sink->completions,
                                    [](const auto& done) { return done.failure.has_value(); }),
              1);
    const auto next = n.run(n.a, n.work(direction::write, {{here, grant, {all}}}));
    EXPECT_FALSE(next.failure);
    EXPECT_FALSE(n.a.sink->is_broken());
    EXPECT_TRUE(n.a.place->choose(n.b.place->identity(), backend_kind::xgmi));
  }
}

TEST(xgmi_link, a_progress_thread_sleeps_while_a_long_copy_flies_and_is_woken_at_its_end) {
  two_nodes n{1};
  const auto here = n.a.place->allocate_on_gpu(0, mib, "here").value();
  const auto there = n.b.place->allocate_on_gpu(1, mib, "there").value();
  const auto grant = n.grant(n.b, there, mib);
  n.driver->hold(true);
  ASSERT_TRUE(n.a.wire->post(n.work(direction::write, {{here, grant, {{0, 0, mib, 0, 0, 1}}}})));
  const auto used = [] {
    timespec now{};
    ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return std::chrono::seconds{now.tv_sec} + std::chrono::nanoseconds{now.tv_nsec};
  };
  const auto before = used();
  const auto since = contract::clock::now();
  std::this_thread::sleep_for(400ms);
  // Two streams of the double look every 100 us; a polling thread would take all of the time.
  EXPECT_LT(used() - before, (contract::clock::now() - since) * 5 / 8);
  EXPECT_EQ(n.a.sink->completed(), 0U);
  n.driver->hold(false);
  ASSERT_TRUE(n.until([&] { return n.a.sink->completed() == 1; }));
  EXPECT_FALSE(n.a.sink->completions[0].failure);
}

TEST(xgmi_link, a_progress_thread_is_rung_at_the_end_of_a_copy_and_does_not_only_look) {
  two_nodes n{1};
  const auto here = n.a.place->allocate_on_gpu(0, mib, "here").value();
  const auto there = n.b.place->allocate_on_gpu(1, mib, "there").value();
  const auto grant = n.grant(n.b, there, mib);
  // The engine looks 200 ms after a copy has begun; a copy that is seen to have ended well before
  // that rang. A busy machine may delay one ring, but not all.
  const auto rung = [&] {
    const auto done = n.a.sink->completed();
    n.driver->hold(true);
    const auto begun = contract::clock::now();
    EXPECT_TRUE(n.a.wire->post(n.work(direction::write, {{here, grant, {{0, 0, mib, 0, 0, 1}}}})));
    std::this_thread::sleep_for(20ms);
    n.driver->hold(false);
    EXPECT_TRUE(n.until([&] { return n.a.sink->completed() > done; }));
    const auto ended = contract::clock::now();
    if (ended - begun < 150ms) return true;
    std::this_thread::sleep_until(begun + 250ms);  // no look is due when the next copy begins
    return false;
  };
  EXPECT_TRUE(testing::comes_true(rung));
}

TEST(xgmi_link, a_fence_waits_for_the_copies_of_its_transfer_at_both_ends) {
  two_nodes n;
  const auto here = n.a.place->allocate_on_gpu(0, mib, "here").value();
  const auto there = n.b.place->allocate_on_gpu(1, mib, "there").value();
  const auto grant = n.grant(n.b, there, mib);
  n.driver->hold(true);
  ASSERT_TRUE(n.a.wire->post(n.work(direction::write, {{here, grant, {{0, 0, mib, 0, 0, 1}}}})));
  EXPECT_EQ(n.b.wire->fence(t1), fence_state::pending);
  EXPECT_EQ(n.a.wire->fence(t1), fence_state::pending);
  n.drive_for(30ms);
  EXPECT_FALSE(n.b.sink->is_quiescent(t1));
  EXPECT_FALSE(n.b.place->deregister(there)) << "a GPU writes into it";
  n.driver->hold(false);
  ASSERT_TRUE(n.until([&] { return n.a.sink->is_quiescent(t1) && n.b.sink->is_quiescent(t1); }));
  EXPECT_EQ(n.a.sink->completed(), 1U);
  EXPECT_TRUE(n.b.place->deregister(there));
}

TEST(xgmi_link, batches_that_find_no_table_wait_and_all_of_them_arrive) {
  two_nodes n;
  const auto here = n.a.place->allocate_on_gpu(0, 4 * mib, "here").value();
  const auto there = n.b.place->allocate_on_gpu(1, 4 * mib, "there").value();
  contract::fill(n.a.place->bytes(here).value(), 4);
  const auto grant = n.grant(n.b, there, 4 * mib);
  std::vector<segment> many;
  for (std::uint64_t i = 0; i < 8000; ++i)
    many.push_back({i * 512, (7999 - i) * 512, 500, 0, 0, 1});
  n.driver->hold(true);
  constexpr std::size_t batches = 400;
  for (std::size_t i = 0; i < batches; ++i) {
    ASSERT_TRUE(n.a.wire->post(n.work(direction::write, {{here, grant, many}})));
  }
  n.driver->hold(false);
  ASSERT_TRUE(n.until([&] { return n.a.sink->completed() == batches; }));
  for (const auto& done : n.a.sink->completions) EXPECT_FALSE(done.failure);
  const auto from = n.a.place->bytes(here).value();
  const auto to = n.b.place->bytes(there).value();
  for (const auto& s : many) {
    ASSERT_EQ(std::memcmp(from.data() + s.local_offset, to.data() + s.remote_offset, s.length), 0);
  }
}

TEST(xgmi_link, memory_of_the_host_moves_over_it_as_over_shm) {
  for (const std::uint32_t workers : {0U, 1U}) {
    two_nodes n{workers};
    constexpr std::uint32_t size = 24U << 20;
    const auto here = n.a.place->allocate(size, "here").value();
    const auto there = n.b.place->allocate(size, "there").value();
    const auto grant = n.grant(n.b, there, size);
    std::uint32_t seed = 0;
    // By the posting thread, and in slices.
    for (const std::uint32_t bytes : {100U, 700'000U, size}) {
      for (const auto dir : {direction::write, direction::read}) {
        const auto mine = n.a.place->bytes(here).value().first(bytes);
        const auto theirs = n.b.place->bytes(there).value().first(bytes);
        contract::fill(dir == direction::write ? mine : theirs, ++seed);
        const auto done = n.run(n.a, n.work(dir, {{here, grant, {{0, 0, bytes, 0, 0, 1}}}}));
        ASSERT_FALSE(done.failure) << to_string(*done.failure);
        EXPECT_EQ(done.bytes, bytes);
        EXPECT_EQ(std::memcmp(mine.data(), theirs.data(), bytes), 0) << bytes;
      }
    }
    EXPECT_EQ(n.driver->engine_copies() + n.driver->launched(copy_way::vector), 0U);
  }
}

TEST(xgmi_link, memory_of_the_host_and_of_a_gpu_are_refused_into_each_other_and_in_one_batch) {
  two_nodes n;
  const auto host_here = n.a.place->allocate(mib, "host here").value();
  const auto gpu_here = n.a.place->allocate_on_gpu(0, mib, "GPU here").value();
  const auto to_host = n.grant(n.b, n.b.place->allocate(mib, "host there").value(), mib);
  const auto to_gpu = n.grant(n.b, n.b.place->allocate_on_gpu(1, mib, "GPU there").value(), mib);
  const segment all{0, 0, 4096, 0, 0, 1};
  const auto refused = [&](std::vector<piece> pieces) {
    const auto posted = n.a.wire->post(n.work(direction::write, std::move(pieces)));
    return posted ? std::string{"posted"} : to_string(posted.error());
  };
  EXPECT_THAT(refused({{gpu_here, to_host, {all}}}), HasSubstr("moves neither into the other"));
  EXPECT_THAT(refused({{host_here, to_gpu, {all}}}), HasSubstr("moves neither into the other"));
  EXPECT_THAT(refused({{gpu_here, to_gpu, {all}}, {host_here, to_host, {all}}}),
              HasSubstr("post them separately"));
  const auto done = n.run(n.a, n.work(direction::write, {{gpu_here, to_gpu, {all}}}));
  EXPECT_FALSE(done.failure) << to_string(*done.failure);
}

TEST(xgmi_link, it_is_chosen_for_a_peer_whose_gpus_are_seen_here_and_no_other) {
  two_nodes n;
  const auto peer = n.b.place->identity();
  ASSERT_EQ(peer.gpus.size(), 2U);
  EXPECT_EQ(n.a.place->choose(peer, std::nullopt)->kind, backend_kind::xgmi);
  const auto why_not = [&](host_identity other) {
    const auto choice = n.a.place->choose(other, backend_kind::xgmi);
    return choice ? "chosen" : choice.error().message;
  };
  auto other = peer;
  other.boot_id = "another";
  EXPECT_THAT(why_not(other), HasSubstr("another host"));
  other = peer;
  other.gpus.clear();
  EXPECT_THAT(why_not(other), HasSubstr("names no GPU"));
  other.gpus = {"0000:cc:00.0"};
  EXPECT_THAT(why_not(other), HasSubstr("0000:cc:00.0"));
  other = peer;
  other.pid_namespace += 1;
  EXPECT_THAT(why_not(other), HasSubstr("pid namespace"));
}

}  // namespace troupe::transport::xgmi
