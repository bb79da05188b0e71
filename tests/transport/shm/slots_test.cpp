#include <array>
#include <atomic>
#include <memory>
#include <thread>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include "troupe/transport/shm/grant_slots.hpp"
#include "troupe/transport/shm/peer_regions.hpp"

namespace troupe::transport::shm {
namespace {

constexpr transfer_id first{1};
constexpr transfer_id second{2};

TEST(slots, a_revoked_slot_with_nobody_inside_is_free_at_once) {
  std::array<grant_slot, 2> shared{};
  slot_owner owner{shared};
  const auto slot = owner.give(10, first, {});
  ASSERT_TRUE(slot);
  EXPECT_TRUE(owner.revoke(first));
  EXPECT_EQ(owner.given(), 0u);
  slot_visit late{shared[*slot], 10};
  EXPECT_FALSE(late);
  EXPECT_EQ(shared[*slot].busy.load(), 0u);
}

TEST(slots, a_slot_whose_visitor_is_inside_drains_until_it_leaves_and_is_not_given_again) {
  std::array<grant_slot, 1> shared{};
  slot_owner owner{shared};
  ASSERT_TRUE(owner.give(10, first, {}));
  slot_visit inside{shared[0], 10};
  ASSERT_TRUE(inside);
  EXPECT_FALSE(owner.revoke(first));
  EXPECT_TRUE(owner.draining(first));
  EXPECT_FALSE(owner.draining(second));
  const auto refused = owner.give(11, second, {});
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, errc::overloaded);
  EXPECT_FALSE(owner.sweep());
  EXPECT_TRUE(inside.leave());  // the owner waits for us, so ring it
  EXPECT_TRUE(owner.sweep());
  EXPECT_FALSE(owner.any_draining());
  EXPECT_TRUE(owner.give(11, second, {}));
}

TEST(slots, a_dead_visitor_is_outside) {
  std::array<grant_slot, 1> shared{};
  slot_owner owner{shared};
  ASSERT_TRUE(owner.give(10, first, {}));
  shared[0].busy.store(1);
  EXPECT_FALSE(owner.revoke(first));
  owner.peer_is_dead();
  EXPECT_FALSE(owner.any_draining());
}

TEST(slots, revoking_one_transfer_leaves_the_others) {
  std::array<grant_slot, 8> shared{};
  slot_owner owner{shared};
  const auto a = owner.give(10, first, {});
  const auto b = owner.give(11, second, {});
  const auto c = owner.give(12, first, {});
  ASSERT_TRUE(a && b && c);
  EXPECT_TRUE(owner.revoke(first));
  EXPECT_FALSE(slot_visit(shared[*a], 10));
  EXPECT_TRUE(slot_visit(shared[*b], 11));
  EXPECT_FALSE(slot_visit(shared[*c], 12));
  owner.revoke_all();
  EXPECT_FALSE(slot_visit(shared[*b], 11));
}

/// The Dekker pattern: after `revoke` says that nobody is inside, the visitor never writes again.
TEST(slots, a_visitor_never_writes_after_the_revocation_was_quiescent) {
  for (int round = 0; round < 2000; ++round) {
    std::array<grant_slot, 1> shared{};
    slot_owner owner{shared};
    ASSERT_TRUE(owner.give(10, first, {}));
    // Plain memory on purpose: the thread sanitizer then checks the ordering.
    std::uint64_t payload = 0;
    std::atomic<bool> started{false};
    std::thread visitor{[&] {
      started.store(true);
      for (int i = 0; i < 100; ++i) {
        slot_visit visit{shared[0], 10};
        if (!visit) return;
        payload += 1;
      }
    }};
    while (!started.load()) std::this_thread::yield();
    if (!owner.revoke(first)) {
      while (owner.any_draining()) owner.sweep();
    }
    payload = 1'000'000;
    visitor.join();
    ASSERT_EQ(payload, 1'000'000u);
  }
}

// -- mapping what a peer hands over

owned_fd memfd(std::uint64_t size, int seals) {
  owned_fd fd{::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING)};
  EXPECT_EQ(::ftruncate(fd.get(), static_cast<off_t>(size)), 0);
  if (seals != 0) {
    EXPECT_EQ(::fcntl(fd.get(), F_ADD_SEALS, seals), 0);
  }
  return fd;
}

region_shared_message announced(std::uint64_t size) {
  region_shared_message made;
  made.region = 5;
  made.size = size;
  return made;
}

TEST(peer_regions, a_file_that_could_be_cut_off_under_us_is_refused) {
  peer_regions regions;
  const auto added = regions.add(announced(8192), memfd(8192, 0));
  ASSERT_FALSE(added);
  EXPECT_EQ(added.error().code, errc::unauthorized);
}

TEST(peer_regions, a_file_shorter_than_announced_is_refused) {
  peer_regions regions;
  EXPECT_FALSE(regions.add(announced(8193), memfd(8192, F_SEAL_SHRINK)));
  EXPECT_FALSE(regions.add(announced(0), memfd(8192, F_SEAL_SHRINK)));
  EXPECT_FALSE(regions.add(announced(UINT64_MAX), memfd(8192, F_SEAL_SHRINK)));
}

TEST(peer_regions, something_that_is_no_memory_file_is_refused) {
  peer_regions regions;
  std::array<int, 2> ends{};
  ASSERT_EQ(::pipe2(ends.data(), O_CLOEXEC), 0);
  owned_fd reader{ends[0]};
  owned_fd writer{ends[1]};
  EXPECT_FALSE(regions.add(announced(4096), std::move(reader)));
}

TEST(peer_regions, a_region_lives_until_its_last_user_lets_go) {
  peer_regions regions;
  ASSERT_TRUE(regions.add(announced(8192), memfd(8192, F_SEAL_SHRINK)));
  EXPECT_FALSE(regions.add(announced(8192), memfd(8192, F_SEAL_SHRINK)));  // once only
  auto held = regions.find(region_id{5});
  ASSERT_TRUE(held);
  regions.remove(region_id{5});
  EXPECT_FALSE(regions.find(region_id{5}));
  held->base()[8191] = std::byte{1};
}

}  // namespace
}  // namespace troupe::transport::shm
