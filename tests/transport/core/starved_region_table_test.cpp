#include <array>
#include <new>
#include <optional>
#include <vector>

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include "troupe/transport/region_table.hpp"

#include "starving.hpp"

// Registrations that run out of memory leave nothing behind, above all no address of freed memory.

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

/// The descriptor that the kernel would hand out next.
int next_descriptor() {
  const owned_fd next{::dup(0)};
  return next.get();
}

TEST(starved_region_table, a_descriptor_of_memory_that_could_not_be_registered_is_closed) {
  region_table table{1};
  alignas(4096) static std::array<std::byte, 4096> memory{};
  const owned_fd file{::memfd_create("memory", MFD_CLOEXEC)};
  const int before = next_descriptor();
  std::optional<result<region_id>> region;
  starve(
      [&] { region = table.add(memory, "a name that is no short string", {.dmabuf = file.get()}); },
      [&] { EXPECT_EQ(next_descriptor(), before); });
  ASSERT_TRUE(region);
  ASSERT_TRUE(*region) << to_string(region->error());
  EXPECT_TRUE(table.remove(**region));
  EXPECT_EQ(next_descriptor(), before);
}

TEST(starved_region_table, a_removal_is_told_to_all_though_one_of_them_finds_no_memory) {
  region_table table{1};
  std::vector<std::byte> memory(4096);
  const auto region = table.add(memory, "memory").value();
  table.on_removed([](region_id) { throw std::bad_alloc{}; });
  std::optional<region_id> told;
  table.on_removed([&](region_id gone) { told = gone; });
  EXPECT_TRUE(table.remove(region));
  EXPECT_EQ(told, region);
}

}  // namespace
}  // namespace troupe::transport
