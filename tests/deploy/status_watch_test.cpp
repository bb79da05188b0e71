#include <chrono>
#include <csignal>
#include <memory>
#include <regex>
#include <sstream>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "command.hpp"
#include "terminal_command.hpp"
#include "wall_clock.hpp"

// `troupe status --watch` into a pipe and on a terminal.
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using ::testing::Not;
using namespace troupe::testing;

constexpr const char* hide_cursor = "\033[?25l";
constexpr const char* show_cursor = "\033[?25h";
constexpr const char* home = "\033[H";

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> all;
  std::istringstream in{text};
  for (std::string line; std::getline(in, line);) all.push_back(line);
  return all;
}

/// Waits until the output has `wanted` lines that match. Returns how many it has.
std::size_t lines_like(command& watch, const std::string& pattern, std::size_t wanted) {
  const std::regex form{pattern};
  std::size_t count = 0;
  const auto are_there = [&] {
    count = 0;
    for (const auto& line : lines_of(watch.out())) count += std::regex_match(line, form) ? 1 : 0;
    return count >= wanted;
  };
  (void)watch.reads_until(are_there);
  return count;
}

std::vector<std::string> frames_of(const std::string& shown) {
  std::vector<std::string> all;
  for (auto at = shown.find(home); at != std::string::npos;) {
    const auto next = shown.find(home, at + 1);
    all.push_back(shown.substr(at, next - at));
    at = next;
  }
  return all;
}

struct status_watch : ::testing::Test {
  const std::uint16_t port = free_port();
  const deployment_on_disk file{port};
  std::unique_ptr<command> supervisor = supervise();
  command store{{"node", file.path(), "--name", "cache-0"}};

  std::unique_ptr<command> supervise() const {
    auto made = std::make_unique<command>(
        std::vector<std::string>{"node", file.path(), "--name", "supervisor"});
    EXPECT_TRUE(made->says("listens at")) << made->err();
    return made;
  }
  void SetUp() override {
    ASSERT_TRUE(supervisor->says("event=up node=cache-0")) << supervisor->err();
  }
  std::vector<std::string> watching(const std::string& option = {}) const {
    std::vector<std::string> all{"status", file.path(), "--watch", "--interval", "200ms"};
    if (!option.empty()) all.push_back(option);
    return all;
  }
};

TEST_F(status_watch, prints_tables_with_times_and_rates_one_after_another_into_a_pipe) {
  command watch{watching()};
  EXPECT_GE(lines_like(watch, R"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3})", 3), 3u) << watch.out();
  EXPECT_GE(lines_like(watch, R"(cache-0 +store .* up .* 0\.0 +0 B)", 1), 1u) << watch.out();
  EXPECT_THAT(watch.out(), HasSubstr("DONE/S"));
  watch.signal(SIGINT);
  EXPECT_EQ(watch.wait(), 0) << watch.err();
  EXPECT_THAT(watch.out(), Not(HasSubstr("\033")));
  EXPECT_EQ(watch.err(), "");
}

TEST_F(status_watch, prints_one_json_document_a_line) {
  const wall_clock_watch clock;
  command watch{watching("--json")};
  EXPECT_GE(lines_like(watch, R"(\{.*\})", 3), 3u) << watch.out();
  watch.signal(SIGINT);
  EXPECT_EQ(watch.wait(), 0) << watch.err();
  std::uint64_t last = 0;
  for (const auto& line : lines_of(watch.out())) {
    const auto document = nlohmann::json::parse(line);
    EXPECT_EQ(document.at("cluster"), "cli-test");
    EXPECT_TRUE(document.at("unix_ms") >= last || clock.was_set());
    last = document.at("unix_ms");
  }
  const auto newest = nlohmann::json::parse(lines_of(watch.out()).back());
  for (const auto& node : newest.at("nodes")) {
    if (node.at("name") == "cache-0") {
      EXPECT_EQ(node.at("transfers_per_s"), 0.0);
    }
  }
}

TEST_F(status_watch, gives_the_cursor_back_while_it_is_stopped) {
  terminal_command watch{watching(), 40, 200};
  ASSERT_TRUE(watch.shows(home, 2)) << watch.shown();
  EXPECT_EQ(watch.shown().find(show_cursor), std::string::npos);
  watch.press_ctrl_z();  // a process without a shell continues at once
  ASSERT_TRUE(watch.shows(hide_cursor, 2)) << watch.shown();
  const auto shown_again = watch.shown().find(show_cursor);
  ASSERT_NE(shown_again, std::string::npos);
  EXPECT_LT(shown_again, watch.shown().rfind(hide_cursor));
  ASSERT_TRUE(watch.shows(home, 4)) << "and goes on";
  watch.press_ctrl_c();
  EXPECT_EQ(watch.wait(), 0);
  EXPECT_GT(watch.shown().rfind(show_cursor), watch.shown().rfind(hide_cursor));
}

TEST_F(status_watch, redraws_in_place_on_a_terminal_within_its_window_and_gives_the_cursor_back) {
  terminal_command watch{watching(), 9, 60};
  ASSERT_TRUE(watch.shows(" more rows")) << watch.shown();
  ASSERT_TRUE(watch.shows(home, 4)) << watch.shown();
  watch.press_ctrl_c();
  EXPECT_EQ(watch.wait(), 0);
  const auto& shown = watch.shown();
  EXPECT_EQ(shown.find(hide_cursor), 0u);
  EXPECT_GT(shown.rfind(show_cursor), shown.rfind(home));
  auto frames = frames_of(shown);
  frames.pop_back();  // the last frame also holds what came after it
  for (const auto& frame : frames) {
    EXPECT_THAT(frame, Not(HasSubstr("\033[2J"))) << "it would flicker";
    const auto rows = lines_of(frame);
    EXPECT_LE(rows.size(), 9u) << frame;
    for (const auto& row : rows) EXPECT_LE(row.size(), 60u + 12u) << row;  // including escape codes
  }
}

TEST_F(status_watch, goes_on_through_a_restart_of_the_supervisor_and_shows_it) {
  terminal_command watch{watching(), 40, 200};
  command listed{watching()};
  ASSERT_TRUE(watch.shows(", epoch ")) << watch.shown();
  ASSERT_TRUE(listed.says(", epoch ")) << listed.err();
  supervisor->signal(SIGKILL);
  EXPECT_EQ(supervisor->wait(), 128 + SIGKILL);
  EXPECT_TRUE(watch.shows("has not answered since ")) << watch.shown();
  EXPECT_TRUE(watch.shows("what follows is older: ")) << watch.shown();
  EXPECT_TRUE(listed.says("does not answer; retrying")) << listed.err();
  supervisor = supervise();
  EXPECT_TRUE(watch.shows("the supervisor was restarted at ")) << watch.shown();
  EXPECT_TRUE(listed.says("was restarted (incarnation ")) << listed.err();
  watch.press_ctrl_c();
  EXPECT_EQ(watch.wait(), 0);
  listed.signal(SIGTERM);
  EXPECT_EQ(listed.wait(), 0) << listed.err();
}

TEST_F(status_watch, gives_the_cursor_back_at_once_and_ends_soon_although_a_node_is_frozen) {
  store.signal(SIGSTOP);
  auto arguments = watching();
  arguments.insert(arguments.end(), {"--timeout-ms", "2000"});
  terminal_command watch{arguments, 24, 80};
  ASSERT_TRUE(watch.shows(hide_cursor));
  std::this_thread::sleep_for(300ms);  // it has asked the frozen node and waits for the answer
  watch.press_ctrl_c();
  EXPECT_TRUE(watch.shows(show_cursor)) << watch.shown();
  EXPECT_EQ(watch.wait(), 0);
  store.signal(SIGCONT);
}

TEST_F(status_watch, of_the_address_of_a_supervisor_shows_the_same) {
  command watch{{"status", "127.0.0.1:" + std::to_string(port), "-w"}};
  EXPECT_TRUE(watch.says("cluster cli-test, supervisor")) << watch.err();
  EXPECT_TRUE(watch.says("cache-0")) << watch.err();
  watch.signal(SIGHUP);
  EXPECT_EQ(watch.wait(), 0);
}

}  // namespace
