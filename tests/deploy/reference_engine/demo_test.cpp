#include "troupe/deploy/demo.hpp"

#include <cerrno>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <regex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "troupe/deploy/child_process.hpp"

#include "text_of.hpp"
#include "waiting.hpp"

/// `troupe demo` as a user runs it: real processes, its output, its exit code, and no leftovers.
namespace troupe::deploy {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class demo_run {
 public:
  explicit demo_run(std::vector<std::string> arguments)
      : log_{::testing::TempDir() + "troupe-demo-" + std::to_string(::getpid()) + ".log"},
        process_{start(std::move(arguments))} {}
  ~demo_run() { std::filesystem::remove(log_); }
  demo_run(const demo_run&) = delete;
  demo_run& operator=(const demo_run&) = delete;

  child_process& process() { return process_; }
  [[nodiscard]] std::string output() const { return troupe::testing::text_of(log_); }
  /// The nodes' process ids, as the demo prints them.
  [[nodiscard]] std::vector<pid_t> nodes() const {
    std::vector<pid_t> pids;
    const auto text = output();
    const std::regex pid{"pid ([0-9]+)"};
    for (std::sregex_iterator at{text.begin(), text.end(), pid}, end; at != end; ++at)
      pids.push_back(static_cast<pid_t>(std::stol((*at)[1])));
    return pids;
  }

 private:
  child_process start(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "demo");
    std::filesystem::remove(log_);
    return std::move(child_process::start(TROUPE_COMMAND, std::move(arguments), log_).value());
  }
  std::string log_;
  child_process process_;
};

bool gone(pid_t pid) {
  return ::kill(pid, 0) != 0 && errno == ESRCH;
}

struct way {
  const char *mode, *backend;
};
class the_demo : public ::testing::TestWithParam<way> {};
INSTANTIATE_TEST_SUITE_P(ways, the_demo,
                         ::testing::Values(way{"write", "shm"}, way{"write", "tcp"},
                                           way{"read", "shm"}, way{"read", "tcp"},
                                           way{"write", "auto"}),
                         [](const ::testing::TestParamInfo<way>& p) {
                           return std::string{p.param.mode} + "_" + p.param.backend;
                         });

TEST_P(the_demo, shows_that_the_moved_cache_gives_the_same_text) {
  const std::string backend = GetParam().backend;
  demo_run run{{"--mode", GetParam().mode, "--backend", backend, "--requests", "2", "--prompt",
                "A short prompt."}};
  ASSERT_TRUE(run.process().wait(testing::wait_limit));
  EXPECT_EQ(run.process().ended(), "exit code 0");
  EXPECT_THAT(run.output(), AllOf(HasSubstr("A short prompt."), HasSubstr("demo-2"),
                                  HasSubstr("identical: yes")));
  EXPECT_THAT(run.output(), HasSubstr(backend == "tcp" ? "over tcp" : "over shm"));
  EXPECT_EQ(run.nodes().size(), 2u);
  for (const pid_t pid : run.nodes()) EXPECT_TRUE(gone(pid)) << pid;
}

TEST(a_demo, whose_nodes_compute_something_else_says_no) {
  // These nodes draw their weights from another seed.
  demo_options options;
  options.program = REFERENCE_NODE;
  std::ostringstream out, complaints;
  EXPECT_EQ(run_demo(options, out, complaints), 1);
  EXPECT_THAT(out.str(), AllOf(HasSubstr("identical: NO"), Not(HasSubstr("identical: yes"))));
}

TEST(a_demo, whose_nodes_do_not_start_says_why) {
  demo_options options;
  options.program = "/bin/false";
  std::ostringstream out, complaints;
  EXPECT_EQ(run_demo(options, out, complaints), 1);
  EXPECT_THAT(complaints.str(), HasSubstr("ended with exit code 1"));
  options.program = "/nowhere/troupe";
  complaints.str({});
  EXPECT_EQ(run_demo(options, out, complaints), 1);
  EXPECT_THAT(complaints.str(), HasSubstr("cannot run /nowhere/troupe"));
}

TEST(a_demo, that_is_asked_for_what_it_does_not_have_refuses) {
  const auto expect_refused = [](const demo_options& wrong, const char* named) {
    std::ostringstream out, complaints;
    EXPECT_EQ(run_demo(wrong, out, complaints), 1);
    EXPECT_THAT(complaints.str(), AllOf(HasSubstr("invalid_config"), HasSubstr(named)));
  };
  demo_options options;
  options.mode = "push";
  expect_refused(options, "push");
  options = {};
  options.backend = "infiniband";
  expect_refused(options, "infiniband");
  options = {};
  options.requests = 0;
  expect_refused(options, "--requests");
}

TEST(a_demo, over_a_backend_that_is_not_there_says_why_and_starts_nothing) {
  std::error_code none;
  if (std::filesystem::exists("/sys/class/infiniband", none) &&
      !std::filesystem::is_empty("/sys/class/infiniband", none)) {
    GTEST_SKIP() << "there is an RDMA device here";
  }
  demo_run run{{"--backend", "rdma", "--prompt", "short"}};
  ASSERT_TRUE(run.process().wait(testing::wait_limit)) << run.output();
  EXPECT_EQ(run.process().ended(), "exit code 2");
  EXPECT_THAT(run.output(), AllOf(HasSubstr("--backend rdma"), Not(HasSubstr("supervisor"))));
}

class an_interrupted_demo : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(signals, an_interrupted_demo, ::testing::Values(SIGINT, SIGTERM, SIGKILL));

TEST_P(an_interrupted_demo, leaves_no_process_behind) {
  demo_run run{{"--requests", "1000"}};
  ASSERT_TRUE(
      testing::comes_true([&] { return run.output().find("demo-1 ") != std::string::npos; }, 10ms));
  const auto nodes = run.nodes();
  ASSERT_EQ(nodes.size(), 2u);
  ::kill(run.process().pid(), GetParam());
  ASSERT_TRUE(run.process().wait(testing::wait_limit));
  EXPECT_EQ(run.process().ended(),
            GetParam() == SIGKILL ? std::string{"signal 9"} : std::string{"exit code 130"});
  EXPECT_TRUE(testing::comes_true([&] { return gone(nodes[0]) && gone(nodes[1]); }));
}

}  // namespace
}  // namespace troupe::deploy
