#include "pair.hpp"

// What a link must refuse: at once where the initiator can know, else at the target.
namespace troupe::transport::contract {

namespace {

// Where the peer maps our memory, its own kernel moves the bytes: the target revokes, but a peer
// that forges a grant has the mapping anyway. Over sockets the target checks every operation. Over
// rdma the peer's link learns from the target's link what was granted; a peer that bypasses its own
// link is stopped by the NIC (tests/transport/rdma).
constexpr const char* mapped_memory = "the initiator moves without asking the target";
bool target_checks(const variant& with) {
  return !moves_by_itself(with, 'b');
}

}  // namespace

TEST_P(backend_contract, a_segment_outside_either_region_is_refused_by_piece_and_segment) {
  pair p{GetParam()};
  const auto grant = p.grant(p.b, access::read_write, t1);
  constexpr auto size = pair::region_size;
  const std::vector<segment> bad{
      {size, 0, 1, 0, 0, 1},                    // local, beyond the end
      {size - 10, 0, 11, 0, 0, 1},              // local, across the end
      {0, size - 10, 11, 0, 0, 1},              // remote, across the end
      {UINT64_MAX - 3, 0, 8, 0, 0, 1},          // wraps
      {0, UINT64_MAX - 3, 8, 0, 0, 1},          // wraps
      {0, 0, UINT64_MAX, 0, 0, 1},              // longer than anything
      {0, 0, std::uint64_t{1} << 31, 0, 0, 1},  //
      {0, 0, std::uint64_t{1} << 63, 0, 0, 1},  //
      {0, 0, 8, std::uint64_t{1} << 62, 8, 5},  // a repetition wraps
      {0, 0, 8, 8, size / 4, 5},                // the last repetition is outside
  };
  for (const auto dir : {direction::write, direction::read}) {
    for (const auto& s : bad) {
      auto refused = p.a.wire->post(p.make_batch(p.a, dir, grant, {{0, 0, 1, 0, 0, 1}, s}));
      ASSERT_EQ(code_of(refused), errc::out_of_range);
      EXPECT_NE(refused.error().message.find("segment 1"), std::string::npos)
          << refused.error().message;
      EXPECT_NE(refused.error().message.find("piece 0"), std::string::npos)
          << refused.error().message;
    }
  }
  EXPECT_EQ(p.a.wire->stats().in_flight, 0U);
}

TEST_P(backend_contract, a_segment_outside_the_granted_extents_is_refused) {
  pair p{GetParam()};
  const auto grant = p.grant(p.b, access::write, t1, {{4096, 4096, 0, 1}, {65'536, 100, 1000, 10}});
  const auto try_one = [&](segment s) {
    return code_of(p.a.wire->post(p.make_batch(p.a, direction::write, grant, {s})));
  };
  EXPECT_EQ(try_one({0, 4095, 10, 0, 0, 1}), errc::out_of_range);
  EXPECT_EQ(try_one({0, 8190, 10, 0, 0, 1}), errc::out_of_range);
  EXPECT_EQ(try_one({0, 65'536 + 95, 10, 0, 0, 1}), errc::out_of_range);
  EXPECT_EQ(try_one({0, 65'536, 100, 100, 1000, 11}), errc::out_of_range);
  EXPECT_EQ(try_one({0, 4096, 4096, 0, 0, 1}), errc{});
  EXPECT_EQ(try_one({0, 65'536, 100, 100, 1000, 10}), errc{});
}

TEST_P(backend_contract, a_grant_permits_more_parts_than_a_message_may_list) {
  pair p{GetParam()};
  std::vector<extent> parts;
  for (std::uint64_t part = 0; part <= remote_grant::max_extents; ++part) {
    parts.push_back({part * 16, 8, 0, 1});
  }
  const auto last = parts.back().offset;
  const auto grant = p.grant(p.b, access::write, t1, std::move(parts));
  const auto try_one = [&](std::uint64_t offset) {
    const std::vector<segment> one{{0, offset, 8, 0, 0, 1}};
    return code_of(p.a.wire->post(p.make_batch(p.a, direction::write, grant, one)));
  };
  EXPECT_EQ(try_one(last), errc{});
  EXPECT_EQ(try_one(last - 8), errc::out_of_range);
}

TEST_P(backend_contract, a_grant_is_refused_for_what_it_does_not_permit) {
  pair p{GetParam()};
  const auto read_only = p.grant(p.b, access::read, t1);
  const auto write_only = p.grant(p.b, access::write, t1);
  const std::vector<segment> one{{0, 0, 8, 0, 0, 1}};
  EXPECT_EQ(code_of(p.a.wire->post(p.make_batch(p.a, direction::write, read_only, one))),
            errc::unauthorized);
  EXPECT_EQ(code_of(p.a.wire->post(p.make_batch(p.a, direction::read, write_only, one))),
            errc::unauthorized);
  auto stale = *write_only;
  stale.owner = incarnation{stale.owner.value + 1};
  EXPECT_EQ(code_of(p.a.wire->post(p.make_batch(p.a, direction::write,
                                                std::make_shared<const remote_grant>(stale), one))),
            errc::stale_incarnation);
  auto work = p.make_batch(p.a, direction::write, write_only, one);
  work.pieces[0].local = region_id{9999};
  EXPECT_EQ(code_of(p.a.wire->post(std::move(work))), errc::unknown_region);
}

TEST_P(backend_contract, a_grant_that_the_initiator_widened_is_refused_by_the_target) {
  if (!target_checks(GetParam())) GTEST_SKIP() << mapped_memory;
  pair p{GetParam()};
  std::memset(p.b.memory.data(), 0x77, p.b.memory.size());
  const auto real = p.grant(p.b, access::write, t1, {{4096, 4096, 0, 1}});
  auto forged = *real;
  forged.permitted = {{0, pair::region_size, 0, 1}};
  const auto done = p.run(
      p.a, p.make_batch(p.a, direction::write, std::make_shared<const remote_grant>(forged),
                        {{0, 4096, 100, 0, 0, 1}, {0, 100'000, 50'000, 0, 0, 1}}, "not delivered"));
  ASSERT_TRUE(done.failure);
  EXPECT_EQ(done.failure->code, errc::out_of_range);
  EXPECT_EQ(done.bytes, 0U);
  // Over shm the target refuses all that lies in one chunk, over tcp all that is in one frame.
  const bool both = GetParam().kind != backend_kind::rdma;
  EXPECT_EQ(done.bad_segments, both ? std::vector<std::uint32_t>({0, 1}) : std::vector{1U});
  for (std::size_t i = 8192; i < p.b.memory.size(); ++i) ASSERT_EQ(p.b.memory[i], std::byte{0x77});
  // The link still works.
  EXPECT_FALSE(
      p.run(p.a, p.make_batch(p.a, direction::write, real, {{0, 4096, 4096, 0, 0, 1}})).failure);
  EXPECT_EQ(p.b.sink->framed(), 0U);
}

TEST_P(backend_contract, rights_that_the_initiator_forged_are_refused_by_the_target) {
  if (!target_checks(GetParam())) GTEST_SKIP() << mapped_memory;
  pair p{GetParam()};
  fill(p.b.memory, 7);
  const auto write_only = p.grant(p.b, access::write, t1);
  auto forged = *write_only;
  forged.rights = access::read_write;
  const auto done =
      p.run(p.a, p.make_batch(p.a, direction::read, std::make_shared<const remote_grant>(forged),
                              {{0, 0, 4096, 0, 0, 1}}));
  ASSERT_TRUE(done.failure);
  EXPECT_EQ(done.failure->code, errc::unauthorized);
  for (std::size_t i = 0; i < 4096; ++i) ASSERT_EQ(p.a.memory[i], std::byte{0});
  EXPECT_FALSE(
      p.run(p.a, p.make_batch(p.a, direction::write, write_only, {{0, 0, 4096, 0, 0, 1}})).failure);
}

TEST_P(backend_contract, a_grant_id_that_was_never_given_is_refused_by_the_target) {
  pair p{GetParam()};
  auto forged = *p.grant(p.b, access::read_write, t1);
  forged.id ^= 1;
  for (const auto dir : {direction::write, direction::read}) {
    const auto done =
        p.run(p.a, p.make_batch(p.a, dir, std::make_shared<const remote_grant>(forged),
                                {{0, 0, 4096, 0, 0, 1}}));
    ASSERT_TRUE(done.failure);
    EXPECT_EQ(done.failure->code, errc::grant_revoked);
    EXPECT_EQ(done.bad_segments, std::vector<std::uint32_t>{0});
  }
}

// So many segments need more requests than one lane may have open: each refusal makes room for the
// next.
TEST_P(backend_contract, a_refused_read_of_very_many_segments_ends_and_the_next_one_lands) {
  pair p{GetParam()};
  fill(p.b.memory, 11);
  const auto real = p.grant(p.b, access::read, t1);
  auto forged = *real;
  forged.id ^= 1;
  std::vector<segment> scattered;
  for (std::uint64_t i = 60'000; i > 0; --i) scattered.push_back({2 * i, 3 * i, 1, 0, 0, 1});
  const auto refused = p.run(
      p.a,
      p.make_batch(p.a, direction::read, std::make_shared<const remote_grant>(forged), scattered));
  ASSERT_TRUE(refused.failure);
  EXPECT_EQ(refused.failure->code, errc::grant_revoked);
  EXPECT_FALSE(
      p.run(p.a, p.make_batch(p.a, direction::read, real, {{0, 0, 4096, 0, 0, 1}})).failure);
  EXPECT_TRUE(std::ranges::equal(p.a.memory.first(4096), p.b.memory.first(4096)));
}

TEST_P(backend_contract, a_grant_needs_a_region_and_extents_within_it) {
  pair p{GetParam()};
  const auto code = [&](region_id region, std::vector<extent> extents) {
    auto given = p.b.wire->grant(region, std::move(extents), access::write, t1);
    return given ? errc{} : given.error().code;
  };
  EXPECT_EQ(code(region_id{4711}, {{0, 1, 0, 1}}), errc::unknown_region);
  EXPECT_EQ(code(p.b.region, {}), errc::out_of_range);
  EXPECT_EQ(code(p.b.region, {{pair::region_size, 1, 0, 1}}), errc::out_of_range);
  EXPECT_EQ(code(p.b.region, {{UINT64_MAX, 2, 0, 1}}), errc::out_of_range);
  EXPECT_EQ(code(p.b.region, {{0, 16, UINT64_MAX / 2, 4}}), errc::out_of_range);
}

TEST_P(backend_contract, more_batches_than_the_bound_are_overloaded_and_none_is_lost) {
  pair p{GetParam(), [](link_options& options) { options.max_batches = 8; }};
  const auto grant = p.grant(p.b, access::write, t1);
  std::size_t accepted = 0;
  std::size_t refused = 0;
  for (int i = 0; i < 200; ++i) {
    auto ok =
        p.a.wire->post(p.make_batch(p.a, direction::write, grant, {{0, 0, 1 << 20, 0, 0, 1}}));
    if (ok) {
      ++accepted;
    } else {
      EXPECT_EQ(ok.error().code, errc::overloaded);
      ++refused;
    }
  }
  EXPECT_GE(accepted, 8U);
  ASSERT_TRUE(p.until([&] { return p.a.sink->completed() == accepted; }));
  for (const auto& done : p.a.sink->completions) EXPECT_FALSE(done.failure);
  EXPECT_EQ(accepted + refused, 200U);
}

TEST_P(backend_contract, frames_that_the_peer_does_not_take_are_overloaded_and_none_is_lost) {
  if (GetParam().workers != 0) GTEST_SKIP() << "its threads would take them";
  pair p{GetParam(), [](link_options& options) { options.max_queued_frame_bytes = 1u << 20; }};
  const std::vector<std::byte> frame(64u << 10, std::byte{7});
  std::size_t accepted = 0;
  auto sent = p.a.wire->send_frame(frame);
  for (; sent && accepted < 2000; sent = p.a.wire->send_frame(frame)) ++accepted;
  ASSERT_FALSE(sent) << accepted << " frames that nobody takes are kept";
  EXPECT_EQ(sent.error().code, errc::overloaded) << to_string(sent.error());
  ASSERT_TRUE(p.until([&] { return p.b.sink->frames.size() == accepted; }));
  EXPECT_TRUE(p.a.wire->send_frame(frame));
  EXPECT_TRUE(p.until([&] { return p.b.sink->frames.size() == accepted + 1; }));
}

TEST_P(backend_contract, a_frame_that_is_too_large_is_refused) {
  pair p{GetParam()};
  const std::vector<std::byte> frame(link::max_frame + 1);
  EXPECT_EQ(code_of(p.a.wire->send_frame(frame)), errc::out_of_range);
  batch work{
      .id = batch_id{1}, .transfer = t1, .dir = direction::write, .pieces = {}, .frame = frame};
  EXPECT_EQ(code_of(p.a.wire->post(std::move(work))), errc::out_of_range);
}

TEST_P(backend_contract, a_region_in_use_is_not_deregistered) {
  pair p{GetParam()};
  const auto grant = p.grant(p.b, access::write, t1);
  EXPECT_EQ(code_of(p.b.place->deregister(p.b.region)), errc::overloaded);
  p.b.wire->fence(t1);
  EXPECT_TRUE(p.until([&] { return p.b.place->deregister(p.b.region).has_value(); }));
}

}  // namespace troupe::transport::contract
