#include <algorithm>
#include <atomic>
#include <thread>

#include "pair.hpp"

// Standing grants, which outlive transfers, and regions that are withdrawn while peers use them.
namespace troupe::transport::contract {

namespace {

constexpr std::uint64_t block = 65'536;

std::vector<segment> blocks(std::uint64_t count, std::uint64_t first = 0) {
  std::vector<segment> segments;
  for (std::uint64_t i = first; i < first + count; ++i) {
    segments.push_back({i * block, i * block, block, 0, 0, 1});
  }
  return segments;
}

std::shared_ptr<const remote_grant> standing(pair& p, end& owner, access rights) {
  return p.grant(owner, rights, grant_scope::for_all_transfers());
}

batch of_transfer(batch work, transfer_id transfer) {
  work.transfer = transfer;
  return work;
}

void wait_for(pair& p, const end& e, transfer_id transfer, fence_state state) {
  if (state == fence_state::quiescent) return;
  ASSERT_TRUE(p.until([&] { return e.sink->is_quiescent(transfer); }))
      << "the fence was not answered";
}

/// Drives the other end of a polled link while the test waits for one end.
class driven {
 public:
  driven(const variant& with, const end& e)
      : thread_{[this, &e, polls = with.workers == 0] {
          while (polls && !stop_.load()) e.place->poll();
        }} {}
  driven(const driven&) = delete;
  driven& operator=(const driven&) = delete;
  ~driven() {
    stop_.store(true);
    thread_.join();
  }

 private:
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace

TEST_P(any_lanes, one_standing_grant_serves_the_batches_of_many_transfers) {
  pair p{GetParam()};
  fill(p.a.memory, 1);
  const auto grant = standing(p, p.b, access::read_write);
  EXPECT_TRUE(grant->standing);
  for (std::uint64_t i = 0; i < 8; ++i) {
    const auto segments = blocks(4, 4 * i);
    const auto wrote = p.run(p.a, of_transfer(p.make_batch(p.a, direction::write, grant, segments),
                                              transfer_id{400 + i}));
    ASSERT_FALSE(wrote.failure) << to_string(*wrote.failure);
    EXPECT_EQ(wrote.transfer, transfer_id{400 + i});
    expect_moved(p.a.memory, p.b.memory, segments, direction::write);
  }
  fill(p.b.memory, 2);
  const auto segments = blocks(4);
  const auto read = p.run(
      p.a, of_transfer(p.make_batch(p.a, direction::read, grant, segments), transfer_id{500}));
  ASSERT_FALSE(read.failure) << to_string(*read.failure);
  expect_moved(p.a.memory, p.b.memory, segments, direction::read);
}

TEST_P(any_lanes, a_fence_of_one_transfer_leaves_a_standing_grant_to_the_others) {
  pair p{GetParam()};
  fill(p.a.memory, 3);
  const auto grant = standing(p, p.b, access::write);
  const auto before = p.a.sink->completed();
  std::size_t posted = 0;
  for (int i = 0; i < 4; ++i) {
    posted +=
        p.a.wire->post(of_transfer(p.make_batch(p.a, direction::write, grant, blocks(64)), t1))
            .has_value();
  }
  wait_for(p, p.a, t1, p.a.wire->fence(t1));
  wait_for(p, p.b, t1, p.b.wire->fence(t1));
  ASSERT_TRUE(p.until([&] { return p.a.sink->completed() == before + posted; }));
  const auto refused =
      p.a.wire->post(of_transfer(p.make_batch(p.a, direction::write, grant, blocks(1)), t1));
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, errc::grant_revoked);
  const auto done =
      p.run(p.a, of_transfer(p.make_batch(p.a, direction::write, grant, blocks(4)), t2));
  EXPECT_FALSE(done.failure) << to_string(*done.failure);
  expect_moved(p.a.memory, p.b.memory, blocks(4), direction::write);
}

TEST_P(any_lanes, nothing_lands_after_a_standing_grant_was_revoked) {
  pair p{GetParam()};
  std::memset(p.a.memory.data(), 0xee, p.a.memory.size());
  for (int round = 0; round < 6; ++round) {
    const auto grant = standing(p, p.b, access::write);
    const auto before = p.a.sink->completed();
    std::size_t posted = 0;
    const auto post = [&](int count) {
      for (int i = 0; i < count; ++i) {
        const transfer_id transfer{600U + static_cast<unsigned>(10 * round + i)};
        posted += p.a.wire
                      ->post(of_transfer(p.make_batch(p.a, direction::write, grant, blocks(64)),
                                         transfer))
                      .has_value();
      }
    };
    post(6);
    p.drive_for(std::chrono::milliseconds{round % 4});  // cut at different places
    wait_for(p, p.b, grant->transfer, p.b.wire->revoke(*grant));
    std::memset(p.b.memory.data(), 0x11, p.b.memory.size());
    post(3);
    ASSERT_TRUE(p.until([&] { return p.a.sink->completed() == before + posted; }));
    p.drive_for(5ms);
    ASSERT_TRUE(all_are(p.b.memory, std::byte{0x11}))
        << "a byte landed after the grant was revoked, round " << round;
    EXPECT_EQ(p.a.sink->completions.back().failure.value_or(troupe::error{}).code,
              errc::grant_revoked);
  }
  EXPECT_FALSE(p.a.sink->is_broken());
  EXPECT_FALSE(p.b.sink->is_broken());
}

TEST_P(backend_contract, a_standing_grant_is_revoked_alone) {
  pair p{GetParam()};
  fill(p.a.memory, 4);
  const auto one = standing(p, p.b, access::write);
  const auto other = standing(p, p.b, access::write);
  EXPECT_NE(one->transfer, other->transfer);
  wait_for(p, p.b, one->transfer, p.b.wire->revoke(*one));
  wait_for(p, p.b, one->transfer, p.b.wire->revoke(*one));
  const auto refused =
      p.run(p.a, of_transfer(p.make_batch(p.a, direction::write, one, blocks(2)), t1));
  ASSERT_TRUE(refused.failure);
  EXPECT_EQ(refused.failure->code, errc::grant_revoked);
  EXPECT_EQ(refused.bad_segments, (std::vector<std::uint32_t>{0, 1}));
  const auto done =
      p.run(p.a, of_transfer(p.make_batch(p.a, direction::write, other, blocks(2)), t1));
  EXPECT_FALSE(done.failure) << to_string(*done.failure);
  expect_moved(p.a.memory, p.b.memory, blocks(2), direction::write);
}

// Where the target itself checks, only the target knows which grants stand.
TEST_P(backend_contract, a_peer_cannot_make_a_grant_stand) {
  if (GetParam().kind != backend_kind::tcp) GTEST_SKIP() << "the initiator checks";
  pair p{GetParam()};
  auto forged = *p.grant(p.b, access::write, t1);
  forged.standing = true;
  const auto done =
      p.run(p.a, of_transfer(p.make_batch(p.a, direction::write,
                                          std::make_shared<const remote_grant>(forged), blocks(2)),
                             t2));
  ASSERT_TRUE(done.failure);
  EXPECT_EQ(done.failure->code, errc::unauthorized);
}

TEST_P(any_lanes, a_region_is_withdrawn_while_the_peer_writes_into_it) {
  pair p{GetParam()};
  const auto spare = p.b.place->allocate(block, "spare");
  ASSERT_TRUE(spare);
  const auto grant = standing(p, p.b, access::write);
  const auto of_one = p.grant(p.b, access::write, t1);
  const auto before = p.a.sink->completed();
  std::size_t posted = 0;
  for (int i = 0; i < 6; ++i) {
    const auto& with = i % 2 == 0 ? grant : of_one;
    posted += p.a.wire->post(of_transfer(p.make_batch(p.a, direction::write, with, blocks(64)), t1))
                  .has_value();
  }
  p.drive_for(1ms);
  {
    const driven other{GetParam(), p.a};
    const auto gone = p.b.place->withdraw(p.b.region, longer_than_any_wait);
    ASSERT_TRUE(gone) << to_string(gone.error());
  }
  EXPECT_EQ(p.b.place->bytes(p.b.region).error().code, errc::unknown_region);
  EXPECT_EQ(p.b.wire->grant(p.b.region, {{0, 1, 0, 1}}, access::read, t2).error().code,
            errc::unknown_region);
  ASSERT_TRUE(p.until([&] { return p.a.sink->completed() == before + posted; }));
  const auto late = p.a.wire->post(
      of_transfer(p.make_batch(p.a, direction::write, grant, blocks(1), "never delivered"), t2));
  if (late) {
    ASSERT_TRUE(p.until([&] { return p.a.sink->completed() == before + posted + 1; }));
    EXPECT_EQ(p.a.sink->completions.back().failure.value_or(troupe::error{}).code,
              errc::grant_revoked);
  } else {
    EXPECT_EQ(late.error().code, errc::grant_revoked);
  }
  EXPECT_FALSE(p.a.sink->is_broken());
  EXPECT_FALSE(p.b.sink->is_broken());
  EXPECT_EQ(p.b.sink->framed(), 0U);
}

TEST_P(any_lanes, a_region_is_withdrawn_while_batches_move_it) {
  if (on_gpu(GetParam(), 'a')) GTEST_SKIP() << "its local region is one of the host";
  pair p{GetParam()};
  for (const auto dir : {direction::write, direction::read}) {
    const auto grant = standing(p, p.b, access::read_write);
    const auto local = p.a.place->allocate(pair::region_size, "to be withdrawn");
    ASSERT_TRUE(local);
    const auto before = p.a.sink->completed();
    std::size_t posted = 0;
    for (std::uint64_t i = 0; i < 6; ++i) {
      auto work = of_transfer(p.make_batch(p.a, dir, grant, blocks(64)), transfer_id{700 + i});
      work.pieces.front().local = *local;
      posted += p.a.wire->post(std::move(work)).has_value();
    }
    p.drive_for(1ms);
    {
      const driven other{GetParam(), p.b};
      const auto gone = p.a.place->withdraw(*local, longer_than_any_wait);
      ASSERT_TRUE(gone) << to_string(gone.error());
    }
    ASSERT_TRUE(p.until([&] { return p.a.sink->completed() == before + posted; }));
    for (std::size_t i = before; i < p.a.sink->completed(); ++i) {
      const auto& done = p.a.sink->completions[i];
      if (done.failure) {
        EXPECT_EQ(done.failure->code, errc::aborted) << to_string(*done.failure);
      }
    }
    auto late = of_transfer(p.make_batch(p.a, dir, grant, blocks(1)), transfer_id{800});
    late.pieces.front().local = *local;
    const auto refused = p.a.wire->post(std::move(late));
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, errc::unknown_region);
    const auto done =
        p.run(p.a, of_transfer(p.make_batch(p.a, dir, grant, blocks(2)), transfer_id{900}));
    EXPECT_FALSE(done.failure) << to_string(*done.failure);
    EXPECT_EQ(p.a.place->withdraw(*local, 0ms).error().code, errc::unknown_region);
  }
}

TEST_P(backend_contract, users_of_a_region_are_those_that_a_fence_would_end) {
  pair p{GetParam()};
  EXPECT_TRUE(p.b.wire->users_of(p.b.region).empty());
  const auto of_one = p.grant(p.b, access::write, t1);
  const auto stands = standing(p, p.b, access::write);
  auto users = p.b.wire->users_of(p.b.region);
  std::ranges::sort(users);
  auto expected = std::vector{t1, stands->transfer};
  std::ranges::sort(expected);
  EXPECT_EQ(users, expected);
  EXPECT_TRUE(p.b.wire->users_of(region_id{4'000'000}).empty());
  wait_for(p, p.b, t1, p.b.wire->fence(t1));
  EXPECT_EQ(p.b.wire->users_of(p.b.region), std::vector{stands->transfer});
  wait_for(p, p.b, stands->transfer, p.b.wire->revoke(*stands));
  EXPECT_TRUE(p.b.wire->users_of(p.b.region).empty());
}

}  // namespace troupe::transport::contract
