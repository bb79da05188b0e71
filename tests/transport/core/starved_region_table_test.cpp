#include <array>
#include <optional>
#include <vector>

#include <gtest/gtest.h>

#include "troupe/transport/region_table.hpp"

#include "starving.hpp"

// Registrations that find no memory for themselves: nothing of them is there, least of all the address of what is gone.

namespace troupe::transport {
namespace {

using troupe::testing::starve;

TEST(starved_region_table, memory_that_could_not_be_registered_can_be_registered_again) {
  region_table table{1};
  std::vector<std::byte> memory(4096);
  std::optional<result<region_id>> region;
  starve([&] { region = table.add(memory, "a name that is longer than a string itself"); }, [] {});
  ASSERT_TRUE(region);
  ASSERT_TRUE(*region) << to_string(region->error());
  EXPECT_TRUE(table.remove(**region));
}

TEST(starved_region_table, several_that_are_allocated_together_are_there_together_or_not_at_all) {
  constexpr std::array<std::uint64_t, 3> sizes{4096, 4096, 4096};
  region_table table{sizes.size()};
  std::optional<result<allocated_regions>> made;
  starve([&] { made = table.allocate(sizes, "kv", {.pages = page_choice::ordinary}); }, [] {});
  ASSERT_TRUE(made);
  ASSERT_TRUE(*made) << to_string(made->error()) << ": what came before has kept its place";
  EXPECT_EQ((*made)->regions.size(), sizes.size());
}

}  // namespace
}  // namespace troupe::transport
