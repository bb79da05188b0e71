#include "troupe/io/address_index.hpp"

#include <algorithm>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

// Ranges of addresses, found however they overlap.
namespace troupe::io {

namespace {

struct known_range {
  std::uint64_t begin, length, number;
};

/// What the index is to find in these ranges, oldest first.
std::optional<std::uint64_t> newest_of(const std::vector<known_range>& all, std::uint64_t begin,
                                       std::uint64_t length) {
  std::optional<std::uint64_t> found;
  for (const auto& one : all) {
    if (one.begin <= begin && begin + length <= one.begin + one.length) found = one.number;
  }
  return found;
}

}  // namespace

TEST(address_index_test, the_newest_range_that_holds_a_stretch_is_found_among_any) {
  std::mt19937 random{7};  // NOLINT(cert-msc51-cpp): the same ranges each time
  const auto below = [&](std::uint64_t n) { return random() % n; };
  for (int round = 0; round < 20; ++round) {
    address_index index;
    std::vector<known_range> all;
    for (std::uint64_t number = 1; number <= 300; ++number) {
      all.push_back({below(100), 1 + below(60), number});
      index.add(all.back().begin, all.back().length, number);
      for (auto goes = below(3); goes > 0 && round % 2 == 0 && !all.empty(); --goes) {
        const auto at = all.begin() + static_cast<std::ptrdiff_t>(below(all.size()));
        index.remove(at->number);
        all.erase(at);
      }
      const auto begin = below(160);
      const auto length = 1 + below(20);
      ASSERT_EQ(index.find(begin, length), newest_of(all, begin, length));
    }
    for (const auto& one : all) index.remove(one.number);
    EXPECT_FALSE(index.find(50, 1));
    index.remove(1);  // it is not there
  }
}

TEST(address_index_test, a_stretch_that_wraps_is_in_no_range) {
  address_index index;
  index.add(UINT64_MAX - 10, 10, 1);
  EXPECT_EQ(index.find(UINT64_MAX - 4, 4), 1U);
  EXPECT_FALSE(index.find(UINT64_MAX - 4, 5));
  EXPECT_FALSE(index.find(UINT64_MAX, UINT64_MAX));
}

// A descriptor of 1 MiB has so many memories, and its maker chooses how they lie.
TEST(address_index_test, a_lookup_looks_at_few_nodes_however_the_ranges_lie) {
  constexpr std::uint64_t many = 26'800;
  constexpr std::uint64_t step = 4096;
  constexpr std::size_t few = 40;  // trees, and the depth of one
  const auto most_nodes = [&](auto range_of, std::uint64_t length) {
    address_index index;
    for (std::uint64_t i = 0; i < many; ++i) {
      const auto [begin, size] = range_of(i);
      index.add(begin, size, i + 1);
    }
    std::size_t most = 0;
    for (std::uint64_t i = 0; i < many; ++i) {
      std::size_t nodes = 0;
      static_cast<void>(index.find((i + 1) * step, length, nodes));
      most = std::max(most, nodes);
    }
    return most;
  };
  using range = std::pair<std::uint64_t, std::uint64_t>;
  const auto row = [&](std::uint64_t i) { return range{(i + 1) * step, step}; };
  const auto row_in_one = [&](std::uint64_t i) {
    return i == 0 ? range{0, many * 2 * step} : row(i);
  };
  const auto equal = [&](std::uint64_t) { return range{0, many * 2 * step}; };
  const auto nested = [&](std::uint64_t i) { return range{i, (many + 1) * 2 * step - 2 * i}; };
  for (const auto length : {std::uint64_t{64}, 2 * step}) {
    EXPECT_LE(most_nodes(row, length), few);
    EXPECT_LE(most_nodes(row_in_one, length), few);
    EXPECT_LE(most_nodes(equal, length), few);
    EXPECT_LE(most_nodes(nested, length), few);
  }
}

}  // namespace troupe::io
