#include <csignal>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "command.hpp"
#include "text_of.hpp"

// Where logs go: --log-file of `node` and --log-dir of `up` create missing folders.
namespace {

using ::testing::HasSubstr;
using namespace troupe::testing;

TEST(log_place, of_a_node_is_made_with_its_folders) {
  const deployment_on_disk file{free_port()};
  const scratch_folder folder;
  const auto log = folder.path() + "/a/b/node.log";
  command node{{"node", file.path(), "--name", "supervisor", "--log-file", log}};
  EXPECT_TRUE(comes_true([&] { return text_of(log).find("listens at") != std::string::npos; }))
      << text_of(log);
}

TEST(log_place, of_all_nodes_is_made_with_its_folders) {
  const deployment_on_disk file{free_port()};
  const scratch_folder folder;
  const auto logs = folder.path() + "/a/b";
  command up{{"up", file.path(), "--log-dir", logs}};
  ASSERT_TRUE(up.says("4 nodes are up")) << up.out() << up.err();
  for (const auto* node : {"supervisor", "prefill-0", "decode-0", "cache-0"})
    EXPECT_THAT(text_of(logs + "/" + node + ".log"), HasSubstr("listens at")) << node;
}

TEST(log_place, that_cannot_be_made_ends_with_two_and_is_named) {
  const deployment_on_disk file{free_port()};
  const auto below_a_file = file.path() + "/logs";
  const auto node = run({"node", file.path(), "--name", "supervisor", "--log-file", below_a_file});
  EXPECT_EQ(node.code, 2);
  EXPECT_THAT(node.err, HasSubstr(below_a_file));
  const auto up = run({"up", file.path(), "--log-dir", below_a_file});
  EXPECT_EQ(up.code, 2);
  EXPECT_THAT(up.err, HasSubstr(below_a_file));
  EXPECT_THAT(up.err, HasSubstr("--log-dir"));
  const auto on_a_file = run({"up", file.path(), "--log-dir", file.path()});
  EXPECT_EQ(on_a_file.code, 2);
  EXPECT_THAT(on_a_file.err, HasSubstr(file.path()));
}

}  // namespace
