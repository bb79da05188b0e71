#include <algorithm>
#include <cstdlib>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "troupe/config/parse.hpp"
#include "troupe/config/resolve.hpp"

#include "command.hpp"

namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using troupe::testing::run;

const std::string source = TROUPE_SOURCE;

class examples : public ::testing::TestWithParam<std::string> {
 protected:
  const std::string path = source + "/deploy/examples/" + GetParam() + ".yaml";
};

TEST_P(examples, are_printed_so_that_they_parse_to_the_same_deployment) {
  const auto ended = run({"check", path});
  ASSERT_EQ(ended.code, 0) << ended.err;
  const auto original = troupe::config::load(path);
  const auto again = troupe::config::parse(ended.out, "printed");
  ASSERT_TRUE(original.value.has_value());
  ASSERT_TRUE(again.value.has_value()) << troupe::config::to_string(again.issues);
  EXPECT_EQ(*again.value, *original.value);
}

TEST_P(examples, are_listed_node_by_node) {
  const auto ended = run({"check", path, "--nodes"});
  ASSERT_EQ(ended.code, 0) << ended.err;
  const auto deployment = troupe::config::load(path);
  ASSERT_TRUE(deployment.value.has_value());
  for (const auto& node : troupe::config::resolve(*deployment.value))
    EXPECT_THAT(ended.out, HasSubstr("\n" + node.name + " "));
}

INSTANTIATE_TEST_SUITE_P(check, examples,
                         ::testing::Values("quickstart", "hetero-tp", "store", "secured"),
                         [](const auto& tested) {
                           auto name = tested.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST(check, a_bad_file_ends_with_two_and_all_its_lines_on_standard_error) {
  const auto path = source + "/tests/config/bad/many-errors.yaml";
  const auto ended = run({"check", path});
  EXPECT_EQ(ended.code, 2);
  EXPECT_EQ(ended.out, "");
  const auto expected = troupe::config::load(path);
  ASSERT_GT(expected.issues.size(), 3u);
  for (const auto& issue : expected.issues) {
    EXPECT_THAT(ended.err, HasSubstr(path + ":" + std::to_string(issue.line) + ":"));
    EXPECT_THAT(ended.err, HasSubstr(troupe::config::to_string(issue)));
  }
}

TEST(check, says_behind_the_nodes_which_stages_are_open_and_to_how_many) {
  const troupe::testing::deployment_on_disk file{
      "cluster: c\nstages:\n"
      "  - {name: engines, role: both, open: {max_nodes: 64}}\n"
      "  - {name: cache, role: store, pool: {size: 1MiB}}\n"
      "  - {name: shelf, role: store, open: {max_nodes: 1}, pool: {size: 1MiB}}\n"};
  const auto ended = run({"check", file.path(), "--nodes"});
  EXPECT_EQ(ended.code, 0) << ended.err;
  EXPECT_THAT(ended.out, HasSubstr("\ncache-0 "));
  EXPECT_THAT(ended.out, HasSubstr("\nstage engines is open to at most 64 nodes\n"
                                   "stage shelf is open to at most 1 node\n"));
}

/// Runs the command through a shell. Returns the exit code.
int through_shell(const std::string& arguments) {
  const auto line = std::string{TROUPE_COMMAND} + " " + arguments;
  const int status = std::system(line.c_str());
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(check, that_cannot_print_all_of_it_fails) {
  const auto file = source + "/deploy/examples/quickstart.yaml";
  EXPECT_EQ(through_shell("check " + file + " >/dev/null"), 0);
  EXPECT_EQ(through_shell("check " + file + " >/dev/full 2>/dev/null"), 1);
  EXPECT_EQ(through_shell("check --help >/dev/full 2>/dev/null"), 1);
  EXPECT_EQ(through_shell("check /nowhere/at-all.yaml >/dev/full 2>/dev/null"), 2);
}

TEST(check, says_which_credentials_are_not_on_this_machine) {
  const troupe::testing::scratch_folder folder;
  const auto file = folder.path() + "/secured.yaml";
  std::ofstream{folder.path() + "/there"} << "x";
  std::ofstream{file} << "cluster: c\nsecurity: {mode: tls, secret: " << folder.path()
                      << "/there, certificate: " << folder.path() << "/crt, key: " << folder.path()
                      << "/there, ca: " << folder.path() << "/there}\n"
                      << "stages: [{name: p, role: prefill, engine: external}]\n";
  const auto ended = run({"check", file});
  EXPECT_EQ(ended.code, 0) << ended.err;
  EXPECT_THAT(ended.err, HasSubstr("security.certificate: " + folder.path() +
                                   "/crt cannot be read on this machine (No such file"));
  EXPECT_THAT(ended.err, Not(HasSubstr("security.secret")));
}

TEST(check, a_pipe_is_no_deployment_file) {
  const troupe::testing::scratch_folder folder;
  const auto pipe = folder.path() + "/pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  const auto ended = run({"check", pipe});
  EXPECT_EQ(ended.code, 2);
  EXPECT_THAT(ended.err, HasSubstr(pipe + ": is a pipe"));
}

TEST(check, a_file_that_is_not_there_ends_with_two_and_its_name) {
  const auto ended = run({"check", "/nowhere/at-all.yaml"});
  EXPECT_EQ(ended.code, 2);
  EXPECT_THAT(ended.err, HasSubstr("/nowhere/at-all.yaml"));
}

}  // namespace
