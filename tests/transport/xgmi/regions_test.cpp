#include <atomic>
#include <cstring>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "troupe/transport/xgmi/peer_gpu_regions.hpp"

#include "gpu_double.hpp"
#include "waiting.hpp"

// Memory that a peer shares: opened once, checked, and closed with its last user.
namespace troupe::transport::xgmi {
namespace {

using ::testing::HasSubstr;
using troupe::testing::comes_true;

/// Opens any handle, as memory of its own, and counts.
class opening_double final : public gpu_double {
 public:
  using gpu_double::gpu_double;
  result<std::byte*> open_memory(std::uint32_t device, const memory_handle& handle) override {
    std::uint64_t size = 0;
    std::memcpy(&size, handle.data(), sizeof size);
    ++opened;
    ++open;
    return allocate(device, size);
  }
  void close_memory(std::uint32_t device, std::byte* base) noexcept override {
    --open;
    release(device, base);
  }
  [[nodiscard]] bool comes_to(int wanted) const {
    return comes_true([&] { return open == wanted; });
  }
  std::atomic<int> opened{0}, open{0};
};

shm::gpu_region_shared_message region_at(std::uint32_t number, std::uint64_t offset,
                                         std::uint64_t allocation = 1,
                                         std::uint64_t real_size = 1 << 20) {
  shm::gpu_region_shared_message said;
  said.region = number;
  said.size = 4096;
  said.allocation = allocation;
  said.allocation_size = 1 << 20;
  said.offset = offset;
  said.exported = 1;
  std::memcpy(said.gpu.data(), "0000:0b:00.0", 12);
  std::memcpy(said.handle.data(), &real_size, sizeof real_size);
  return said;
}

struct regions_of_a_peer : ::testing::Test {
  std::unique_ptr<opening_double> owned{std::make_unique<opening_double>()};
  opening_double& driver{*owned};
  gpu_site site{std::move(owned)};
  peer_gpu_regions regions{site, false, 4711};
};

errc code_of(const result<reachable_region>& r) {
  return r ? errc{} : r.error().code;
}

}  // namespace

TEST_F(regions_of_a_peer, regions_of_one_allocation_open_it_once_and_each_lies_at_its_offset) {
  for (std::uint32_t i = 1; i <= 40; ++i) ASSERT_TRUE(regions.add(region_at(i, i * 4096)));
  auto first = regions.reach(region_id{1}, 0).value();
  for (std::uint32_t i = 2; i <= 40; ++i) {
    const auto other = regions.reach(region_id{i}, 0).value();
    EXPECT_EQ(other.base - first.base, (i - 1) * 4096);
  }
  EXPECT_EQ(driver.opened, 1);
  EXPECT_EQ(site.opened.size(), 1U);
}

TEST_F(regions_of_a_peer, an_allocation_is_closed_with_its_last_region_and_its_last_copy) {
  ASSERT_TRUE(regions.add(region_at(1, 0)));
  ASSERT_TRUE(regions.add(region_at(2, 4096)));
  auto copied = regions.reach(region_id{1}, 0).value();
  EXPECT_TRUE(regions.reach(region_id{2}, 0));
  regions.part_with(region_id{1});
  regions.part_with(region_id{2});
  auto parted = regions.take_parted();
  ASSERT_EQ(parted.size(), 1U) << "a copy uses the other";
  EXPECT_EQ(parted[0].id, region_id{2});
  parted.clear();
  EXPECT_EQ(driver.open, 1);
  EXPECT_TRUE(regions.any_parting());
  copied = {};
  parted = regions.take_parted();
  ASSERT_EQ(parted.size(), 1U);
  EXPECT_EQ(parted[0].id, region_id{1});
  EXPECT_EQ(driver.open, 1) << "it is the caller who closes";
  parted.clear();
  EXPECT_TRUE(driver.comes_to(0));
  EXPECT_FALSE(regions.any_parting());
  EXPECT_EQ(code_of(regions.reach(region_id{1}, 0)), errc::grant_revoked);
}

TEST_F(regions_of_a_peer, another_link_to_the_same_process_uses_what_is_open) {
  peer_gpu_regions other{site, false, 4711};
  peer_gpu_regions stranger{site, false, 4712};
  for (auto* one : {&regions, &other, &stranger}) {
    ASSERT_TRUE(one->add(region_at(1, 0)));
    EXPECT_TRUE(one->reach(region_id{1}, 0));
  }
  EXPECT_EQ(driver.opened, 2) << "one per process";
  regions.take_all().clear();
  EXPECT_EQ(driver.open, 2);
  other.take_all().clear();
  stranger.take_all().clear();
  EXPECT_TRUE(driver.comes_to(0));
}

TEST_F(regions_of_a_peer, two_gpus_here_open_it_each_for_itself) {
  ASSERT_TRUE(regions.add(region_at(1, 0)));
  EXPECT_TRUE(regions.reach(region_id{1}, 0));
  EXPECT_TRUE(regions.reach(region_id{1}, 1));
  EXPECT_EQ(driver.opened, 2);
}

TEST_F(regions_of_a_peer, memory_made_again_at_the_same_place_is_opened_again) {
  ASSERT_TRUE(regions.add(region_at(1, 0, 7)));
  const auto before = regions.reach(region_id{1}, 0).value();
  ASSERT_TRUE(regions.add(region_at(2, 0, 8)));
  const auto after = regions.reach(region_id{2}, 0).value();
  EXPECT_NE(before.base, after.base);
}

TEST_F(regions_of_a_peer, what_lies_about_its_size_is_refused) {
  auto outside = region_at(1, (1 << 20) - 4095);
  EXPECT_EQ(regions.add(outside).error().code, errc::unauthorized);
  outside = region_at(1, UINT64_MAX - 100);
  EXPECT_EQ(regions.add(outside).error().code, errc::unauthorized);
  outside = region_at(1, 0);
  outside.size = 0;
  EXPECT_FALSE(regions.add(outside));
  ASSERT_TRUE(regions.add(region_at(2, 0, 9, 4096)));
  EXPECT_EQ(code_of(regions.reach(region_id{2}, 0)), errc::unauthorized) << "it is smaller";
  EXPECT_TRUE(driver.comes_to(0));
  EXPECT_EQ(regions.add(region_at(2, 0)).error().code, errc::unauthorized) << "shared before";
}

TEST_F(regions_of_a_peer, a_lie_about_an_allocation_that_is_open_already_is_refused_too) {
  auto honest = region_at(1, 0, 9, 4096);
  honest.allocation_size = 4096;
  ASSERT_TRUE(regions.add(honest));
  ASSERT_TRUE(regions.reach(region_id{1}, 0));
  ASSERT_TRUE(regions.add(region_at(2, 8192, 9, 4096)));
  EXPECT_EQ(code_of(regions.reach(region_id{2}, 0)), errc::unauthorized);
  EXPECT_TRUE(regions.reach(region_id{1}, 0));
  EXPECT_EQ(driver.opened, 1);
}

TEST_F(regions_of_a_peer,
       a_copy_lets_go_of_the_memory_before_it_says_that_it_uses_the_region_no_more) {
  ASSERT_TRUE(regions.add(region_at(1, 0)));
  auto copied = regions.reach(region_id{1}, 0).value();
  std::weak_ptr<const void> use = copied.use;
  EXPECT_FALSE(regions.take_all().empty());
  bool used_to_the_end = false;
  copied.open = {copied.open.get(),
                 [&, kept = copied.open](const void*) { used_to_the_end = !use.expired(); }};
  { const auto ended = std::exchange(copied, {}); }
  EXPECT_TRUE(used_to_the_end);
}

TEST_F(regions_of_a_peer, a_gpu_that_is_masked_or_out_of_reach_is_named) {
  auto masked = region_at(1, 0);
  std::memcpy(masked.gpu.data(), "0000:cc:00.0", 12);
  ASSERT_TRUE(regions.add(masked));
  const auto unseen = regions.reach(region_id{1}, 0);
  ASSERT_EQ(code_of(unseen), errc::backend_unavailable);
  EXPECT_THAT(unseen.error().message, HasSubstr("0000:cc:00.0"));
  EXPECT_THAT(unseen.error().message, HasSubstr("CUDA_VISIBLE_DEVICES"));
  driver.cut(0, 1);
  ASSERT_TRUE(regions.add(region_at(2, 0)));
  const auto apart = regions.reach(region_id{2}, 0);
  ASSERT_EQ(code_of(apart), errc::backend_unavailable);
  EXPECT_THAT(apart.error().message, HasSubstr("does not reach"));
  EXPECT_TRUE(regions.reach(region_id{2}, 1)) << "its own GPU does";
  auto endless = region_at(3, 0);
  endless.gpu.fill('x');
  EXPECT_EQ(regions.add(endless).error().code, errc::unauthorized);
  auto kept = region_at(4, 0);
  kept.exported = 0;
  ASSERT_TRUE(regions.add(kept));
  EXPECT_EQ(code_of(regions.reach(region_id{4}, 1)), errc::backend_unavailable);
}

}  // namespace troupe::transport::xgmi
