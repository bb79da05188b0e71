#include <chrono>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <sstream>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "command.hpp"
#include "text_of.hpp"

// `troupe events` with processes that come, are killed and are started again.
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::Not;
using namespace troupe::testing;

using process = std::unique_ptr<command>;

process start(std::vector<std::string> arguments) {
  return std::make_unique<command>(std::move(arguments));
}

process node(const deployment_on_disk& file, const std::string& name) {
  return start({"node", file.path(), "--name", name});
}

process supervisor_of(const deployment_on_disk& file) {
  auto made = node(file, "supervisor");
  EXPECT_TRUE(made->says("listens at")) << made->err();
  return made;
}

void kill_at_once(command& victim) {
  victim.signal(SIGKILL);
  EXPECT_EQ(victim.wait(), 128 + SIGKILL);
}

/// One JSON object per line, whatever else is wrong.
std::vector<nlohmann::json> objects(const std::string& text) {
  std::vector<nlohmann::json> all;
  std::istringstream in{text};
  for (std::string line; std::getline(in, line);) {
    all.push_back(nlohmann::json::parse(line, nullptr, false));
    EXPECT_TRUE(all.back().is_object()) << line;
  }
  return all;
}

std::vector<std::string> lives_of(const std::string& text, const std::string& name) {
  std::vector<std::string> all;
  for (const auto& event : objects(text))
    if (event.at("node") == name) all.push_back(event.at("event"));
  return all;
}

TEST(events, show_how_a_killed_node_came_and_went_and_why) {
  const deployment_on_disk file{free_port()};
  const auto supervisor = supervisor_of(file);
  const auto victim = node(file, "decode-0");
  ASSERT_TRUE(supervisor->says("event=up node=decode-0")) << supervisor->err();
  kill_at_once(*victim);
  ASSERT_TRUE(supervisor->says("event=down node=decode-0 ")) << supervisor->err();

  const auto shown = run({"events", file.path()});
  EXPECT_EQ(shown.code, 0) << shown.err;
  EXPECT_EQ(shown.err, "");
  EXPECT_THAT(shown.out, HasSubstr("  SEQ  EVENT"));
  EXPECT_THAT(shown.out, HasSubstr(" started    supervisor "));
  EXPECT_THAT(shown.out, HasSubstr("connection lost: "));

  const auto json = run({"events", file.path(), "--json", "--node", "decode-0"});
  EXPECT_EQ(json.code, 0) << json.err;
  EXPECT_THAT(lives_of(json.out, "decode-0"), ::testing::ElementsAre("joining", "up", "down"));
  const auto down = objects(json.out).back();
  const auto epoch = std::to_string(down.at("epoch").get<std::uint64_t>());
  EXPECT_THAT(down.at("reason").get<std::string>(), HasSubstr("connection lost: "));
  const auto incarnation = down.at("incarnation").get<std::string>();
  EXPECT_THAT(supervisor->err(), HasSubstr("event=down node=decode-0 incarnation=" + incarnation +
                                           " epoch=" + epoch + " reason=\"connection lost: "));

  const auto since = run({"events", file.path(), "--json", "--since", "2"});
  EXPECT_EQ(objects(since.out).front().at("sequence"), 3);
}

TEST(events, are_followed_as_they_happen_until_ctrl_c) {
  const auto port = free_port();
  const deployment_on_disk file{port};
  const auto supervisor = supervisor_of(file);
  command follower{{"events", "127.0.0.1:" + std::to_string(port), "-f", "--json"}};
  ASSERT_TRUE(follower.says("\"started\"")) << follower.err();
  const auto victim = node(file, "decode-0");
  EXPECT_TRUE(follower.says("\"up\"")) << follower.err();
  kill_at_once(*victim);
  EXPECT_TRUE(follower.says("\"down\"")) << follower.err();
  follower.signal(SIGINT);
  EXPECT_EQ(follower.wait(), 0) << follower.err();
  EXPECT_THAT(lives_of(follower.out(), "decode-0"),
              ::testing::ElementsAre("joining", "up", "down"));
  EXPECT_EQ(follower.err(), "");
}

TEST(events, go_on_through_a_restart_of_the_supervisor_which_is_said_once) {
  const deployment_on_disk file{free_port()};
  auto supervisor = supervisor_of(file);
  const auto store = node(file, "cache-0");
  command follower{{"events", file.path(), "--follow"}};
  ASSERT_TRUE(follower.says(" up         cache-0 ")) << follower.out() << follower.err();
  kill_at_once(*supervisor);
  ASSERT_TRUE(follower.says("does not answer; retrying")) << follower.err();
  std::this_thread::sleep_for(1s);  // repeated attempts are not reported
  supervisor = supervisor_of(file);
  EXPECT_TRUE(follower.says("answers again")) << follower.err();
  EXPECT_TRUE(follower.says("was restarted (incarnation ")) << follower.err();
  ASSERT_TRUE(supervisor->says("event=up node=cache-0")) << supervisor->err();
  const auto twice = [&] {
    const auto first = follower.out().find(" up         cache-0 ");
    return follower.out().find(" up         cache-0 ", first + 1) != std::string::npos;
  };
  EXPECT_TRUE(follower.reads_until(twice)) << follower.out();
  follower.signal(SIGTERM);
  EXPECT_EQ(follower.wait(), 0) << follower.err();
  const auto& err = follower.err();
  EXPECT_EQ(err.find("does not answer"), err.rfind("does not answer")) << err;
  EXPECT_EQ(err.find("was restarted"), err.rfind("was restarted")) << err;
}

TEST(events, a_follower_ends_with_who_reads_it_although_nothing_happens) {
  const deployment_on_disk file{free_port()};
  const auto supervisor = supervisor_of(file);
  const auto line = "bash -c 'timeout " + std::to_string(wait_limit.count()) +
                    " " TROUPE_COMMAND " events " + file.path() +
                    " -f | head -n 1 >/dev/null; exit ${PIPESTATUS[0]}'";
  EXPECT_EQ(std::system(line.c_str()), 0) << "124: it did not end by itself";
}

TEST(events, a_follower_may_come_before_the_supervisor) {
  const auto port = free_port();
  const deployment_on_disk file{port};
  command follower{{"events", file.path(), "-f"}};
  ASSERT_TRUE(follower.says("127.0.0.1:" + std::to_string(port) + " does not answer"))
      << follower.err();
  const auto supervisor = supervisor_of(file);
  EXPECT_TRUE(follower.says(" started ")) << follower.err();
  follower.signal(SIGINT);
  EXPECT_EQ(follower.wait(), 0) << follower.err();
}

TEST(events, without_a_supervisor_or_of_another_cluster_end_with_one) {
  const deployment_on_disk file{free_port()};
  const auto nobody = run({"events", file.path()});
  EXPECT_EQ(nobody.code, 1);
  EXPECT_THAT(nobody.err, HasSubstr("troupe events: peer_unreachable"));
  const auto supervisor = supervisor_of(file);
  auto text = text_of(file.path());
  text.replace(text.find("cluster: "), text.find('\n') - text.find("cluster: "), "cluster: other");
  const scratch_folder folder;
  const auto other = folder.path() + "/other.yaml";
  std::ofstream{other} << text;
  const auto once = run({"events", other});
  EXPECT_EQ(once.code, 1);
  EXPECT_THAT(once.err, HasSubstr("`other`"));
  const auto followed = run({"events", other, "-f"});
  EXPECT_EQ(followed.code, 1) << "asking again would not help";
}

TEST(events, of_what_is_no_node_or_no_cluster_end_with_two_and_are_told_what_there_is) {
  const deployment_on_disk file{free_port()};
  const auto stranger = run({"events", file.path(), "-f", "--node", "decode-7"});
  EXPECT_EQ(stranger.code, 2);
  EXPECT_THAT(stranger.err, HasSubstr("no node decode-7; it has supervisor, prefill-0, decode-0"));
  const auto nowhere = run({"events", "nowhere.yaml"});
  EXPECT_EQ(nowhere.code, 2);
  EXPECT_THAT(nowhere.err, HasSubstr("troupe events: nowhere.yaml is neither"));
}

TEST(events, of_a_node_of_an_open_stage_are_asked_for_though_no_file_names_it) {
  const deployment_on_disk file{
      "cluster: open-test\nsupervisor: {port: " + std::to_string(free_port()) +
      ", state_file: none}\n"
      "stages:\n  - {name: engines, role: both, open: {}}\n"};
  const auto supervisor = supervisor_of(file);
  EXPECT_EQ(run({"events", file.path(), "--node", "engines.a.0"}).code, 0);
  for (const auto* stranger : {"engines.a.00", "engine.a.0", "engines-0"})
    EXPECT_EQ(run({"events", file.path(), "--node", stranger}).code, 2) << stranger;
}

TEST(events, of_a_sequence_that_has_not_come_begin_with_the_first_and_say_so) {
  const deployment_on_disk file{free_port()};
  const auto supervisor = supervisor_of(file);
  const auto shown = run({"events", file.path(), "--since", "4711"});
  EXPECT_EQ(shown.code, 0);
  EXPECT_THAT(shown.out, HasSubstr(" started "));
  EXPECT_THAT(shown.err, HasSubstr("was restarted"));
}

}  // namespace
