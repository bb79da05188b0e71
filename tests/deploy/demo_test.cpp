#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <regex>
#include <string>
#include <tuple>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "command.hpp"
#include "sanitized.hpp"
#include "scratch_folder.hpp"

namespace {

using ::testing::HasSubstr;
using ::testing::Values;
using namespace troupe::testing;

class demo : public ::testing::TestWithParam<std::tuple<const char*, const char*>> {};

TEST_P(demo, moves_a_cache_and_changes_no_token) {
  const auto& [mode, backend] = GetParam();
  const auto ended = run({"demo", "--prompt", "to be", "--max-tokens", "4", "--requests", "2",
                          "--mode", mode, "--backend", backend});
  EXPECT_EQ(ended.code, 0) << ended.out << ended.err;
  EXPECT_THAT(ended.out, HasSubstr("identical: yes"));
  EXPECT_THAT(ended.out, HasSubstr(std::string{"over "} + backend));
}

INSTANTIATE_TEST_SUITE_P(every, demo,
                         ::testing::Combine(Values("write", "read"), Values("shm", "tcp")),
                         [](const auto& tested) {
                           return std::string{std::get<0>(tested.param)} + "_" +
                                  std::get<1>(tested.param);
                         });

TEST(demo, over_what_there_is_not_ends_with_two_before_anything_is_started) {
  const auto xgmi = run({"demo", "--backend", "xgmi"});
  EXPECT_EQ(xgmi.code, 2);
  EXPECT_EQ(xgmi.out, "");
  EXPECT_THAT(xgmi.err, ::testing::StartsWith("troupe demo: backend_unavailable: --backend xgmi"));
  if (have_verbs()) return;
  const auto rdma = run({"demo", "--backend", "rdma"});
  EXPECT_EQ(rdma.code, 2);
  EXPECT_EQ(rdma.out, "");
  EXPECT_THAT(rdma.err, HasSubstr("--backend rdma: not usable: "));
}

TEST(demo, leaves_no_file_behind_but_the_users_secret) {
  EXPECT_EQ(run({"--version"}).code, 0);  // creates the folder of kept files
  const scratch_folder temporary;
  ::setenv("TMPDIR", temporary.path().c_str(), 1);
  const auto ended = run({"demo", "--prompt", "to be", "--max-tokens", "4"});
  ::unsetenv("TMPDIR");
  EXPECT_EQ(ended.code, 0) << ended.out << ended.err;
  for (const auto& folder : {temporary.path(), std::string{std::getenv("XDG_STATE_HOME")}})
    for (const auto& file : std::filesystem::recursive_directory_iterator{folder})
      if (!file.is_directory() && file.path().filename() != "secret") ADD_FAILURE() << file.path();
}

TEST(demo, ctrl_c_leaves_no_process) {
  command demo{{"demo", "--requests", "1000"}};
  ASSERT_TRUE(demo.says("nodes      ")) << demo.err();
  demo.signal(SIGINT);
  EXPECT_EQ(demo.wait(), 130) << demo.out() << demo.err();
  static const std::regex pid{R"(\(pid (\d+))"};
  const auto& out = demo.out();
  std::size_t seen = 0;
  for (std::sregex_iterator it{out.begin(), out.end(), pid}, end; it != end; ++it, ++seen)
    EXPECT_TRUE(vanishes(static_cast<pid_t>(std::stol((*it)[1]))));
  EXPECT_EQ(seen, 2u) << out;
}

TEST(demo, the_longest_prompt_is_in_the_help_and_in_the_error) {
  const auto limit = HasSubstr("8192 bytes");
  EXPECT_THAT(run({"demo", "--help"}).out, limit);
  const auto ended = run({"demo", "--prompt", std::string(8193, 'x')});
  EXPECT_EQ(ended.code, 2);
  EXPECT_THAT(ended.err, limit);
  EXPECT_THAT(ended.err, HasSubstr("8193"));
  EXPECT_THAT(ended.err, ::testing::Not(HasSubstr("xxxxx")));
}

}  // namespace
