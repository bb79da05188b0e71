#include <fstream>
#include <optional>

#include <gtest/gtest.h>

#include "troupe/transport/folder.hpp"

#include "scratch_folder.hpp"
#include "starving.hpp"

namespace troupe::transport {
namespace {

TEST(starved_folder, is_read_whole_or_throws) {
  const troupe::testing::scratch_folder folder;
  const auto path = std::filesystem::path{folder.path()};
  std::ofstream{path / "a file whose name is no short string"} << "1";
  std::ofstream{path / "b"} << "2";
  std::optional<std::vector<std::filesystem::path>> found;
  troupe::testing::starve([&] { found = read_folder(path); }, [] {});
  ASSERT_TRUE(found);
  EXPECT_EQ(found->size(), 2U);
}

TEST(starved_folder, that_is_none_cannot_be_read) {
  EXPECT_FALSE(read_folder("/proc/self/status"));
  EXPECT_FALSE(read_folder("/no such folder"));
}

}  // namespace
}  // namespace troupe::transport
