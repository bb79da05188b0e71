#include "troupe/transport/shm/copy.hpp"

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "noise.hpp"
#include "sanitized.hpp"

namespace troupe::transport::shm {
namespace {

using troupe::testing::noise_of;

class copy_ways : public ::testing::TestWithParam<copy_way> {};

TEST_P(copy_ways, one_run_equals_memcpy_at_every_alignment_and_length_and_touches_nothing_else) {
  const copier copies;
  const auto source = noise_of(8192, 1);
  std::vector<std::byte> target(8192);
  std::vector<std::byte> expected(8192);
  std::mt19937_64 random{2};
  for (std::size_t to = 0; to < 66; ++to) {
    for (std::size_t from = 0; from < 66; from += 1 + to % 3) {
      const std::size_t length = random() % 3 == 0 ? random() % 200 : random() % 6000;
      std::memset(target.data(), 0xee, target.size());
      std::memset(expected.data(), 0xee, expected.size());
      std::memcpy(&expected[64 + to], &source[from], length);
      const copy_run run{&target[64 + to], &source[from], length};
      copies.copy({&run, 1}, GetParam());
      ASSERT_EQ(target, expected) << "to " << to << " from " << from << " length " << length;
    }
  }
}

TEST_P(copy_ways, lists_of_runs_equal_memcpy_whatever_their_mix_of_lengths) {
  const copier copies;
  std::mt19937_64 random{3};
  for (int round = 0; round < (troupe::testing::sanitized ? 10 : 60); ++round) {
    const auto source = noise_of(1 << 20, static_cast<std::uint64_t>(round));
    std::vector<std::byte> target(1 << 20, std::byte{0xee});
    auto expected = target;
    std::vector<copy_run> runs;
    std::size_t at = 0;
    const std::size_t lengths[] = {0, 1, 127, 128, 129, 4096, 4097, 5000, 16384, 40000, 65536};
    while (true) {
      const std::size_t length = lengths[random() % std::size(lengths)];
      const std::size_t gap = random() % 3 == 0 ? random() % 100 : 0;
      if (at + gap + length > target.size()) break;
      const std::size_t from = random() % (source.size() - length);
      std::memcpy(expected.data() + at + gap, source.data() + from, length);
      runs.push_back({target.data() + at + gap, source.data() + from, length});
      at += gap + length;
    }
    std::ranges::shuffle(runs, random);
    copies.copy(runs, GetParam());
    ASSERT_TRUE(target == expected) << round;
  }
}

INSTANTIATE_TEST_SUITE_P(all, copy_ways, ::testing::Values(copy_way::cached, copy_way::streaming));

TEST(copier, chooses_a_way_and_copies_the_same_bytes) {
  const copier copies;
  const auto source = noise_of(1 << 20, 9);
  std::vector<std::byte> target(1 << 20);
  std::vector<copy_run> runs;
  for (std::size_t i = 0; i < 16; ++i) {
    runs.push_back({target.data() + i * 65536, source.data() + (15 - i) * 65536, 65536});
  }
  static_cast<void>(copies.copy(runs));
  for (const auto& run : runs) ASSERT_EQ(std::memcmp(run.to, run.from, run.length), 0);
}

TEST(copier, small_lists_never_pay_for_streaming) {
  const copier copies;
  const auto source = noise_of(4096, 9);
  std::vector<std::byte> target(4096);
  const copy_run run{target.data(), source.data(), 4096};
  EXPECT_EQ(copies.copy({&run, 1}), copy_way::cached);
  EXPECT_EQ(copies.copy({}), copy_way::cached);
}

}  // namespace
}  // namespace troupe::transport::shm
