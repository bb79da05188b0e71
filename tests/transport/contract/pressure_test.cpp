#include <algorithm>
#include <map>
#include <utility>

#include "open_descriptors.hpp"
#include "pair.hpp"
#include "process_memory.hpp"

// More work than any queue of a link holds: the excess waits and then continues, nothing is lost,
// and nothing leaks.
namespace troupe::transport::contract {

namespace {

using troupe::testing::allocated_bytes;
using troupe::testing::open_descriptors;

/// `count` blocks that merge on neither side: a few bytes apart here, in reverse order at the peer.
std::vector<segment> scattered(std::uint32_t count, std::uint64_t length) {
  std::vector<segment> segments;
  for (std::uint32_t i = 0; i < count; ++i) {
    segments.push_back({i * (length + 3), (count - 1 - i) * (length + 5), length, 0, 0, 1});
  }
  return segments;
}

/// Peers that make progress only when the test polls.
class polled_contract : public backend_contract {};

std::vector<variant> polled_variants() {
  auto all = all_variants();
  std::erase_if(all, [](const variant& one) { return one.workers != 0; });
  return all;
}
INSTANTIATE_TEST_SUITE_P(every, polled_contract, ::testing::ValuesIn(polled_variants()), name_of);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(polled_contract);

/// Enough transfers to show what each one leaks.
class lasting : public backend_contract {};

std::vector<variant> lasting_variants() {
  auto all = all_variants();
  if (have_verbs())
    all.push_back({backend_kind::rdma, 4, 0});  // two devices, and no thread to wake
  return all;
}
INSTANTIATE_TEST_SUITE_P(every, lasting, ::testing::ValuesIn(lasting_variants()), name_of);

}  // namespace

TEST_P(any_lanes, one_to_thousands_of_scattered_blocks_move_in_one_batch) {
  pair p{GetParam()};
  for (const std::uint32_t count : {1U, 2U, 31U, 64U, 257U, 4096U}) {
    for (const std::uint64_t length : {std::uint64_t{1}, std::uint64_t{1021}}) {
      const auto segments = scattered(count, length);
      for (const auto dir : {direction::write, direction::read}) {
        fill(p.a.memory, count);
        fill(p.b.memory, count + 1);
        const auto rights = dir == direction::write ? access::write : access::read;
        const transfer_id transfer{count * 4 + length % 2 * 2 + (dir == direction::read ? 1 : 0)};
        const auto done =
            p.run(p.a, p.make_batch(p.a, dir, p.grant(p.b, rights, transfer), segments));
        ASSERT_FALSE(done.failure) << to_string(*done.failure);
        EXPECT_EQ(done.bytes, count * length);
        const bool out = dir == direction::write;
        expect_moved(out ? p.a.memory : p.b.memory, out ? p.b.memory : p.a.memory, segments, dir);
      }
    }
  }
}

TEST_P(any_lanes, what_exceeds_every_queue_both_ways_waits_and_all_of_it_arrives) {
  pair p{GetParam()};
  constexpr int batches = 6;
  const auto segments = scattered(4096, 64);
  fill(p.a.memory, 1);
  fill(p.b.memory, 2);
  const auto for_a = p.grant(p.b, access::write, t1);
  const auto for_b = p.grant(p.a, access::write, t2);
  // Each side writes its first half to the other side's second half.
  auto from_first_half = segments;
  for (auto& one : from_first_half) one.remote_offset += pair::region_size / 2;
  for (int i = 0; i < batches; ++i) {
    const auto name = std::to_string(i);
    ASSERT_TRUE(p.a.wire->post(p.make_batch(p.a, direction::write, for_a, from_first_half, name)));
    ASSERT_TRUE(p.b.wire->post(p.make_batch(p.b, direction::write, for_b, from_first_half, name)));
  }
  for (std::size_t i = 1; i <= batches; ++i) {  // one after another: an emulated wire is slow
    ASSERT_TRUE(p.until([&] {
      return p.a.sink->completed() >= i && p.b.sink->completed() >= i && p.a.sink->framed() >= i &&
             p.b.sink->framed() >= i;
    })) << i;
  }
  for (const auto* side : {&p.a, &p.b}) {
    for (const auto& done : side->sink->completions) {
      EXPECT_FALSE(done.failure) << to_string(*done.failure);
    }
  }
  expect_moved(p.a.memory, p.b.memory, from_first_half, direction::write);
  expect_moved(p.b.memory, p.a.memory, from_first_half, direction::write);
}

TEST_P(polled_contract, notices_wait_for_a_peer_that_does_not_look_and_none_is_lost) {
  pair p{GetParam()};
  constexpr std::uint64_t count = 1000;
  const auto grant = p.grant(p.b, access::write, t1);
  fill(p.a.memory, 1);
  for (std::uint64_t i = 0; i < count; ++i) {
    ASSERT_TRUE(p.a.wire->post(p.make_batch(p.a, direction::write, grant,
                                            {{i * 8, i * 16, 8, 0, 0, 1}}, std::to_string(i))));
    if (i % 10 == 0) p.a.place->poll();
  }
  const auto look = clock::now() + 300ms;
  while (clock::now() < look) p.a.place->poll();
  EXPECT_EQ(p.b.sink->framed(), 0U);
  for (std::uint64_t i = 100; i <= count; i += 100) {
    ASSERT_TRUE(p.until([&] { return p.a.sink->completed() >= i && p.b.sink->framed() >= i; }))
        << i;
  }
  for (std::uint64_t i = 0; i < count; ++i) {
    ASSERT_EQ(std::memcmp(p.a.memory.data() + i * 8, p.b.memory.data() + i * 16, 8), 0) << i;
  }
  auto frames = p.b.sink->frames;
  std::ranges::sort(frames);
  EXPECT_EQ(std::ranges::adjacent_find(frames), frames.end()) << "a notice came twice";
  EXPECT_FALSE(p.a.sink->is_broken()) << to_string(*p.a.sink->broken);
}

TEST_P(lasting, ten_thousand_transfers_leave_nothing_behind_and_every_byte_in_its_place) {
  pair p{GetParam()};
  constexpr std::uint64_t at_once = 20;
  constexpr std::uint64_t room = 8192;
  // Waking a thread takes milliseconds in the emulated machine.
  const bool slow = troupe::testing::sanitized || (have_verbs() && GetParam().workers != 0);
  const std::uint64_t rounds = (slow ? 1000 : 10'000) / at_once;
  const auto warm_up = rounds / 5;
  std::uint64_t memory_at_first = 0;
  std::size_t descriptors_at_first = 0;
  for (std::uint64_t round = 0; round < rounds; ++round) {
    for (auto* side : {&p.a, &p.b}) {
      // Memory of the recorders is not the link's.
      side->sink->forget();
    }
    std::vector<std::pair<transfer_id, segment>> transfers;
    for (std::uint64_t i = 0; i < at_once; ++i) {
      const transfer_id transfer{round * at_once + i + 1};
      const bool writes = i % 2 == 0;
      const segment moved{
          i * room, i * room + transfer.value % 97, 1 + transfer.value * 797 % 4096, 0, 0, 1};
      transfers.emplace_back(transfer, moved);
      auto& source = writes ? p.a.memory : p.b.memory;
      fill(source.subspan(i * room, room), static_cast<std::uint32_t>(transfer.value));
      const auto grant =
          p.grant(p.b, writes ? access::write : access::read, transfer, {{i * room, room, 0, 1}});
      ASSERT_TRUE(grant);
      ASSERT_TRUE(p.a.wire->post(
          p.make_batch(p.a, writes ? direction::write : direction::read, grant, {moved}, "done")));
    }
    ASSERT_TRUE(p.until([&] {
      return p.a.sink->completed() == at_once && p.b.sink->framed() == at_once;
    })) << "round "
        << round;
    for (const auto& done : p.a.sink->completions) {
      ASSERT_FALSE(done.failure) << to_string(*done.failure);
    }
    for (const auto& [transfer, moved] : transfers) {
      for (auto* side : {&p.a, &p.b}) {
        if (side->wire->fence(transfer) == fence_state::quiescent) continue;
        ASSERT_TRUE(p.until([&] { return side->sink->is_quiescent(transfer); }));
      }
      ASSERT_EQ(std::memcmp(p.a.memory.data() + moved.local_offset,
                            p.b.memory.data() + moved.remote_offset, moved.length),
                0)
          << "of transfer " << transfer.value;
    }
    if (round == warm_up) {
      memory_at_first = allocated_bytes();
      descriptors_at_first = open_descriptors();
    }
  }
  EXPECT_EQ(p.a.wire->stats().in_flight, 0U);
  EXPECT_EQ(open_descriptors(), descriptors_at_first);
  if (!troupe::testing::sanitized) {
    // The link remembers the last 16,384 ended transfers. The first time that copies run on all
    // lanes at once, it also pins memory that it keeps: at most 9 MiB for each end of a lane.
    const auto pinned =
        GetParam().gpus == gpu_ends::none ? 0 : std::uint64_t{GetParam().lanes} * 2 * (9 << 20);
    EXPECT_LT(allocated_bytes(), memory_at_first + (std::uint64_t{3} << 20) + pinned);
  }
  if (GetParam().kind == backend_kind::rdma) {
    std::map<std::string, std::uint64_t> by_device;
    for (const auto& lane : p.a.wire->stats().by_lane) by_device[lane.device] += lane.bytes;
    EXPECT_EQ(by_device.size(), GetParam().lanes >= 4 ? 2U : 1U);
    for (const auto& [device, bytes] : by_device) EXPECT_GT(bytes, 100'000U) << device;
  }
}

}  // namespace troupe::transport::contract
