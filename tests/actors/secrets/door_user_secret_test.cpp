// The secret of a cluster whose file names none: one per user and cluster, and never one that
// another user made.
#include "troupe/actors/secrets/door_user_secret.hpp"

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fails_with.hpp"
#include "scratch_folder.hpp"
#include "text_of.hpp"

namespace troupe::actors {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using troupe::testing::fails_with;
using troupe::testing::text_of;

class secret_of_a_user : public ::testing::Test {
 protected:
  secret_of_a_user() {
    ::setenv("XDG_STATE_HOME", state.c_str(), 1);
    ::setenv("HOME", home.c_str(), 1);
  }
  static mode_t access_of(const std::string& path) {
    struct stat about {};
    EXPECT_EQ(::stat(path.c_str(), &about), 0) << path;
    return about.st_mode & 07777;
  }

  troupe::testing::scratch_folder folder{"user-secret"};
  std::string state = folder.path() + "/state";
  std::string home = folder.path() + "/home";
};

TEST_F(secret_of_a_user, is_made_once_for_the_user_alone_and_found_from_then_on) {
  EXPECT_EQ(user_secret_path("demo").value(), state + "/troupe/demo/secret");
  EXPECT_FALSE(std::filesystem::exists(state)) << "to ask where it is makes nothing";
  const auto path = make_user_secret("demo");
  ASSERT_TRUE(path) << to_string(path.error());
  EXPECT_EQ(*path, state + "/troupe/demo/secret");
  const auto text = text_of(*path);
  EXPECT_EQ(text.size(), 65u) << "256 bits in hexadecimal, and the end of the line";
  EXPECT_EQ(access_of(*path), 0600u);
  EXPECT_EQ(access_of(state + "/troupe/demo"), 0700u);
  EXPECT_EQ(make_user_secret("demo").value(), *path);
  EXPECT_EQ(text_of(*path), text);
  EXPECT_NE(text_of(make_user_secret("other").value()), text);
}

TEST_F(secret_of_a_user, of_the_cluster_that_was_used_last_goes_first_and_there_are_seven_at_most) {
  for (int i = 0; i < 9; ++i) {
    const auto path = make_user_secret("c" + std::to_string(i));
    ASSERT_TRUE(path);
    std::filesystem::last_write_time(
        std::filesystem::path{*path}.parent_path(),
        std::filesystem::file_time_type::clock::now() - std::chrono::hours{100 - i});
  }
  ASSERT_TRUE(make_user_secret("c3"));
  const auto secrets = user_secrets();
  std::vector<std::string> clusters;
  for (const auto& one : secrets) clusters.push_back(one.cluster);
  EXPECT_THAT(clusters, ElementsAre("c3", "c8", "c7", "c6", "c5", "c4", "c2"));
  EXPECT_EQ(secrets.front().path, user_secret_path("c3").value());
}

TEST_F(secret_of_a_user, is_the_same_for_all_that_start_at_once) {
  std::vector<std::string> seen(16);
  {
    std::vector<std::jthread> all;
    for (auto& one : seen) {
      all.emplace_back([&one] {
        if (const auto path = make_user_secret("demo")) one = text_of(*path);
      });
    }
  }
  EXPECT_EQ(seen.front().size(), 65u);
  for (const auto& one : seen) EXPECT_EQ(one, seen.front());
  std::size_t files = 0;
  for ([[maybe_unused]] const auto& one :
       std::filesystem::directory_iterator{state + "/troupe/demo"})
    ++files;
  EXPECT_EQ(files, 1u) << "no draft is left";
}

TEST_F(secret_of_a_user, stands_in_the_home_where_no_state_folder_is_named) {
  ::unsetenv("XDG_STATE_HOME");
  EXPECT_EQ(make_user_secret("demo").value(), home + "/.local/state/troupe/demo/secret");
  ::setenv("XDG_STATE_HOME", "relative", 1);
  EXPECT_EQ(user_secret_path("demo").value(), home + "/.local/state/troupe/demo/secret");
}

TEST_F(secret_of_a_user, without_a_home_says_what_to_set) {
  ::unsetenv("XDG_STATE_HOME");
  ::unsetenv("HOME");
  const auto path = make_user_secret("demo");
  ASSERT_THAT(path, fails_with(errc::invalid_config, HasSubstr("neither XDG_STATE_HOME nor HOME")));
  EXPECT_THAT(path.error().message, HasSubstr("set XDG_STATE_HOME"));
  EXPECT_TRUE(user_secrets().empty());
}

TEST_F(secret_of_a_user, does_not_leave_its_folder_by_the_name_of_a_cluster) {
  for (const auto* name : {"", ".", "..", "../demo", "a/b", "/etc", ".hidden", "-x", "A"}) {
    const auto path = make_user_secret(name);
    ASSERT_FALSE(path) << name;
    EXPECT_EQ(path.error().code, errc::invalid_config);
  }
  EXPECT_FALSE(std::filesystem::exists(state));
}

TEST_F(secret_of_a_user, is_not_used_where_others_can_get_at_its_folder) {
  ASSERT_TRUE(make_user_secret("demo"));
  const auto own = state + "/troupe/demo";
  ASSERT_EQ(::chmod(own.c_str(), 0755), 0);
  EXPECT_THAT(make_user_secret("demo").error().message,
              HasSubstr("others than its owner can get into it"));
  ASSERT_EQ(::chmod(own.c_str(), 0700), 0);
  std::filesystem::create_directory_symlink(own, state + "/troupe/link");
  EXPECT_FALSE(make_user_secret("link"));
  if (::geteuid() != 0) return;
  ASSERT_EQ(::chown(own.c_str(), 1, 1), 0);
  EXPECT_THAT(make_user_secret("demo").error().message, HasSubstr("it belongs to somebody else"));
}

TEST_F(secret_of_a_user, that_cannot_be_made_is_an_error_that_names_its_place) {
  ::setenv("XDG_STATE_HOME", "/proc/no-such", 1);
  const auto path = make_user_secret("demo");
  ASSERT_THAT(path, fails_with(errc::invalid_config, HasSubstr("/proc/no-such/troupe/demo")));
}

}  // namespace
}  // namespace troupe::actors
