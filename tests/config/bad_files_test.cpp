// Each file of bad/ begins with comments `# expect: TEXT`, one for each error in the file, in the
// order of the report. TEXT is what follows "FILE:" in a message ("9: key `a.b`: ...").

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "troupe/config/parse.hpp"

namespace troupe::config {
namespace {

std::vector<std::string> bad_files() {
  std::vector<std::string> names;
  for (const auto& entry :
       std::filesystem::directory_iterator{TROUPE_SOURCE_DIR "/tests/config/bad"}) {
    if (entry.path().extension() == ".yaml") names.push_back(entry.path().stem().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::string path_of(const std::string& name) {
  return TROUPE_SOURCE_DIR "/tests/config/bad/" + name + ".yaml";
}

std::vector<std::string> expectations(const std::string& path) {
  constexpr std::string_view mark = "# expect: ";
  std::vector<std::string> result;
  std::ifstream file{path};
  for (std::string line; std::getline(file, line) && line.starts_with(mark);) {
    result.push_back(line.substr(mark.size()));
  }
  return result;
}

class bad_file : public testing::TestWithParam<std::string> {};

TEST_P(bad_file, is_refused_with_exactly_the_messages_that_it_announces) {
  const std::string path = path_of(GetParam());
  const auto expected = expectations(path);
  ASSERT_FALSE(expected.empty()) << path << " announces no message";
  const auto outcome = load(path);
  EXPECT_FALSE(outcome.value);
  std::vector<std::string> messages;
  for (const auto& what : outcome.issues) {
    const std::string text = to_string(what);
    ASSERT_TRUE(text.starts_with(path + ":")) << text;
    auto rest = text.substr(path.size() + 1);
    if (rest.starts_with(' ')) rest.erase(0, 1);  // "FILE: ..." for an error in the file as a whole
    messages.push_back(rest);
  }
  EXPECT_THAT(messages, testing::ElementsAreArray(expected));
}

INSTANTIATE_TEST_SUITE_P(each, bad_file, testing::ValuesIn(bad_files()), [](const auto& file) {
  std::string name = file.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

TEST(bad_files, are_at_least_forty) {
  EXPECT_GE(bad_files().size(), 40U);
}

}  // namespace
}  // namespace troupe::config
