#include "pair.hpp"

// Batches that are checked once and posted many times.
namespace troupe::transport::contract {

namespace {

std::vector<segment> blocks(std::uint64_t count, std::uint64_t size) {
  std::vector<segment> segments;
  for (std::uint64_t i = 0; i < count; ++i) segments.push_back({i * size, i * size, size, 0, 0, 1});
  return segments;
}

std::shared_ptr<const remote_grant> standing(pair& p, end& owner, access rights) {
  return p.grant(owner, rights, grant_scope::for_all_transfers());
}

std::shared_ptr<const prepared_batch> prepare(end& from, direction dir,
                                              std::shared_ptr<const remote_grant> grant,
                                              std::vector<segment> segments) {
  std::vector<piece> pieces;
  pieces.push_back({from.region, std::move(grant), std::move(segments)});
  auto made = from.wire->prepare(dir, std::move(pieces));
  EXPECT_TRUE(made) << (made ? "" : to_string(made.error()));
  return made.value_or(nullptr);
}

struct poster {
  pair& p;
  std::uint64_t last{1'000'000};

  completion run(const prepared_batch& what, std::span<const std::uint32_t> which = {},
                 std::string_view frame = {}) {
    const auto id = ++last;
    const auto posted = p.a.wire->post_prepared(
        what, {.id = batch_id{id},
               .transfer = transfer_id{id},
               .which = which,
               .frame = std::as_bytes(std::span{frame.data(), frame.size()})});
    EXPECT_TRUE(posted) << (posted ? "" : to_string(posted.error()));
    if (!posted) return {};
    EXPECT_TRUE(p.until([&] { return p.a.sink->has(id); }));
    return p.a.sink->outcome_of(id);
  }
};

}  // namespace

TEST_P(any_lanes, a_prepared_batch_moves_each_time_what_stands_there_then) {
  pair p{GetParam()};
  poster post{p};
  const auto grant = standing(p, p.b, access::read_write);
  for (const std::uint64_t size : {64, 4096, 65'536}) {
    const auto segments = blocks(64, size);
    const auto out = prepare(p.a, direction::write, grant, segments);
    const auto in = prepare(p.a, direction::read, grant, segments);
    for (std::uint32_t round = 0; round < 5; ++round) {
      fill(p.a.memory, round + 1);
      const auto wrote = post.run(*out, {}, "w");
      ASSERT_FALSE(wrote.failure) << to_string(*wrote.failure);
      EXPECT_EQ(wrote.bytes, 64 * size);
      expect_moved(p.a.memory, p.b.memory, segments, direction::write);
      fill(p.b.memory, round + 100);
      const auto read = post.run(*in, {}, "r");
      ASSERT_FALSE(read.failure) << to_string(*read.failure);
      expect_moved(p.a.memory, p.b.memory, segments, direction::read);
    }
  }
  ASSERT_TRUE(p.until([&] { return p.b.sink->framed() == 30; }));
  EXPECT_EQ(p.b.sink->frames[0], "w");
  EXPECT_EQ(p.b.sink->frames[1], "r");
}

TEST_P(any_lanes, a_posting_chooses_segments_in_its_own_order) {
  pair p{GetParam()};
  poster post{p};
  fill(p.a.memory, 7);
  std::memset(p.b.memory.data(), 0, p.b.memory.size());
  const auto segments = blocks(100, 1000);
  const auto out = prepare(p.a, direction::write, standing(p, p.b, access::write), segments);
  EXPECT_EQ(out->segments(), 100U);
  const std::vector<std::uint32_t> which{99, 0, 1, 50};
  const auto done = post.run(*out, which);
  ASSERT_FALSE(done.failure);
  EXPECT_EQ(done.bytes, 4000U);
  for (const auto index : which) {
    expect_moved(p.a.memory, p.b.memory, std::span{segments}.subspan(index, 1), direction::write);
  }
  EXPECT_TRUE(all_are(p.b.memory.subspan(2000, 48'000), std::byte{0}));
}

TEST_P(backend_contract, what_cannot_be_prepared_or_posted_is_refused) {
  pair p{GetParam()};
  const auto of_one = p.grant(p.b, access::write, t1);
  EXPECT_EQ(p.a.wire->prepare(direction::write, {{p.a.region, of_one, blocks(1, 64)}}).error().code,
            errc::unauthorized);
  const auto grant = standing(p, p.b, access::write);
  EXPECT_EQ(
      p.a.wire->prepare(direction::write, {{p.a.region, nullptr, blocks(1, 64)}}).error().code,
      errc::invalid_config);
  EXPECT_EQ(p.a.wire->prepare(direction::read, {{p.a.region, grant, blocks(1, 64)}}).error().code,
            errc::unauthorized);
  for (const segment& beyond : {segment{0, std::uint64_t{1} << 40, 64, 0, 0, 1},
                                segment{std::uint64_t{1} << 40, 0, 64, 0, 0, 1}}) {
    EXPECT_EQ(p.a.wire->prepare(direction::write, {{p.a.region, grant, {beyond}}}).error().code,
              errc::out_of_range);
  }
  EXPECT_EQ(
      p.a.wire->prepare(direction::write, {{region_id{4711}, grant, blocks(1, 64)}}).error().code,
      errc::unknown_region);
  const auto out = prepare(p.a, direction::write, grant, blocks(4, 64));
  const std::vector<std::uint32_t> bad{0, 4};
  const auto refused =
      p.a.wire->post_prepared(*out, {.id = batch_id{1}, .transfer = t1, .which = bad, .frame = {}});
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, errc::out_of_range);
  EXPECT_EQ(p.a.wire->stats().in_flight, 0U);
  p.a.wire->fence(t2);
  EXPECT_EQ(
      p.a.wire->post_prepared(*out, {.id = batch_id{2}, .transfer = t2, .which = {}, .frame = {}})
          .error()
          .code,
      errc::grant_revoked);
}

TEST_P(any_lanes, postings_of_a_revoked_grant_fail_and_name_the_segments_that_were_chosen) {
  pair p{GetParam()};
  poster post{p};
  const auto grant = standing(p, p.b, access::write);
  const auto out = prepare(p.a, direction::write, grant, blocks(10, 64));
  ASSERT_FALSE(post.run(*out).failure);
  if (p.b.wire->revoke(*grant) == fence_state::pending) {
    ASSERT_TRUE(p.until([&] { return p.b.sink->is_quiescent(grant->transfer); }));
  }
  const std::vector<std::uint32_t> which{7, 8};
  const auto done = post.run(*out, which);
  ASSERT_TRUE(done.failure);
  EXPECT_EQ(done.failure->code, errc::grant_revoked);
  EXPECT_EQ(done.bad_segments, (std::vector<std::uint32_t>{0, 1}));
  EXPECT_FALSE(p.a.sink->is_broken());
}

TEST_P(any_lanes, a_prepared_batch_keeps_no_region) {
  if (on_gpu(GetParam(), 'a')) GTEST_SKIP() << "its local region is one of the host";
  pair p{GetParam()};
  poster post{p};
  const auto local = p.a.place->allocate(4096, "local").value();
  std::vector<piece> pieces;
  pieces.push_back({local, standing(p, p.b, access::write), blocks(4, 64)});
  const auto made = p.a.wire->prepare(direction::write, std::move(pieces));
  ASSERT_TRUE(made) << to_string(made.error());
  ASSERT_FALSE(post.run(**made).failure);
  ASSERT_TRUE(p.until([&] { return p.a.place->deregister(local).has_value(); }));
  const auto late = p.a.wire->post_prepared(
      **made, {.id = batch_id{5}, .transfer = t2, .which = {}, .frame = {}});
  ASSERT_FALSE(late);
  EXPECT_EQ(late.error().code, errc::unknown_region);
}

TEST_P(any_lanes, a_prepared_batch_is_in_flight_many_times_at_once) {
  pair p{GetParam()};
  fill(p.a.memory, 9);
  const auto segments = blocks(64, 4096);
  const auto out = prepare(p.a, direction::write, standing(p, p.b, access::write), segments);
  const auto before = p.a.sink->completed();
  for (std::uint64_t i = 0; i < 100; ++i) {
    const auto posted = p.a.wire->post_prepared(
        *out, {.id = batch_id{i + 1}, .transfer = transfer_id{i + 1}, .which = {}, .frame = {}});
    ASSERT_TRUE(posted) << to_string(posted.error());
  }
  ASSERT_TRUE(p.until([&] { return p.a.sink->completed() == before + 100; }));
  for (const auto& done : p.a.sink->completions) EXPECT_FALSE(done.failure);
  expect_moved(p.a.memory, p.b.memory, segments, direction::write);
}

}  // namespace troupe::transport::contract
