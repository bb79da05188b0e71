// How commands that have started processes end: on an order while no child answers, and when
// killed.

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "command.hpp"
#include "process_tree.hpp"
#include "scratch_folder.hpp"

namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using namespace troupe::testing;

void expect_gone(const std::vector<pid_t>& all) {
  for (const auto pid : all) EXPECT_TRUE(vanishes(pid)) << pid;
}

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code failed;
  for (std::filesystem::directory_iterator it{folder, failed}, end; !failed && it != end;
       it.increment(failed))
    names.push_back(it->path().filename().string());
  return names;
}

std::vector<std::string> ours_in_shared_memory() {
  auto names = names_in("/dev/shm");
  std::erase_if(names, [](const auto& name) { return name.find("troupe") == std::string::npos; });
  return names;
}

int count(const std::string& text, const std::string& what) {
  int found = 0;
  for (auto at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++found;
  return found;
}

/// Sets TMPDIR for the processes that are started during its lifetime.
class temporary_files {
 public:
  temporary_files() {
    EXPECT_EQ(run({"--version"}).code, 0);          // creates other files elsewhere first
    ::setenv("TMPDIR", folder_.path().c_str(), 1);  // NOLINT(concurrency-mt-unsafe)
  }
  ~temporary_files() { ::unsetenv("TMPDIR"); }  // NOLINT(concurrency-mt-unsafe)
  temporary_files(const temporary_files&) = delete;
  temporary_files& operator=(const temporary_files&) = delete;
  [[nodiscard]] std::vector<std::string> names() const { return names_in(folder_.path()); }

 private:
  scratch_folder folder_;
};

/// The files that a user's commands keep, except secrets.
std::vector<std::string> kept_files() {
  std::vector<std::string> names;
  const char* state = std::getenv("XDG_STATE_HOME");  // NOLINT(concurrency-mt-unsafe)
  if (state == nullptr) return names;
  std::error_code failed;
  for (std::filesystem::recursive_directory_iterator it{state, failed}, end; !failed && it != end;
       it.increment(failed))
    if (!it->is_directory() && it->path().filename() != "secret" &&
        it->path().string().find("cli-test") == std::string::npos)  // what `up` keeps here
      names.push_back(it->path());
  return names;
}

const std::vector<std::string> long_bench{"bench", "--layers",   "2",  "--kv-heads",
                                          "2",     "--head-dim", "16", "--tokens",
                                          "40",    "--duration", "1h"};
const std::vector<std::string> long_demo{"demo", "--requests", "1000"};
const std::vector<std::string> short_demo{"demo", "--prompt", "to be", "--max-tokens", "4"};

// -- killed

struct killing {
  const char* name;
  const std::vector<std::string>& arguments;
  std::size_t children;  ///< number of children when it is killed
  const char* says;      ///< its output by then; may be empty
  bool frozen;           ///< whether the children are frozen
};

class killed_command : public ::testing::TestWithParam<killing> {};

TEST_P(killed_command, leaves_no_process_and_no_file_for_longer_than_to_the_next_start) {
  const temporary_files files;
  std::vector<pid_t> children;
  {
    command troupe{GetParam().arguments};
    children = wait_for_children(troupe.pid(), GetParam().children);
    ASSERT_GE(children.size(), GetParam().children) << troupe.err();
    if (*GetParam().says != '\0') {
      ASSERT_TRUE(troupe.says(GetParam().says)) << troupe.err();
    }
    if (GetParam().frozen) freeze(children);
    troupe.signal(SIGKILL);
    EXPECT_EQ(troupe.wait(), 128 + SIGKILL);
  }
  expect_gone(children);
  EXPECT_EQ(run(short_demo).code, 0);
  EXPECT_THAT(files.names(), IsEmpty());
  EXPECT_THAT(kept_files(), IsEmpty());
  EXPECT_THAT(ours_in_shared_memory(), IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(
    every, killed_command,
    ::testing::Values(killing{"bench_as_it_starts", long_bench, 1, "", false},
                      killing{"bench_at_work", long_bench, 2, "GB/s", false},
                      killing{"bench_with_frozen_processes", long_bench, 2, "GB/s", true},
                      killing{"demo_as_it_starts", long_demo, 1, "", false},
                      killing{"demo_at_work", long_demo, 3, "demo-1 ", false},
                      killing{"demo_with_frozen_processes", long_demo, 3, "demo-1 ", true}),
    [](const auto& tested) { return std::string{tested.param.name}; });

TEST(killed_demo, is_cleaned_up_after_by_the_next_one_which_leaves_those_alone_that_run) {
  const temporary_files files;
  command running{long_demo};
  ASSERT_TRUE(running.says("nodes      ")) << running.err();
  const auto used = files.names();
  ASSERT_EQ(used.size(), 1U);
  {
    command killed{long_demo};
    ASSERT_TRUE(killed.says("nodes      ")) << killed.err();
    killed.signal(SIGKILL);
    EXPECT_EQ(killed.wait(), 128 + SIGKILL);
  }
  EXPECT_EQ(files.names().size(), 2U) << "nobody could have removed the second";
  EXPECT_EQ(run(short_demo).code, 0);
  EXPECT_EQ(files.names(), used);
  running.signal(SIGINT);
  EXPECT_EQ(running.wait(), 130) << running.err();
  EXPECT_THAT(files.names(), IsEmpty());
}

// -- an order to end while no child answers

/// Enough for the patience with each in turn to exceed any wait of a test.
constexpr std::size_t many_stores = 8;

std::string stores(std::size_t count, std::uint16_t port) {
  auto text = "cluster: cli-test\nsupervisor: {host: 127.0.0.1, port: " + std::to_string(port) +
              ", heartbeat_interval: 200ms, heartbeat_timeout: 10min}\nsecurity: {mode: none}\n"
              "model: {layers: 2, kv_heads: 2, head_dim: 16, dtype: bf16, block_tokens: 16}\n"
              "stages:\n";
  for (std::size_t i = 0; i < count; ++i)
    text += "  - {name: cache" + std::to_string(i) + ", role: store, pool: {size: 1MiB}}\n";
  return text;
}

/// Makes this process inherit the children of the processes that it starts, as the first process of
/// a container does: in their session, where the kernel does not continue stopped processes.
class heir {
 public:
  heir() { ::prctl(PR_SET_CHILD_SUBREAPER, 1); }
  ~heir() { ::prctl(PR_SET_CHILD_SUBREAPER, 0); }
  heir(const heir&) = delete;
  heir& operator=(const heir&) = delete;
  /// Waits for its end, and kills it if that does not come. Returns the status of `waitpid`.
  [[nodiscard]] static int status_of(pid_t inherited) {
    int status = 0;
    if (!comes_true([&] { return ::waitpid(inherited, &status, WNOHANG) == inherited; })) {
      ::kill(inherited, SIGKILL);
      ::waitpid(inherited, &status, 0);
    }
    return status;
  }
};

TEST(killed_up, ends_its_nodes_in_good_order_also_where_they_stand_still) {
  const heir inherits;
  const deployment_on_disk file{stores(2, free_port())};
  command up{{"up", file.path(), "--log-level", "off"}};
  ASSERT_TRUE(up.says("3 nodes are up")) << up.out() << up.err();
  const auto children = children_of(up.pid());
  ASSERT_EQ(children.size(), 3U);
  freeze(children);
  up.signal(SIGKILL);
  EXPECT_EQ(up.wait(), 128 + SIGKILL);
  for (const auto pid : children) EXPECT_EQ(heir::status_of(pid), 0) << pid;
}

TEST(frozen_up, ends_all_its_nodes_at_once_with_one_ctrl_c) {
  const deployment_on_disk file{stores(many_stores, free_port())};
  command up{{"up", file.path(), "--log-level", "off"}};
  ASSERT_TRUE(up.says(std::to_string(many_stores + 1) + " nodes are up")) << up.out() << up.err();
  const auto children = children_of(up.pid());
  ASSERT_EQ(children.size(), many_stores + 1);
  freeze(children);
  up.signal(SIGINT);
  EXPECT_EQ(up.wait(), 1) << up.out() << up.err();
  expect_gone(children);
  EXPECT_EQ(count(up.err(), " did not stop within "), 1) << up.err();
  EXPECT_EQ(count(up.err(), "were killed"), 1) << up.err();
  for (const auto pid : children)
    EXPECT_THAT(up.err(), HasSubstr("(pid " + std::to_string(pid) + ")"));
}

TEST(frozen_up, lets_those_leave_that_can) {
  const deployment_on_disk file{stores(4, free_port())};
  command up{{"up", file.path(), "--log-level", "off"}};
  ASSERT_TRUE(up.says("5 nodes are up")) << up.out() << up.err();
  const std::vector<pid_t> stuck{node_in(up.out(), "cache3-0").pid,
                                 node_in(up.out(), "cache1-0").pid};
  freeze(stuck);
  up.signal(SIGINT);
  EXPECT_EQ(up.wait(), 1) << up.out() << up.err();
  for (const auto& node : nodes_in(up.out())) {
    EXPECT_TRUE(vanishes(node.pid)) << node.name;
    const bool killed = std::ranges::find(stuck, node.pid) != stuck.end();
    EXPECT_EQ(count(up.err(), node.name + " (pid "), killed ? 1 : 0) << up.err();
  }
  EXPECT_EQ(count(up.err(), "were killed"), 1) << up.err();
}

TEST(frozen_up, does_not_wait_after_a_second_ctrl_c) {
  const deployment_on_disk file{stores(2, free_port())};
  command up{{"up", file.path(), "--log-level", "off"}};
  ASSERT_TRUE(up.says("3 nodes are up")) << up.out() << up.err();
  const auto children = children_of(up.pid());
  freeze(children);
  up.signal(SIGINT);
  EXPECT_EQ(up.wait_for(std::chrono::milliseconds{1500}), -1) << "it did not wait for its nodes";
  up.signal(SIGINT);
  EXPECT_EQ(up.wait(), 1) << up.out() << up.err();
  expect_gone(children);
  EXPECT_THAT(up.err(), HasSubstr("were killed"));
}

TEST(frozen_demo, ends_with_one_ctrl_c_and_leaves_nothing) {
  const temporary_files files;
  command demo{long_demo};
  ASSERT_TRUE(demo.says("demo-1 ")) << demo.err();
  const auto children = children_of(demo.pid());
  ASSERT_EQ(children.size(), 3U);
  freeze(children);
  demo.signal(SIGINT);
  EXPECT_EQ(demo.wait(), 130) << demo.out() << demo.err();
  expect_gone(children);
  EXPECT_THAT(files.names(), IsEmpty());
}

TEST(frozen_bench, ends_with_one_ctrl_c_and_leaves_nothing) {
  command bench{long_bench};
  ASSERT_TRUE(bench.says("GB/s")) << bench.err();
  const auto children = children_of(bench.pid());
  ASSERT_EQ(children.size(), 2U);
  freeze(children);
  bench.signal(SIGINT);
  // A frozen peer is lost after a while, perhaps before the signal is handled.
  EXPECT_THAT(bench.wait(), AnyOf(130, 1)) << bench.out() << bench.err();
  expect_gone(children);
}

TEST(frozen_bench, ends_with_one_ctrl_c_while_it_starts) {
  command bench{long_bench};
  const auto children = wait_for_children(bench.pid(), 1);
  ASSERT_FALSE(children.empty()) << bench.err();
  freeze(children);
  bench.signal(SIGINT);
  // 1: they were frozen before they had become the program, which is not waited for.
  EXPECT_THAT(bench.wait(), AnyOf(130, 1)) << bench.out() << bench.err();
  EXPECT_THAT(bench.err(), Not(HasSubstr("deadline")));
  expect_gone(children);
}

TEST(frozen_bench, ends_though_its_process_is_stopped_as_it_is_made) {
  command bench{long_bench};
  std::vector<pid_t> children;
  // The state that the test looks for lasts a millisecond.
  const auto made = [&] {
    children = children_of(bench.pid());
    return !children.empty();
  };
  ASSERT_TRUE(comes_true(made, std::chrono::milliseconds{0})) << bench.err();
  freeze(children);
  bench.signal(SIGINT);
  EXPECT_THAT(bench.wait(), AnyOf(130, 1)) << bench.out() << bench.err();
  expect_gone(children);
}

}  // namespace
