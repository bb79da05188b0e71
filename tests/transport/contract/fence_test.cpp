#include "pair.hpp"

// Quiescent means that no byte lands or is read after the fence, whatever the peer does.
namespace troupe::transport::contract {

namespace {

void fence_and_wait(pair& p, end& e, transfer_id transfer) {
  if (e.wire->fence(transfer) == fence_state::quiescent) return;
  ASSERT_TRUE(p.until([&] { return e.sink->is_quiescent(transfer); }))
      << "the fence was not answered";
}

std::vector<segment> blocks(std::uint64_t count, std::uint64_t size) {
  std::vector<segment> segments;
  for (std::uint64_t i = 0; i < count; ++i) segments.push_back({i * size, i * size, size, 0, 0, 1});
  return segments;
}

}  // namespace

TEST_P(any_lanes, nothing_lands_after_the_target_fenced_while_the_peer_keeps_writing) {
  pair p{GetParam()};
  std::memset(p.a.memory.data(), 0xee, p.a.memory.size());
  const auto segments = blocks(64, 65'536);
  for (int round = 0; round < 8; ++round) {
    const transfer_id transfer{100U + static_cast<unsigned>(round)};
    const auto grant = p.grant(p.b, access::write, transfer);
    const auto before = p.a.sink->completed();
    std::size_t posted = 0;
    for (int i = 0; i < 6; ++i) {
      posted += p.a.wire->post(p.make_batch(p.a, direction::write, grant, segments)).has_value();
    }
    p.drive_for(std::chrono::milliseconds{round % 4});  // cut at different places
    fence_and_wait(p, p.b, transfer);
    // The blocks belong to someone else now.
    std::memset(p.b.memory.data(), 0x11, p.b.memory.size());
    for (int i = 0; i < 3; ++i) {
      posted += p.a.wire->post(p.make_batch(p.a, direction::write, grant, segments)).has_value();
    }
    ASSERT_TRUE(p.until([&] { return p.a.sink->completed() == before + posted; }));
    p.drive_for(5ms);
    ASSERT_TRUE(all_are(p.b.memory, std::byte{0x11}))
        << "a byte landed after the fence, round " << round;
    EXPECT_EQ(p.a.sink->completions.back().failure.value_or(troupe::error{}).code,
              errc::grant_revoked);
  }
  EXPECT_FALSE(p.a.sink->is_broken());
  EXPECT_FALSE(p.b.sink->is_broken());
}

TEST_P(any_lanes, nothing_is_read_after_the_target_fenced) {
  pair p{GetParam()};
  const auto segments = blocks(64, 65'536);
  const auto bytes = std::size_t{64} * 65'536;
  for (int round = 0; round < 8; ++round) {
    const transfer_id transfer{200U + static_cast<unsigned>(round)};
    std::memset(p.b.memory.data(), 0x22, p.b.memory.size());
    const auto grant = p.grant(p.b, access::read, transfer);
    const auto before = p.a.sink->completed();
    std::size_t posted = 0;
    for (int i = 0; i < 6; ++i) {
      posted += p.a.wire->post(p.make_batch(p.a, direction::read, grant, segments)).has_value();
    }
    p.drive_for(std::chrono::milliseconds{round % 3});
    fence_and_wait(p, p.b, transfer);
    std::memset(p.b.memory.data(), 0x99, p.b.memory.size());  // a secret of the next owner
    ASSERT_TRUE(p.until([&] { return p.a.sink->completed() == before + posted; }));
    ASSERT_FALSE(is_in(p.a.memory.first(bytes), std::byte{0x99}));
  }
  EXPECT_FALSE(p.a.sink->is_broken());
}

TEST_P(any_lanes, an_initiators_fence_aborts_its_batches_once_and_frees_its_memory) {
  pair p{GetParam()};
  const auto segments = blocks(128, 65'536);
  for (const auto dir : {direction::write, direction::read}) {
    for (int round = 0; round < 4; ++round) {
      const transfer_id transfer{300U + static_cast<unsigned>(round) +
                                 (dir == direction::read ? 100U : 0U)};
      std::memset(p.a.memory.data(), 0x55, p.a.memory.size());
      std::memset(p.b.memory.data(), 0x33, p.b.memory.size());
      const auto grant = p.grant(p.b, access::read_write, transfer);
      const auto before = p.a.sink->completed();
      std::size_t posted = 0;
      for (int i = 0; i < 4; ++i) {
        posted += p.a.wire->post(p.make_batch(p.a, dir, grant, segments, "f")).has_value();
      }
      p.drive_for(std::chrono::milliseconds{round});
      fence_and_wait(p, p.a, transfer);
      // Local memory is reused at once: no read may land in it, and no write may still take bytes
      // from it.
      std::memset(p.a.memory.data(), 0x44, p.a.memory.size());
      ASSERT_TRUE(p.until([&] { return p.a.sink->completed() == before + posted; }));
      p.drive_for(10ms);
      ASSERT_TRUE(all_are(p.a.memory, std::byte{0x44}));
      if (dir == direction::write) {
        ASSERT_FALSE(is_in(p.b.memory, std::byte{0x44}));
      }
      for (std::size_t i = before; i < p.a.sink->completed(); ++i) {
        const auto& done = p.a.sink->completions[i];
        if (done.failure) {
          EXPECT_EQ(done.failure->code, errc::aborted) << to_string(*done.failure);
        }
      }
      EXPECT_EQ(code_of(p.a.wire->post(p.make_batch(p.a, dir, grant, segments))),
                errc::grant_revoked);
      fence_and_wait(p, p.b, transfer);
    }
  }
  // The link still works.
  const auto done = p.run(p.a, p.make_batch(p.a, direction::write, p.grant(p.b, access::write, t1),
                                            blocks(4, 1000), "still here"));
  EXPECT_FALSE(done.failure);
  EXPECT_FALSE(p.a.sink->is_broken());
  EXPECT_FALSE(p.b.sink->is_broken());
}

/// For the thread sanitizer: once the fence holds, nobody reads the bytes that are then
/// overwritten.
TEST_P(any_lanes, local_memory_is_free_after_a_fence_though_another_thread_goes_on_posting) {
  pair p{GetParam()};
  for (std::uint64_t round = 0; round < 40; ++round) {
    const transfer_id transfer{1000 + round};
    const std::uint64_t size = round % 2 == 0 ? 512 : 4096;
    const auto grant = p.grant(p.b, access::write, transfer);
    std::atomic<bool> posts{false};
    std::size_t posted = 0;
    const auto before = p.a.sink->completed();
    std::thread other{[&] {
      for (const auto last = testing::end_of_wait(); clock::now() < last;) {
        const auto ok =
            p.a.wire->post(p.make_batch(p.a, direction::write, grant, blocks(1, size), "f"));
        posts = true;
        if (ok) {
          ++posted;
        } else if (ok.error().code == errc::overloaded) {
          std::this_thread::yield();
        } else {
          EXPECT_EQ(ok.error().code, errc::grant_revoked) << to_string(ok.error());
          return;
        }
      }
      ADD_FAILURE() << "the fence did not end it";
    }};
    p.until([&] { return posts.load(); });
    fence_and_wait(p, p.a, transfer);
    std::memset(p.a.memory.data(), static_cast<int>(round), size);
    other.join();
    EXPECT_TRUE(p.until([&] { return p.a.sink->completed() == before + posted; }));
    fence_and_wait(p, p.b, transfer);
  }
  EXPECT_FALSE(p.a.sink->is_broken());
  EXPECT_FALSE(p.b.sink->is_broken());
}

TEST_P(any_lanes, a_fence_of_reads_does_not_wait_for_those_of_another_transfer) {
  pair p{GetParam()};
  const auto other = p.grant(p.b, access::read, transfer_id{2});
  // Over rdma each piece is a request of its own: far more than all lanes accept at once.
  const std::vector<segment> scattered{{0, 0, 64, 64, 512, 8000}};
  // On a busy host the other transfer may end before this thread looks; a fence that waited for it
  // would never hold sooner.
  bool held_sooner = false;
  for (std::uint64_t number = 10; number < 20 && !held_sooner; ++number) {
    const transfer_id fenced{number};
    const auto grant = p.grant(p.b, access::read, fenced);
    EXPECT_FALSE(p.run(p.a, p.make_batch(p.a, direction::read, grant, blocks(64, 1000))).failure);
    const auto before = p.a.sink->completed();
    ASSERT_TRUE(p.a.wire->post(p.make_batch(p.a, direction::read, other, scattered)));
    fence_and_wait(p, p.b, fenced);
    held_sooner = p.a.sink->completed() == before;
    ASSERT_TRUE(p.until([&] { return p.a.sink->completed() == before + 1; }));
    EXPECT_FALSE(p.a.sink->completions.back().failure);
  }
  if (GetParam().kind == backend_kind::rdma) {
    EXPECT_TRUE(held_sooner);
  }
}

TEST_P(backend_contract, a_fence_of_one_transfer_leaves_the_others_alone) {
  pair p{GetParam()};
  fill(p.a.memory, 1);
  const auto first = p.grant(p.b, access::write, t1);
  const auto second = p.grant(p.b, access::write, t2);
  fence_and_wait(p, p.b, t1);
  const auto refused =
      p.run(p.a, p.make_batch(p.a, direction::write, first, {{0, 0, 4096, 0, 0, 1}}));
  ASSERT_TRUE(refused.failure);
  EXPECT_EQ(refused.failure->code, errc::grant_revoked);
  EXPECT_FALSE(
      p.run(p.a, p.make_batch(p.a, direction::write, second, {{0, 0, 4096, 0, 0, 1}})).failure);
  EXPECT_EQ(std::memcmp(p.a.memory.data(), p.b.memory.data(), 4096), 0);
}

TEST_P(backend_contract, a_fence_is_idempotent_and_works_on_a_closed_link) {
  pair p{GetParam()};
  const auto grant = p.grant(p.b, access::write, t1);
  fence_and_wait(p, p.b, t1);
  fence_and_wait(p, p.b, t1);
  fence_and_wait(p, p.b, transfer_id{987});  // never seen
  const auto other = p.grant(p.b, access::write, t2);
  p.b.wire->close();
  fence_and_wait(p, p.b, t2);
  EXPECT_TRUE(p.until([&] { return p.b.place->deregister(p.b.region).has_value(); }));
}

TEST_P(backend_contract, a_batch_that_is_refused_does_not_deliver_its_frame) {
  pair p{GetParam()};
  const auto grant = p.grant(p.b, access::write, t1);
  fence_and_wait(p, p.b, t1);
  EXPECT_TRUE(
      p.run(p.a, p.make_batch(p.a, direction::write, grant, blocks(64, 65'536), "lie")).failure);
  const std::string truth = "truth";
  ASSERT_TRUE(p.a.wire->send_frame(std::as_bytes(std::span{truth.data(), truth.size()})));
  ASSERT_TRUE(p.until([&] { return p.b.sink->framed() == 1; }));
  EXPECT_EQ(p.b.sink->frames, std::vector<std::string>{truth});
}

}  // namespace troupe::transport::contract
