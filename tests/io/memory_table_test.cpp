#include "troupe/io/memory_table.hpp"

#include <gtest/gtest.h>

namespace troupe::io {

namespace {

/// A table whose regions are numbers.
class table_of_numbers {
 public:
  result<memory_id> add(std::size_t begin, std::size_t length) {
    const std::span bytes{storage_.data() + begin, length};
    for (const auto& gap : table.gaps_in(bytes)) {
      table.add_region(region_id{++last_}, gap);
      made.emplace_back(gap.address - address_of(0), gap.length);
    }
    return table.add(bytes, "m", transport::access::read_write);
  }
  [[nodiscard]] std::uint64_t address_of(std::size_t at) const {
    return reinterpret_cast<std::uintptr_t>(storage_.data() + at);
  }
  memory_table table;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> made;  ///< regions: begin, length

 private:
  std::vector<std::byte> storage_ = std::vector<std::byte>(1000);
  std::uint32_t last_{0};
};

using ranges = std::vector<std::pair<std::uint64_t, std::uint64_t>>;

}  // namespace

TEST(memory_table_test, memories_that_overlap_share_regions_that_do_not) {
  table_of_numbers t;
  const auto first = t.add(100, 100).value();
  const auto equal = t.add(100, 100).value();
  const auto inside = t.add(150, 10).value();
  const auto across = t.add(50, 300).value();
  EXPECT_EQ(t.made, (ranges{{100, 100}, {50, 50}, {200, 150}}));
  EXPECT_NE(first, equal);
  EXPECT_EQ(t.table.find(inside)->what.parts.size(), 1U);
  EXPECT_EQ(t.table.find(inside)->what.parts[0].offset, 50U);
  const auto& parts = t.table.find(across)->what.parts;
  ASSERT_EQ(parts.size(), 3U);
  EXPECT_EQ(parts[0].region, region_id{2});
  EXPECT_EQ(parts[1].region, region_id{1});
  EXPECT_EQ(parts[2].region, region_id{3});
  EXPECT_EQ(t.table.find(across)->what.length(), 300U);
}

TEST(memory_table_test, a_region_leaves_with_the_last_memory_that_it_serves) {
  table_of_numbers t;
  const auto first = t.add(100, 100).value();
  const auto equal = t.add(100, 100).value();
  const auto across = t.add(50, 200).value();
  EXPECT_TRUE(t.table.let_leave(first).empty());
  t.table.remove(first);
  EXPECT_TRUE(t.table.let_leave(equal).empty());
  t.table.remove(equal);
  EXPECT_EQ(t.table.let_leave(across).size(), 3U);
  const auto late = t.add(240, 20);  // touches a region that is being removed
  ASSERT_FALSE(late);
  EXPECT_EQ(late.error().code, errc::overloaded);
  t.table.remove(across);
  t.made.clear();
  EXPECT_TRUE(t.add(50, 200));
  EXPECT_EQ(t.made, (ranges{{50, 200}}));
}

TEST(memory_table_test, a_region_leaves_with_the_last_of_two_memories_that_leave_at_once) {
  table_of_numbers t;
  const auto one = t.add(100, 100).value();
  const auto equal = t.add(100, 100).value();
  EXPECT_TRUE(t.table.let_leave(one).empty());
  const auto region = t.table.let_leave(equal);
  ASSERT_EQ(region.size(), 1U);
  EXPECT_EQ(t.table.let_leave(equal), region) << "whoever withdraws it asks again";
  EXPECT_TRUE(t.table.let_leave(one).empty());
  t.table.remove(one);
  EXPECT_EQ(t.table.regions(), region) << "it is still being withdrawn";
  t.table.remove(equal);
  EXPECT_TRUE(t.table.regions().empty());
}

TEST(memory_table_test, numbers_are_drawn_and_memories_are_listed_by_their_age) {
  table_of_numbers t;
  std::vector<memory_id> made;
  for (std::size_t i = 0; i < 20; ++i) made.push_back(t.add(i * 10, 10).value());
  EXPECT_EQ(t.table.all(), made);
  for (std::size_t i = 1; i < made.size(); ++i) {
    EXPECT_NE(made[i].value, made[i - 1].value + 1) << "the next one can be guessed";
  }
}

TEST(memory_table_test, the_newest_of_the_memories_that_hold_an_address_is_found) {
  table_of_numbers t;
  const auto inner = t.add(100, 50).value();
  EXPECT_EQ(t.table.find_at(t.address_of(110), 1)->what.number, inner.value);
  const auto outer = t.add(0, 500).value();
  EXPECT_EQ(t.table.find_at(t.address_of(110), 1)->what.number, outer.value);
  t.table.withdraw(outer);
  EXPECT_EQ(t.table.find_at(t.address_of(110), 1)->what.number, inner.value);
}

TEST(memory_table_test, an_address_is_found_in_a_memory_that_holds_all_the_bytes) {
  table_of_numbers t;
  const auto outer = t.add(0, 500).value();
  const auto inner = t.add(100, 50).value();
  const auto at = [&](std::size_t begin, std::size_t length) {
    const auto* found = t.table.find_at(t.address_of(begin), length);
    return found == nullptr ? memory_id{} : memory_id{found->what.number};
  };
  EXPECT_EQ(at(110, 40), inner);
  EXPECT_EQ(at(110, 41), outer);
  EXPECT_EQ(at(499, 1), outer);
  EXPECT_EQ(at(499, 2), memory_id{});
  EXPECT_EQ(at(500, 1), memory_id{});
  t.table.withdraw(inner);
  EXPECT_EQ(at(110, 40), outer);
}

}  // namespace troupe::io
