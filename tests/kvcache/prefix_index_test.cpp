#include "troupe/kvcache/prefix_index.hpp"

#include <algorithm>
#include <map>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "block_ids.hpp"
#include "random_layouts.hpp"

namespace troupe::kvcache {
namespace {

using testing::dice;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

std::vector<token_id> text(const char* letters) {
  std::vector<token_id> tokens;
  for (; *letters != '\0'; ++letters) tokens.push_back(static_cast<token_id>(*letters));
  return tokens;
}

std::uint64_t always_zero(std::uint64_t, std::span<const token_id>) {
  return 0;
}

TEST(prefix_index, finds_the_longest_known_beginning_in_whole_blocks) {
  prefix_index index{2, 100};
  EXPECT_THAT(index.insert(text("abcdefg"), ids({5, 6, 7})).value(),
              ElementsAre(ids({5})[0], ids({6})[0], ids({7})[0]));
  EXPECT_EQ(index.match(text("abcdxx")).blocks, ids({5, 6}));
  EXPECT_EQ(index.match(text("abcdefgh")).tokens, 6U);
  EXPECT_EQ(index.match(text("abc")).blocks, ids({5}));
  EXPECT_THAT(index.match(text("xbcdef")).blocks, IsEmpty());
  EXPECT_THAT(index.match(text("cdef")).blocks, IsEmpty());
  EXPECT_THAT(index.match({}).blocks, IsEmpty());
}

TEST(prefix_index, a_block_that_is_known_already_stays_and_only_new_ones_are_added) {
  prefix_index index{2, 100};
  ASSERT_TRUE(index.insert(text("abcd"), ids({1, 2})));
  EXPECT_EQ(index.insert(text("abcxyz"), ids({8, 9, 10})).value(), ids({9, 10}));
  EXPECT_EQ(index.match(text("abcxyz")).blocks, ids({1, 9, 10}));
  EXPECT_EQ(index.match(text("abcd")).blocks, ids({1, 2}));
}

TEST(prefix_index, what_has_another_salt_is_not_shared) {
  prefix_index index{2, 100};
  ASSERT_TRUE(index.insert(text("abcd"), ids({1, 2}), 7));
  EXPECT_THAT(index.match(text("abcd")).blocks, IsEmpty());
  EXPECT_THAT(index.match(text("abcd"), 8).blocks, IsEmpty());
  EXPECT_EQ(index.match(text("abcd"), 7).blocks, ids({1, 2}));
}

TEST(prefix_index, is_right_even_when_every_hash_collides) {
  prefix_index index{2, 100, &always_zero};
  ASSERT_TRUE(index.insert(text("abcd"), ids({1, 2})));
  ASSERT_TRUE(index.insert(text("cdab"), ids({3, 4})));
  ASSERT_TRUE(index.insert(text("abab"), ids({6, 5}), 1));
  EXPECT_EQ(index.match(text("abcd")).blocks, ids({1, 2}));
  EXPECT_EQ(index.match(text("cdab")).blocks, ids({3, 4}));
  EXPECT_EQ(index.match(text("abab")).blocks, ids({1}));
  EXPECT_THAT(index.match(text("xxab")).blocks, IsEmpty());
}

TEST(prefix_index, too_few_blocks_and_blocks_with_other_content_are_refused_whole) {
  prefix_index index{2, 100};
  EXPECT_EQ(index.insert(text("abcd"), ids({1})).error().code, errc::out_of_range);
  ASSERT_TRUE(index.insert(text("abcd"), ids({1, 2})));
  EXPECT_EQ(index.insert(text("wxyz"), ids({3, 2})).error().code, errc::already_exists);
  EXPECT_EQ(index.insert(text("wxyz"), ids({3, 3})).error().code, errc::already_exists);
  EXPECT_THAT(index.match(text("wxyz")).blocks, IsEmpty());
  EXPECT_EQ(index.counters().blocks, 2U);
}

TEST(prefix_index, evicts_the_least_recently_used_and_never_a_block_before_those_behind_it) {
  prefix_index index{1, 100};
  ASSERT_TRUE(index.insert(text("abc"), ids({1, 2, 3})));
  ASSERT_TRUE(index.insert(text("abd"), ids({1, 2, 4})));
  ASSERT_TRUE(index.insert(text("x"), ids({5})));
  static_cast<void>(index.match(text("abc")));
  EXPECT_EQ(index.evict(1), ids({4}));
  EXPECT_EQ(index.evict(1), ids({5}));
  EXPECT_EQ(index.evict(10), ids({3, 2, 1}));
  EXPECT_THAT(index.evict(1), IsEmpty());
}

TEST(prefix_index, erasing_a_block_erases_all_that_stand_behind_it) {
  prefix_index index{1, 100};
  ASSERT_TRUE(index.insert(text("abc"), ids({1, 2, 3})));
  ASSERT_TRUE(index.insert(text("abd"), ids({1, 2, 4})));
  EXPECT_THAT(index.erase(block_id{2}),
              UnorderedElementsAre(block_id{2}, block_id{3}, block_id{4}));
  EXPECT_EQ(index.match(text("abc")).blocks, ids({1}));
  EXPECT_THAT(index.erase(block_id{2}), IsEmpty());
}

TEST(prefix_index, keeps_no_more_blocks_than_its_bound) {
  prefix_index index{1, 2};
  EXPECT_EQ(index.insert(text("abc"), ids({1, 2, 3})).value(), ids({1, 2}));
  EXPECT_THAT(index.insert(text("xyz"), ids({4, 5, 6})).value(), IsEmpty());
  EXPECT_EQ(index.evict(1), ids({2}));
  EXPECT_EQ(index.insert(text("xyz"), ids({4, 5, 6})).value(), ids({4}));
}

std::uint64_t poor_hash(std::uint64_t before, std::span<const token_id> tokens) {
  return (before + tokens[0]) % 3;
}

TEST(prefix_index, agrees_with_a_map_of_whole_prefixes) {
  for (const block_hash hash : {block_hash{&xxh3_block_hash}, block_hash{&poor_hash}}) {
    dice d{5};
    constexpr std::size_t block = 2;
    prefix_index index{block, 60, hash};
    std::map<std::vector<token_id>, block_id> model;
    std::uint32_t next = 0;
    for (int step = 0; step < 30'000; ++step) {
      std::vector<token_id> tokens(d.roll<std::size_t>(0, 9));
      for (auto& t : tokens) t = d.roll(0, 1);
      std::vector<block_id> expected;
      for (std::size_t n = block; n <= tokens.size(); n += block) {
        const auto found =
            model.find({tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(n)});
        if (found == model.end()) break;
        expected.push_back(found->second);
      }
      ASSERT_EQ(index.match(tokens).blocks, expected) << step;
      std::vector<block_id> gone;
      if (d.one_in(2)) {
        std::vector<block_id> blocks;
        for (std::size_t i = 0; i < tokens.size() / block; ++i) blocks.push_back(block_id{next++});
        const auto added = index.insert(tokens, blocks).value();
        for (std::size_t i = 0; i < added.size(); ++i) {
          const auto n = static_cast<std::ptrdiff_t>((expected.size() + i + 1) * block);
          ASSERT_TRUE(
              model.emplace(std::vector(tokens.begin(), tokens.begin() + n), added[i]).second);
        }
      } else if (d.one_in(4)) {
        gone = index.evict(d.roll(1, 4));
      } else if (!expected.empty() && d.one_in(4)) {
        gone = index.erase(expected[d.roll<std::size_t>(0, expected.size() - 1)]);
        ASSERT_FALSE(gone.empty());
      }
      for (const auto g : gone) {
        ASSERT_EQ(std::erase_if(model, [&](const auto& entry) { return entry.second == g; }), 1U);
      }
      ASSERT_EQ(index.counters().blocks, model.size());
    }
  }
}

}  // namespace
}  // namespace troupe::kvcache
