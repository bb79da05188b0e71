#include <algorithm>
#include <map>

#include "victim.hpp"

// What the NIC refuses a peer that bypasses its own link: a wrong key, a revoked key, a right that
// was not granted. In the machine of tests/verbs.
namespace troupe::transport::rdma {

TEST(rdma_windows, a_revoked_key_opens_nothing_although_the_peer_never_confirmed) {
  victim v;
  const auto first = v.open({{0, 1 << 20, 0, 1}}, access::write, t1);
  const auto second = v.open({{2 << 20, 1 << 20, 0, 1}}, access::write, t2);
  ASSERT_EQ(v.peer.run(IBV_WR_RDMA_WRITE, 0, first.address, first.key_at(0, 0), 65'536),
            IBV_WC_SUCCESS);
  EXPECT_EQ(v.memory[65'535], std::byte{0xbb});
  const auto start = clock::now();
  ASSERT_EQ(v.wire->fence(t1), fence_state::pending);
  ASSERT_TRUE(v.until([&] { return v.sink->is_quiescent(t1); }));
  EXPECT_GE(clock::now() - start, 300ms) << "a peer that keeps to the protocol has time";
  EXPECT_EQ(v.peer.revocations, 1U);
  // The link is intact: the other transfer continues over the same queue pairs.
  EXPECT_FALSE(v.sink->is_broken());
  for (std::size_t lane = 0; lane < hostile_peer::lanes; ++lane) {
    EXPECT_EQ(v.peer.run(IBV_WR_RDMA_WRITE, lane, second.address + second.begin,
                         second.key_at(second.begin, lane), 65'536),
              IBV_WC_SUCCESS);
  }
  std::memset(v.memory.data(), static_cast<int>(pattern), v.memory.size());
  EXPECT_EQ(v.peer.run(IBV_WR_RDMA_WRITE, 0, first.address, first.key_at(0, 0), 65'536),
            IBV_WC_REM_ACCESS_ERR);
  v.expect_link_to_break();
  EXPECT_TRUE(v.untouched(0, victim::size));
}

TEST(rdma_windows, no_key_of_a_fenced_transfer_opens_anything_although_the_peer_confirmed) {
  constexpr std::size_t grants = 3;
  for (std::size_t which = 0; which < grants * hostile_peer::lanes; ++which) {
    victim v;
    v.peer.confirms = true;
    std::vector<grant_keys> given;
    for (std::uint64_t i = 0; i < grants; ++i) {
      given.push_back(v.open({{i << 16, 65'536, 0, 1}}, access::write, t1));
    }
    const auto other = v.open({{2 << 20, 4096, 0, 1}}, access::write, t2);
    ASSERT_EQ(v.wire->fence(t1), fence_state::pending);
    ASSERT_TRUE(v.until([&] { return v.sink->is_quiescent(t1); }));
    for (std::size_t lane = 0; lane < hostile_peer::lanes; ++lane) {
      EXPECT_EQ(v.peer.run(IBV_WR_RDMA_WRITE, lane, other.address + other.begin,
                           other.key_at(other.begin, lane), 4096),
                IBV_WC_SUCCESS);
    }
    const auto& shut = given[which / hostile_peer::lanes];
    const auto lane = which % hostile_peer::lanes;
    EXPECT_EQ(v.peer.run(IBV_WR_RDMA_WRITE, lane, shut.address + shut.begin,
                         shut.key_at(shut.begin, lane), 4096),
              IBV_WC_REM_ACCESS_ERR)
        << "grant " << which / hostile_peer::lanes << ", lane " << lane;
    EXPECT_TRUE(v.untouched(0, 2 << 20));
  }
}

TEST(rdma_windows, a_peer_that_keeps_writing_through_a_fence_changes_nothing_after_it) {
  for (int round = 0; round < 4; ++round) {
    victim v;
    const auto given = v.open({{0, 1 << 20, 0, 1}}, access::write, t1);
    const auto keep_writing = [&] { v.keep_peer_busy(IBV_WR_RDMA_WRITE, given); };
    ASSERT_TRUE(v.until([&] {
      keep_writing();
      return v.peer.statuses.size() > static_cast<std::size_t>(3 * round);
    }));
    const bool at_once = v.wire->fence(t1) == fence_state::quiescent;
    ASSERT_TRUE(at_once || v.until([&] {
      keep_writing();
      return v.sink->is_quiescent(t1);
    }));
    std::memset(v.memory.data(), static_cast<int>(pattern), v.memory.size());
    EXPECT_TRUE(v.until([&] {
      keep_writing();
      return v.sink->is_broken();
    }));
    EXPECT_TRUE(v.untouched(0, victim::size)) << "round " << round;
  }
}

TEST(rdma_windows, a_peer_that_keeps_reading_through_a_fence_sees_nothing_of_what_comes_after_it) {
  constexpr std::byte old{0x11};
  for (int round = 0; round < 4; ++round) {
    victim v{[&](rdma_options& options) { options.memory_windows = round % 2 == 0; }};
    std::memset(v.memory.data(), static_cast<int>(old), v.memory.size());
    const auto given = v.open({{0, 1 << 20, 0, 1}}, access::read, t1);
    const auto keep_reading = [&] { v.keep_peer_busy(IBV_WR_RDMA_READ, given); };
    ASSERT_TRUE(v.until([&] {
      keep_reading();
      return v.peer.statuses.size() > static_cast<std::size_t>(3 * round);
    }));
    EXPECT_EQ(v.peer.memory[0], old);
    ASSERT_EQ(v.wire->fence(t1), fence_state::pending);
    ASSERT_TRUE(v.until([&] {
      keep_reading();
      return v.sink->is_quiescent(t1);
    }));
    std::memset(v.memory.data(), static_cast<int>(pattern), v.memory.size());
    EXPECT_TRUE(v.until([&] {
      keep_reading();
      return v.sink->is_broken();
    }));
    v.look_for(50ms);
    EXPECT_EQ(std::ranges::find(v.peer.memory, pattern), v.peer.memory.end()) << "round " << round;
  }
}

TEST(rdma_windows, a_right_that_was_not_granted_is_refused) {
  victim v;
  const auto given = v.open({{0, 1 << 20, 0, 1}}, access::write, t1);
  EXPECT_EQ(v.peer.run(IBV_WR_RDMA_READ, 0, given.address, given.key_at(0, 0), 4096),
            IBV_WC_REM_ACCESS_ERR);
  EXPECT_EQ(v.peer.memory[0], std::byte{0xbb}) << "it read something";
  v.expect_link_to_break();
  victim w;
  const auto to_read = w.open({{0, 1 << 20, 0, 1}}, access::read, t1);
  EXPECT_EQ(w.peer.run(IBV_WR_RDMA_WRITE, 0, to_read.address, to_read.key_at(0, 0), 4096),
            IBV_WC_REM_ACCESS_ERR);
  EXPECT_TRUE(w.untouched(0, victim::size));
}

// Linux's Soft-RoCE holds a peer to a window's key, rights, queue pair and lifetime, but not to its
// range (rxe_resp.c checks the registration's): a peer reaches the rest of the registration that
// the window is bound to. Hardware refuses. If this test fails, Soft-RoCE has learnt to refuse as
// well: then say so here.
TEST(rdma_windows, soft_roce_does_not_hold_a_window_to_its_range_but_to_its_registration) {
  victim v;
  const auto given = v.open({{0, 1 << 20, 0, 1}}, access::write, t1);
  EXPECT_EQ(v.peer.run(IBV_WR_RDMA_WRITE, 0, given.address + (1 << 20), given.key_at(0, 0), 4096),
            IBV_WC_SUCCESS);
  victim w;
  const auto end = w.open({{victim::size - 4096, 4096, 0, 1}}, access::write, t1);
  EXPECT_EQ(
      w.peer.run(IBV_WR_RDMA_WRITE, 0, end.address + end.begin, end.key_at(end.begin, 0), 4097),
      IBV_WC_REM_ACCESS_ERR)
      << "behind the registration";
  EXPECT_TRUE(w.untouched(0, victim::size));
}

TEST(rdma_windows, a_key_is_good_on_its_own_lane_only) {
  victim v;
  const auto given = v.open({{0, 1 << 20, 0, 1}}, access::write, t1);
  EXPECT_EQ(v.peer.run(IBV_WR_RDMA_WRITE, 1, given.address, given.key_at(0, 0), 4096),
            IBV_WC_REM_ACCESS_ERR);
  EXPECT_TRUE(v.untouched(0, victim::size));
}

TEST(rdma_windows, what_a_hostile_peer_brings_on_itself_disturbs_nobody_else) {
  victim v;
  // An honest peer of the same node.
  endpoint_options options;
  options.self = incarnation{0xa1};
  options.rdma.device = "rxe0b";
  contract::suit_emulation(options.rdma);
  const auto place = endpoint::create(std::move(options)).value();
  const auto region = place->allocate(victim::size, "honest").value();
  std::memset(place->bytes(region)->data(), 0x3a, victim::size);
  auto theirs = std::make_shared<recorder>();
  auto ours = std::make_shared<recorder>();
  const auto there = place
                         ->open(backend_kind::rdma,
                                {.peer = incarnation{0x900d},
                                 .lanes = 2,
                                 .connect_timeout = contract::longer_than_any_wait},
                                theirs)
                         .value();
  const auto here = v.place
                        ->open(backend_kind::rdma,
                               {.role = link_role::acceptor,
                                .peer = incarnation{0xa1},
                                .lanes = 2,
                                .connect_timeout = contract::longer_than_any_wait},
                               ours)
                        .value();
  ASSERT_TRUE(here->connect(there->offer()));
  ASSERT_TRUE(there->connect(here->offer()));
  ASSERT_TRUE(v.until([&] { return theirs->ups == 1 && ours->ups == 1; }));
  const auto granted = std::make_shared<const remote_grant>(
      here->grant(v.region, {{2 << 20, 1 << 20, 0, 1}}, access::write, t2).value());
  const auto write = [&](std::uint64_t id) {
    batch work{
        .id = batch_id{id}, .transfer = t2, .dir = direction::write, .pieces = {}, .frame = {}};
    work.pieces.push_back({region, granted, {{0, 2 << 20, 1 << 20, 0, 0, 1}}});
    ASSERT_TRUE(there->post(std::move(work)));
    ASSERT_TRUE(v.until([&] { return theirs->completed() == id; }));
    EXPECT_FALSE(theirs->outcome_of(id).failure);
  };
  write(1);
  const auto given = v.open({{0, 1 << 20, 0, 1}}, access::write, t1);
  EXPECT_EQ(v.peer.run(IBV_WR_RDMA_WRITE, 0, given.address, given.key_at(0, 1), 4096),
            IBV_WC_REM_ACCESS_ERR);
  v.expect_link_to_break();
  write(2);
  EXPECT_FALSE(ours->is_broken());
  EXPECT_TRUE(v.untouched(0, 2 << 20));
  EXPECT_EQ(v.memory[2 << 20], std::byte{0x3a});
  there->close();
  here->close();
}

TEST(rdma_windows, a_window_that_is_used_again_has_another_key) {
  victim v;
  v.peer.confirms = true;
  std::map<std::uint32_t, int> seen;
  for (std::uint64_t i = 0; i < 40; ++i) {
    const transfer_id transfer{100 + i};
    const auto given = v.open({{0, 1 << 20, 0, 1}}, access::write, transfer);
    EXPECT_EQ(++seen[given.key_at(0, 0)], 1) << "a key came back";
    EXPECT_EQ(v.peer.run(IBV_WR_RDMA_WRITE, i % 2, given.address, given.key_at(0, i % 2), 64),
              IBV_WC_SUCCESS);
    if (i % 4 == 0) continue;  // a few are bound at a time, the others many times
    v.wire->fence(transfer);
    ASSERT_TRUE(v.until([&] { return v.sink->is_quiescent(transfer); }));
  }
  EXPECT_FALSE(v.sink->is_broken());
}

TEST(rdma_windows, without_windows_a_peer_that_does_not_confirm_loses_the_link) {
  victim v{[](rdma_options& options) { options.memory_windows = false; }};
  const auto given = v.open({{0, 1 << 20, 0, 1}}, access::write, t1);
  ASSERT_EQ(v.peer.run(IBV_WR_RDMA_WRITE, 0, given.address, given.key_at(0, 0), 65'536),
            IBV_WC_SUCCESS);
  ASSERT_EQ(v.wire->fence(t1), fence_state::pending);
  ASSERT_TRUE(v.until([&] { return v.sink->is_quiescent(t1); }));
  std::memset(v.memory.data(), static_cast<int>(pattern), v.memory.size());
  EXPECT_TRUE(v.sink->is_broken());
  v.peer.post(IBV_WR_RDMA_WRITE, 0, given.address, given.key_at(0, 0), 65'536);
  v.look_for(100ms);
  EXPECT_TRUE(v.untouched(0, victim::size));
}

}  // namespace troupe::transport::rdma
