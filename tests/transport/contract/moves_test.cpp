#include <map>
#include <string>

#include <sys/mman.h>

#include "pair.hpp"

// What a link must move, and the order in which it must report it.
namespace troupe::transport::contract {

INSTANTIATE_TEST_SUITE_P(every, backend_contract, ::testing::ValuesIn(all_variants()), name_of);
INSTANTIATE_TEST_SUITE_P(every, any_lanes, ::testing::ValuesIn(lane_variants()), name_of);

namespace {

constexpr std::uint64_t mib = std::uint64_t{1} << 20;

// Segments of the sizes that break things: 1, odd, around a page, megabytes.
std::vector<segment> awkward_segments() {
  std::vector<segment> segments;
  std::uint64_t local = 3;
  std::uint64_t remote = 8 * mib - 5;
  for (const std::uint64_t size :
       {1UL, 2UL, 63UL, 4095UL, 4096UL, 4097UL, 65'537UL, 1'000'003UL, 2 * mib + 1}) {
    segments.push_back({local, remote, size, 0, 0, 1});
    local += size + 7;
    remote += size + 1;
  }
  return segments;
}

void expect_both_ends_to_move(const variant& with, direction dir) {
  pair p{with};
  for (auto [from, to] : {std::pair{&p.a, &p.b}, std::pair{&p.b, &p.a}}) {
    fill(from->memory, 1);
    fill(to->memory, 2);
    const bool writes = dir == direction::write;
    const auto segments = awkward_segments();
    const auto grant = p.grant(*to, writes ? access::write : access::read, t1);
    const auto done = p.run(*from, p.make_batch(*from, dir, grant, segments));
    ASSERT_FALSE(done.failure) << to_string(*done.failure);
    EXPECT_EQ(done.bytes, total_bytes(segments));
    expect_moved(writes ? from->memory : to->memory, writes ? to->memory : from->memory, segments,
                 dir);
  }
}

}  // namespace

TEST_P(any_lanes, a_write_lands_byte_for_byte_in_both_directions) {
  expect_both_ends_to_move(GetParam(), direction::write);
}

TEST_P(any_lanes, a_read_lands_byte_for_byte_in_both_directions) {
  expect_both_ends_to_move(GetParam(), direction::read);
}

TEST_P(any_lanes, bytes_beside_the_segments_stay_untouched) {
  pair p{GetParam()};
  fill(p.a.memory, 1);
  std::memset(p.b.memory.data(), 0x5a, p.b.memory.size());
  const auto segments = awkward_segments();
  ASSERT_FALSE(
      p.run(p.a, p.make_batch(p.a, direction::write, p.grant(p.b, access::write, t1), segments))
          .failure);
  for (const auto& s : segments) {
    std::memset(p.b.memory.data() + s.remote_offset, 0x5a, s.length);
  }
  EXPECT_TRUE(all_are(p.b.memory, std::byte{0x5a}));
}

TEST_P(any_lanes, eight_mebibytes_in_one_segment_move_both_ways) {
  pair p{GetParam()};
  fill(p.a.memory, 1);
  const std::vector<segment> there{{0, 8 * mib, 8 * mib, 0, 0, 1}};
  ASSERT_FALSE(
      p.run(p.a, p.make_batch(p.a, direction::write, p.grant(p.b, access::write, t1), there))
          .failure);
  expect_moved(p.a.memory, p.b.memory, there, direction::write);
  const std::vector<segment> back{{8 * mib, 8 * mib, 8 * mib, 0, 0, 1}};
  ASSERT_FALSE(
      p.run(p.a, p.make_batch(p.a, direction::read, p.grant(p.b, access::read, t1), back)).failure);
  expect_moved(p.b.memory, p.a.memory, back, direction::read);
  std::map<std::string, std::uint64_t> by_device;
  for (const auto& lane : p.a.wire->stats().by_lane) by_device[lane.device] += lane.bytes;
  for (const auto& [device, bytes] : by_device) EXPECT_GT(bytes, 0U) << device;
  if (GetParam().kind == backend_kind::rdma) {
    EXPECT_EQ(by_device.size(), GetParam().lanes >= 4 ? 2U : 1U);
  }
}

TEST_P(any_lanes, strided_segments_move_every_repetition_and_nothing_between) {
  pair p{GetParam()};
  const std::vector<segment> segments{
      {0, 100, 256, 1024, 300, 3000},                     // many small ones
      {4 * mib, 2 * mib, 100'000, 100'001, 131'072, 17},  // does not divide evenly into frames
      {7 * mib, 6 * mib, 3 * mib, 3 * mib, 3 * mib + 5,
       2},  // one repetition is larger than a frame
  };
  for (const auto dir : {direction::write, direction::read}) {
    fill(p.a.memory, 1);
    fill(p.b.memory, 2);
    std::vector<std::byte> expected_a{p.a.memory.begin(), p.a.memory.end()};
    std::vector<std::byte> expected_b{p.b.memory.begin(), p.b.memory.end()};
    for (const auto& s : segments) {
      for (std::uint32_t i = 0; i < s.count; ++i) {
        auto* local = expected_a.data() + s.local_offset + i * s.local_stride;
        auto* remote = expected_b.data() + s.remote_offset + i * s.remote_stride;
        dir == direction::write ? std::memcpy(remote, local, s.length)
                                : std::memcpy(local, remote, s.length);
      }
    }
    const auto done =
        p.run(p.a, p.make_batch(p.a, dir, p.grant(p.b, access::read_write, t1), segments));
    ASSERT_FALSE(done.failure) << to_string(*done.failure)
                               << (dir == direction::write ? " (write)" : " (read)");
    EXPECT_EQ(done.bytes, total_bytes(segments));
    EXPECT_EQ(std::memcmp(expected_a.data(), p.a.memory.data(), expected_a.size()), 0);
    EXPECT_EQ(std::memcmp(expected_b.data(), p.b.memory.data(), expected_b.size()), 0);
  }
}

TEST_P(backend_contract, an_empty_batch_completes_and_still_delivers_its_frame) {
  pair p{GetParam()};
  for (const auto dir : {direction::write, direction::read}) {
    const auto before = p.b.sink->framed();
    auto work = p.make_batch(p.a, dir, p.grant(p.b, access::read_write, t1), {}, "hello");
    EXPECT_FALSE(p.run(p.a, work).failure);
    work.id = batch_id{1000 + before};
    work.pieces.clear();
    EXPECT_FALSE(p.run(p.a, work).failure);
    EXPECT_TRUE(p.until([&] { return p.b.sink->framed() == before + 2; }));
    work.id = batch_id{2000 + before};
    work.pieces = {
        p.make_batch(p.a, dir, p.grant(p.b, access::read_write, t1), {{0, 0, 0, 0, 0, 1}}).pieces};
    work.frame.clear();
    const auto done = p.run(p.a, work);
    EXPECT_FALSE(done.failure);
    EXPECT_EQ(done.bytes, 0U);
  }
}

TEST_P(backend_contract, a_batch_of_several_pieces_uses_each_pieces_grant) {
  pair p{GetParam()};
  fill(p.a.memory, 1);
  auto work =
      p.make_batch(p.a, direction::write, p.grant(p.b, access::write, t1, {{0, 4096, 0, 1}}),
                   {{0, 0, 4096, 0, 0, 1}});
  const std::vector<segment> second{{8192, mib, 5000, 0, 0, 1}, {20'000, mib + 6000, 77, 0, 0, 1}};
  work.pieces.push_back({p.a.region, p.grant(p.b, access::write, t1, {{mib, 8192, 0, 1}}), second});
  const auto done = p.run(p.a, std::move(work));
  ASSERT_FALSE(done.failure) << to_string(*done.failure);
  EXPECT_EQ(done.bytes, 4096U + 5077U);
  expect_moved(p.a.memory, p.b.memory, second, direction::write);
}

TEST_P(backend_contract, memory_that_the_engine_owns_moves_too) {
  if (GetParam().kind == backend_kind::xgmi) GTEST_SKIP() << "it moves memory of GPUs only";
  if (const auto why = why_engine_memory_does_not_move(GetParam())) GTEST_SKIP() << *why;
  pair p{GetParam()};
  std::vector<std::byte> mine(3 * mib);
  std::vector<std::byte> theirs(3 * mib);
  fill(mine, 5);
  const auto local = p.a.place->register_memory(mine, "engine a");
  const auto remote = p.b.place->register_memory(theirs, "engine b");
  ASSERT_TRUE(local && remote);
  const auto given = p.b.wire->grant(*remote, {{0, 3 * mib, 0, 1}}, access::read_write, t1);
  ASSERT_TRUE(given);
  auto work = p.make_batch(p.a, direction::write, std::make_shared<const remote_grant>(*given),
                           {{0, 0, 3 * mib, 0, 0, 1}});
  work.pieces[0].local = *local;
  const auto done = p.run(p.a, work);
  ASSERT_FALSE(done.failure) << to_string(*done.failure);
  EXPECT_EQ(mine, theirs);
  fill(theirs, 6);
  work.id = batch_id{777};
  work.dir = direction::read;
  ASSERT_FALSE(p.run(p.a, work).failure);
  EXPECT_EQ(mine, theirs);
  p.b.wire->fence(t1);
  ASSERT_TRUE(p.until([&] { return p.b.place->deregister(*remote).has_value(); }));
  ASSERT_TRUE(p.until([&] { return p.a.place->deregister(*local).has_value(); }));
}

TEST_P(backend_contract, memory_that_is_registered_again_at_the_same_address_is_other_memory) {
  if (GetParam().kind == backend_kind::xgmi) GTEST_SKIP() << "it moves memory of GPUs only";
  if (const auto why = why_engine_memory_does_not_move(GetParam())) GTEST_SKIP() << *why;
  pair p{GetParam()};
  constexpr std::size_t size = 200'000;
  auto* at = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(at, MAP_FAILED);
  const std::span memory{static_cast<std::byte*>(at), size};
  for (std::uint32_t round = 1; round <= 3; ++round) {
    const transfer_id transfer{round};
    const auto region = p.b.place->register_memory(memory, "engine");
    ASSERT_TRUE(region) << to_string(region.error());
    auto given = p.b.wire->grant(*region, {{0, size, 0, 1}}, access::read_write, transfer);
    ASSERT_TRUE(given) << to_string(given.error());
    const auto grant = std::make_shared<const remote_grant>(std::move(*given));
    fill(p.a.memory, round);
    const std::vector<segment> all{{0, 0, size, 0, 0, 1}};
    ASSERT_FALSE(p.run(p.a, p.make_batch(p.a, direction::write, grant, all)).failure);
    expect_moved(p.a.memory, memory, all, direction::write);
    fill(memory, 100 + round);
    ASSERT_FALSE(p.run(p.a, p.make_batch(p.a, direction::read, grant, all)).failure);
    expect_moved(memory, p.a.memory, all, direction::read);
    EXPECT_FALSE(p.b.place->deregister(*region)) << "it is in use";
    p.b.wire->fence(transfer);
    ASSERT_TRUE(p.until([&] { return p.b.place->deregister(*region).has_value(); }));
    // Maps other pages at the same address.
    ASSERT_EQ(
        ::mmap(at, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0),
        at);
  }
  ::munmap(at, size);
}

TEST_P(any_lanes, a_frame_is_delivered_after_every_byte_of_its_batch) {
  pair p{GetParam()};
  constexpr std::uint64_t size = 4 * mib;
  std::atomic<int> wrong{0};
  p.b.sink->when_frame = [&](const std::string& frame) {
    const auto expected = static_cast<std::byte>(std::stoi(frame));
    // The frame names the pattern, and all bytes of the pattern must have landed, from the first to
    // the last.
    const auto landed = p.b.memory.first(size);
    for (std::size_t i = 0; i < landed.size(); i += 509) wrong += landed[i] != expected;
    wrong += landed.back() != expected;
  };
  const auto grant = p.grant(p.b, access::write, t1);
  for (int round = 1; round <= 12; ++round) {
    std::memset(p.a.memory.data(), round, size);
    std::vector<segment> segments;
    for (std::uint64_t at = 0; at < size; at += 65'536)
      segments.push_back({at, size - 65'536 - at, 65'536, 0, 0, 1});
    ASSERT_FALSE(
        p.run(p.a, p.make_batch(p.a, direction::write, grant, segments, std::to_string(round)))
            .failure);
    ASSERT_TRUE(p.until([&] { return p.b.sink->framed() == static_cast<std::size_t>(round); }));
  }
  EXPECT_EQ(wrong, 0);
}

TEST_P(any_lanes, a_reads_frame_reaches_the_target_after_the_data_reached_the_initiator) {
  pair p{GetParam()};
  fill(p.b.memory, 9);
  const std::vector<segment> segments{{0, 0, 3 * mib, 0, 0, 1}};
  std::atomic<bool> whole{false};
  p.b.sink->when_frame = [&](const std::string&) {
    whole = std::memcmp(p.a.memory.data(), p.b.memory.data(), 3 * mib) == 0;
  };
  ASSERT_FALSE(p.run(p.a, p.make_batch(p.a, direction::read, p.grant(p.b, access::read, t1),
                                       segments, "read it"))
                   .failure);
  ASSERT_TRUE(p.until([&] { return p.b.sink->framed() == 1; }));
  EXPECT_TRUE(whole);
}

TEST_P(any_lanes, session_frames_arrive_in_order_and_whole_up_to_the_largest) {
  pair p{GetParam()};
  std::vector<std::string> sent;
  for (const std::size_t size :
       {0UL, 1UL, 47UL, 48UL, 4096UL, 8192UL, 65'536UL, 300'000UL, std::size_t{link::max_frame}}) {
    std::string frame(size, '\0');
    for (std::size_t i = 0; i < size; ++i) frame[i] = static_cast<char>('a' + (i * 31 + size) % 26);
    sent.push_back(frame);
  }
  for (int i = 0; i < 500; ++i) sent.push_back("frame " + std::to_string(i));
  for (const auto& frame : sent) {
    ASSERT_TRUE(p.until([&] {
      return p.a.wire->send_frame(std::as_bytes(std::span{frame.data(), frame.size()})).has_value();
    }));
  }
  ASSERT_TRUE(p.until([&] { return p.b.sink->framed() == sent.size(); }));
  EXPECT_EQ(p.b.sink->frames, sent);
}

TEST_P(backend_contract, frames_that_nobody_waits_for_keep_their_place_among_the_others) {
  pair p{GetParam()};
  std::vector<std::string> sent;
  for (int i = 0; i < 300; ++i) {
    sent.push_back("frame " + std::to_string(i));
    const auto frame = std::as_bytes(std::span{sent.back().data(), sent.back().size()});
    ASSERT_TRUE(i % 3 == 0 ? p.a.wire->send_frame(frame) : p.a.wire->send_soon(frame));
  }
  ASSERT_TRUE(p.until([&] { return p.b.sink->framed() == sent.size(); }));
  EXPECT_EQ(p.b.sink->frames, sent);
}

// Whatever the progress thread is doing: polling, about to sleep, or asleep.
TEST_P(backend_contract, a_frame_that_nobody_waits_for_comes_without_another_behind_it) {
  pair p{GetParam()};
  const std::string word = "release";
  const auto frame = std::as_bytes(std::span{word.data(), word.size()});
  for (std::size_t i = 1; i <= 400; ++i) {
    ASSERT_TRUE(p.a.wire->send_soon(frame));
    ASSERT_TRUE(p.until([&] { return p.b.sink->framed() == i; })) << "frame " << i << " stayed";
    std::this_thread::sleep_for(std::chrono::microseconds{i * 29 % 500});
  }
}

TEST_P(any_lanes, many_batches_in_flight_both_ways_at_once_all_complete_correctly) {
  pair p{GetParam()};
  constexpr std::uint64_t size = 30'000;
  constexpr std::uint64_t count = 200;
  // a writes its first half to b's first half, b reads a's second half into its own second half.
  fill(p.a.memory, 1);
  fill(p.b.memory, 2);
  const auto for_a = p.grant(p.b, access::write, t1);
  const auto for_b = p.grant(p.a, access::read, t2);
  for (std::uint64_t i = 0; i < count; ++i) {
    const auto at = i * size;
    ASSERT_TRUE(p.a.wire->post(p.make_batch(p.a, direction::write, for_a,
                                            {{at, (count - 1 - i) * size, size, 0, 0, 1}},
                                            std::to_string(i))));
    ASSERT_TRUE(p.b.wire->post(
        p.make_batch(p.b, direction::read, for_b, {{8 * mib + at, 8 * mib + at, size, 0, 0, 1}})));
  }
  ASSERT_TRUE(p.until([&] {
    return p.a.sink->completed() == count && p.b.sink->completed() == count &&
           p.b.sink->framed() == count;
  }));
  for (const auto& done : p.a.sink->completions) EXPECT_FALSE(done.failure);
  for (const auto& done : p.b.sink->completions) EXPECT_FALSE(done.failure);
  for (std::uint64_t i = 0; i < count; ++i) {
    ASSERT_EQ(
        std::memcmp(p.a.memory.data() + i * size, p.b.memory.data() + (count - 1 - i) * size, size),
        0);
  }
  EXPECT_EQ(std::memcmp(p.a.memory.data() + 8 * mib, p.b.memory.data() + 8 * mib, count * size), 0);
  EXPECT_EQ(p.a.wire->stats().in_flight, 0U);
  EXPECT_EQ(p.a.wire->stats().batches_completed, count);
}

TEST_P(backend_contract, a_callback_may_post_and_send_on_its_own_link) {
  pair p{GetParam()};
  std::atomic<int> echoed{0};
  // Answers each frame until one has gone back and forth 100 times.
  p.b.sink->when_frame = [&](const std::string& frame) {
    EXPECT_TRUE(p.b.wire->send_frame(std::as_bytes(std::span{frame.data(), frame.size()})));
  };
  p.a.sink->when_frame = [&](const std::string& frame) {
    if (++echoed < 100) {
      EXPECT_TRUE(p.a.wire->send_frame(std::as_bytes(std::span{frame.data(), frame.size()})));
    }
  };
  const std::string first = "ball";
  ASSERT_TRUE(p.a.wire->send_frame(std::as_bytes(std::span{first.data(), first.size()})));
  EXPECT_TRUE(p.until([&] { return echoed == 100; }));
}

TEST_P(backend_contract, several_threads_may_post_at_once) {
  pair p{GetParam()};
  fill(p.a.memory, 3);
  const auto grant = p.grant(p.b, access::write, t1);
  constexpr int threads = 3;
  constexpr int each = 50;
  std::vector<batch> work;
  for (int i = 0; i < threads * each; ++i) {
    const auto at = static_cast<std::uint64_t>(i) * 10'000;
    work.push_back(p.make_batch(p.a, direction::write, grant, {{at, at, 10'000, 0, 0, 1}}));
  }
  std::vector<std::thread> posting;
  for (int t = 0; t < threads; ++t) {
    posting.emplace_back([&, t] {
      for (int i = 0; i < each; ++i) {
        EXPECT_TRUE(p.a.wire->post(std::move(work[static_cast<std::size_t>(t * each + i)])));
      }
    });
  }
  for (auto& thread : posting) thread.join();
  ASSERT_TRUE(p.until([&] { return p.a.sink->completed() == threads * each; }));
  EXPECT_EQ(std::memcmp(p.a.memory.data(), p.b.memory.data(), threads * each * 10'000), 0);
}

TEST_P(any_lanes, any_post_batch_size_moves_the_same_bytes) {
  for (const std::int32_t size : {1, 3, 4096}) {
    pair p{GetParam(), [size](link_options& options) { options.post_batch_size = size; }};
    fill(p.a.memory, 4);
    std::vector<segment> segments;
    for (std::uint64_t i = 0; i < 500; ++i) segments.push_back({i * 4096, i * 5000, 4096, 0, 0, 1});
    const auto done =
        p.run(p.a, p.make_batch(p.a, direction::write, p.grant(p.b, access::write, t1), segments));
    ASSERT_FALSE(done.failure) << to_string(*done.failure);
    expect_moved(p.a.memory, p.b.memory, segments, direction::write);
  }
}

}  // namespace troupe::transport::contract
