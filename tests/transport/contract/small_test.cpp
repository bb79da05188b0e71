#include <algorithm>

#include <gmock/gmock.h>

#include "pair.hpp"

// A few bytes and their notice: a backend may send both in one message, with the same guarantees.
namespace troupe::transport::contract {

namespace {

/// Peers that make progress only when the test polls.
class polled_small : public backend_contract {};

std::vector<variant> polled_variants() {
  auto all = all_variants();
  std::erase_if(all, [](const variant& one) { return one.workers != 0; });
  return all;
}
INSTANTIATE_TEST_SUITE_P(every, polled_small, ::testing::ValuesIn(polled_variants()), name_of);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(polled_small);

/// Expects the bytes of `to` that no segment covers to be unchanged.
void expect_rest_untouched(std::span<const std::byte> to, std::span<const segment> segments,
                           std::byte value, std::uint64_t until) {
  std::vector<bool> named(until);
  for (const auto& s : segments) {
    for (std::uint32_t i = 0; i < s.count; ++i) {
      const auto at = s.remote_offset + i * s.remote_stride;
      std::fill_n(named.begin() + static_cast<std::ptrdiff_t>(at), s.length, true);
    }
  }
  for (std::uint64_t i = 0; i < until; ++i) {
    if (named[i]) continue;
    ASSERT_EQ(to[i], value) << "byte " << i;
  }
}

/// How many of the writes that completed after the first `before` have landed. Expects the others
/// to have failed with `code`.
std::size_t landed_since(const recorder& of, std::size_t before, errc code) {
  std::size_t landed = 0;
  for (std::size_t i = before; i < of.completed(); ++i) {
    const auto& failure = of.completions[i].failure;
    if (!failure) {
      ++landed;
      continue;
    }
    EXPECT_EQ(failure->code, code) << to_string(*failure);
  }
  return landed;
}

}  // namespace

TEST_P(any_lanes, a_few_bytes_land_whole_before_their_notice_whatever_their_number) {
  pair p{GetParam()};
  const auto grant = p.grant(p.b, access::write, t1);
  const std::vector<std::uint64_t> sizes{1, 8, 199, 1023, 1024, 1025, 2500, 4096};
  const std::vector<std::size_t> frames{1, 48, 1800, 3010, 3011, 3012, 3013, 4076, 5000};
  std::uint64_t seed = 0;
  std::atomic<int> early{0};
  segment now;
  p.b.sink->when_frame = [&](const std::string& frame) {
    const bool landed = std::memcmp(p.a.memory.data() + now.local_offset,
                                    p.b.memory.data() + now.remote_offset, now.length) == 0;
    if (!landed || frame.find_first_not_of('f') != std::string::npos) ++early;
  };
  for (const auto size : sizes) {
    for (const auto length : frames) {
      fill(p.a.memory.first(16'384), static_cast<std::uint32_t>(++seed));
      std::memset(p.b.memory.data(), 0x11, 16'384);
      now = {seed % 7, 4096 + seed % 5, size, 0, 0, 1};
      const auto before = p.b.sink->framed();
      const auto done =
          p.run(p.a, p.make_batch(p.a, direction::write, grant, {now}, std::string(length, 'f')));
      ASSERT_FALSE(done.failure) << to_string(*done.failure);
      EXPECT_EQ(done.bytes, size);
      ASSERT_TRUE(p.until([&] { return p.b.sink->framed() == before + 1; }));
      EXPECT_EQ(p.b.sink->frames.back().size(), length);
      expect_rest_untouched(p.b.memory, std::vector{now}, std::byte{0x11}, 16'384);
    }
  }
  EXPECT_EQ(early, 0) << "a notice came before its bytes";
}

TEST_P(backend_contract, tiny_and_strided_segments_with_a_notice_land_each_in_its_place) {
  pair p{GetParam()};
  const auto extents =
      std::vector<extent>{{0, 8000, 0, 1}, {8000, 8000, 0, 1}, {20'000, 100, 200, 60}};
  const auto grant = p.grant(p.b, access::write, t1, extents);
  std::vector<std::vector<segment>> cases;
  for (const std::uint32_t count : {1U, 3U, 100U, 159U, 160U, 170U, 400U}) {
    auto& segments = cases.emplace_back();
    for (std::uint32_t i = 0; i < count; ++i) {
      segments.push_back({i * 11ULL, (count - i) * 13ULL, 1 + i % 5, 0, 0, 1});
      if (i % 3 == 0) segments.push_back({0, 0, 0, 0, 0, 1});
    }
  }
  cases.push_back({{0, 20'000, 10, 16, 200, 60}});                   // in repetitions of an extent
  cases.push_back({{5, 7999, 2, 0, 0, 1}, {9, 8001, 30, 0, 0, 1}});  // over two extents
  cases.push_back({{0, 0, 1, 2, 4, 1024}});                          // too many runs for a message
  cases.push_back({{0, 0, 1024, 0, 0, 1}, {2000, 2000, 1, 0, 0, 1}});
  for (const auto& segments : cases) {
    fill(p.a.memory.first(65'536), 7);
    std::memset(p.b.memory.data(), 0x22, 65'536);
    const auto before = p.b.sink->framed();
    const auto done = p.run(p.a, p.make_batch(p.a, direction::write, grant, segments, "n"));
    ASSERT_FALSE(done.failure) << to_string(*done.failure);
    EXPECT_EQ(done.bytes, total_bytes(segments));
    ASSERT_TRUE(p.until([&] { return p.b.sink->framed() == before + 1; }));
    expect_moved(p.a.memory, p.b.memory, segments, direction::write);
    expect_rest_untouched(p.b.memory, segments, std::byte{0x22}, 65'536);
  }
}

TEST_P(backend_contract, a_few_bytes_in_several_pieces_keep_to_each_pieces_grant) {
  pair p{GetParam()};
  fill(p.a.memory, 3);
  const auto low = p.grant(p.b, access::write, t1, {{0, 4096, 0, 1}});
  const auto high = p.grant(p.b, access::read_write, t1, {{8192, 4096, 0, 1}});
  auto work = p.make_batch(p.a, direction::write, low, {{0, 4000, 96, 0, 0, 1}}, "both");
  work.pieces.push_back({p.a.region, high, {{100, 8192, 96, 0, 0, 1}}});
  work.pieces.push_back({p.a.region, low, {{200, 0, 96, 0, 0, 1}}});
  ASSERT_FALSE(p.run(p.a, std::move(work)).failure);
  EXPECT_EQ(std::memcmp(p.a.memory.data(), p.b.memory.data() + 4000, 96), 0);
  EXPECT_EQ(std::memcmp(p.a.memory.data() + 100, p.b.memory.data() + 8192, 96), 0);
  EXPECT_EQ(std::memcmp(p.a.memory.data() + 200, p.b.memory.data(), 96), 0);
}

TEST_P(any_lanes, nothing_small_lands_after_the_target_fenced_while_the_peer_keeps_writing) {
  pair p{GetParam()};
  std::memset(p.a.memory.data(), 0xee, 65'536);
  for (int round = 0; round < 12; ++round) {
    const transfer_id transfer{500U + static_cast<unsigned>(round)};
    const auto grant = p.grant(p.b, access::write, transfer);
    const auto before = p.a.sink->completed();
    const auto frames_before = p.b.sink->framed();
    std::size_t posted = 0;
    const auto post = [&](int count) {
      for (int i = 0; i < count; ++i) {
        const auto at = static_cast<std::uint64_t>(i) * 64;
        posted +=
            p.a.wire->post(p.make_batch(p.a, direction::write, grant, {{at, at, 64, 0, 0, 1}}, "x"))
                .has_value();
      }
    };
    post(40 * round);
    if (round % 3 != 0) p.drive_for(std::chrono::milliseconds{round % 3});
    const bool at_once = p.b.wire->fence(transfer) == fence_state::quiescent;
    post(20);
    ASSERT_TRUE(at_once || p.until([&] { return p.b.sink->is_quiescent(transfer); }));
    // The blocks belong to someone else now.
    std::memset(p.b.memory.data(), 0x11, 65'536);
    post(20);
    ASSERT_TRUE(p.until([&] { return p.a.sink->completed() == before + posted; }));
    p.drive_for(5ms);
    for (std::size_t i = 0; i < 65'536; ++i) {
      ASSERT_EQ(p.b.memory[i], std::byte{0x11}) << "landed after the fence, round " << round;
    }
    const auto good = landed_since(*p.a.sink, before, errc::grant_revoked);
    ASSERT_TRUE(p.until([&] { return p.b.sink->framed() == frames_before + good; }))
        << "the notices of those that landed, and no others";
  }
  EXPECT_FALSE(p.a.sink->is_broken());
  EXPECT_FALSE(p.b.sink->is_broken());
}

TEST_P(backend_contract, a_small_write_that_the_target_refuses_fails_alone) {
  if (moves_by_itself(GetParam(), 'b')) GTEST_SKIP() << "the initiator moves by itself";
  pair p{GetParam()};
  std::memset(p.a.memory.data(), 0xee, 4096);
  std::memset(p.b.memory.data(), 0x77, p.b.memory.size());
  const auto real = p.grant(p.b, access::write, t1, {{4096, 4096, 0, 1}});
  auto widened = *real;
  widened.permitted = {{0, pair::region_size, 0, 1}};
  const auto forged = std::make_shared<const remote_grant>(widened);
  ASSERT_TRUE(
      p.a.wire->post(p.make_batch(p.a, direction::write, real, {{0, 4096, 8, 0, 0, 1}}, "1")));
  ASSERT_TRUE(
      p.a.wire->post(p.make_batch(p.a, direction::write, forged, {{0, 100'000, 8, 0, 0, 1}}, "2")));
  ASSERT_TRUE(
      p.a.wire->post(p.make_batch(p.a, direction::write, real, {{0, 8184, 8, 0, 0, 1}}, "3")));
  ASSERT_TRUE(p.until([&] { return p.a.sink->completed() == 3 && p.b.sink->framed() == 2; }));
  EXPECT_FALSE(p.a.sink->outcome_of(1).failure);
  EXPECT_FALSE(p.a.sink->outcome_of(3).failure);
  const auto refused = p.a.sink->outcome_of(2);
  ASSERT_TRUE(refused.failure);
  EXPECT_EQ(refused.failure->code, errc::out_of_range) << to_string(*refused.failure);
  EXPECT_EQ(refused.bytes, 0U);
  EXPECT_EQ(refused.bad_segments, std::vector<std::uint32_t>{0});
  // In any order: they may have gone over different lanes.
  EXPECT_THAT(p.b.sink->frames, ::testing::UnorderedElementsAre("1", "3"));
  EXPECT_EQ(p.b.memory[4096], std::byte{0xee});
  EXPECT_EQ(p.b.memory[8191], std::byte{0xee});
  EXPECT_EQ(p.b.memory[100'000], std::byte{0x77});
}

TEST_P(backend_contract, an_initiators_fence_ends_its_small_writes_once_each) {
  pair p{GetParam()};
  for (int round = 0; round < 6; ++round) {
    const transfer_id transfer{700U + static_cast<unsigned>(round)};
    const auto grant = p.grant(p.b, access::write, transfer);
    const auto before = p.a.sink->completed();
    const auto frames_before = p.b.sink->framed();
    std::size_t posted = 0;
    for (int i = 0; i < 100 * round; ++i) {
      posted +=
          p.a.wire->post(p.make_batch(p.a, direction::write, grant, {{0, 0, 64, 0, 0, 1}}, "x"))
              .has_value();
    }
    const bool at_once = p.a.wire->fence(transfer) == fence_state::quiescent;
    ASSERT_TRUE(at_once || p.until([&] { return p.a.sink->is_quiescent(transfer); }));
    ASSERT_TRUE(p.until([&] { return p.a.sink->completed() == before + posted; }));
    const auto good = landed_since(*p.a.sink, before, errc::aborted);
    ASSERT_TRUE(p.until([&] { return p.b.sink->framed() >= frames_before + good; }));
  }
  EXPECT_FALSE(p.a.sink->is_broken());
}

TEST_P(backend_contract, small_writes_answered_from_the_callback_go_back_and_forth) {
  pair p{GetParam()};
  const auto to_b = p.grant(p.b, access::write, t1);
  const auto to_a = p.grant(p.a, access::write, t1);
  constexpr int turns = 300;
  std::atomic<int> wrong{0};
  std::uint64_t last_id = std::uint64_t{1} << 40;
  const auto write = [&](end& from, const std::shared_ptr<const remote_grant>& to, int turn) {
    std::memcpy(from.memory.data() + 4096, &turn, sizeof turn);
    batch work{.id = batch_id{++last_id},
               .transfer = t1,
               .dir = direction::write,
               .pieces = {},
               .frame = {}};
    work.pieces.push_back({from.region, to, {{4096, 128, sizeof turn, 0, 0, 1}}});
    work.frame.resize(8);
    if (!from.wire->post(std::move(work))) ++wrong;
  };
  const auto landed = [](const end& at) {
    int turn = 0;
    std::memcpy(&turn, at.memory.data() + 128, sizeof turn);
    return turn;
  };
  p.b.sink->when_frame = [&](const std::string&) { write(p.b, to_a, landed(p.b) + 1); };
  p.a.sink->when_frame = [&](const std::string&) {
    const auto turn = landed(p.a);
    if (turn < turns) write(p.a, to_b, turn + 1);
  };
  write(p.a, to_b, 1);
  ASSERT_TRUE(p.until([&] { return p.a.sink->framed() == turns / 2; }));
  ASSERT_TRUE(p.until(
      [&] { return p.a.sink->completed() == turns / 2 && p.b.sink->completed() == turns / 2; }));
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(landed(p.a), turns);
}

TEST_P(polled_small, closing_ends_what_a_target_that_does_not_look_has_not_answered) {
  pair p{GetParam()};
  const auto grant = p.grant(p.b, access::write, t1);
  constexpr std::size_t count = 400;
  for (std::size_t i = 0; i < count; ++i) {
    ASSERT_TRUE(
        p.a.wire->post(p.make_batch(p.a, direction::write, grant, {{0, 64, 8, 0, 0, 1}}, "late")));
  }
  p.a.wire->close();
  EXPECT_TRUE(p.until([&] { return p.a.sink->completed() == count; }));
}

TEST_P(polled_small, a_fence_does_not_wait_for_ever_for_a_target_that_does_not_look) {
  pair p{GetParam(), {}, 2s};
  const auto grant = p.grant(p.b, access::write, t1);
  ASSERT_TRUE(p.until([&] {  // the peer has opened the grant
    return p.run(p.a, p.make_batch(p.a, direction::write, grant, {{0, 0, 8, 0, 0, 1}})).bytes == 8;
  }));
  constexpr std::size_t count = 400;
  for (std::size_t i = 0; i < count; ++i) {
    ASSERT_TRUE(
        p.a.wire->post(p.make_batch(p.a, direction::write, grant, {{0, 64, 8, 0, 0, 1}}, "late")));
  }
  const bool at_once = p.a.wire->fence(t1) == fence_state::quiescent;
  const auto last = testing::end_of_wait();
  while (!at_once && !p.a.sink->is_quiescent(t1) && clock::now() < last) p.a.place->poll();
  EXPECT_TRUE(at_once || p.a.sink->is_quiescent(t1));
  EXPECT_EQ(p.a.sink->completed(), count + 1);
  EXPECT_FALSE(p.a.sink->is_broken()) << to_string(*p.a.sink->broken);
  // The peer polls again: the abandoned batch disturbs nothing.
  ASSERT_TRUE(p.until([&] { return p.a.wire->send_frame(std::vector<std::byte>(8)).has_value(); }));
  const auto other = p.grant(p.b, access::write, t2);
  EXPECT_FALSE(
      p.run(p.a, p.make_batch(p.a, direction::write, other, {{0, 64, 8, 0, 0, 1}}, "new")).failure);
  ASSERT_TRUE(p.until([&] { return p.b.sink->framed() > 1 && p.b.sink->frames.back() == "new"; }));
  EXPECT_FALSE(p.a.sink->is_broken());
  EXPECT_FALSE(p.b.sink->is_broken());
}

}  // namespace troupe::transport::contract
