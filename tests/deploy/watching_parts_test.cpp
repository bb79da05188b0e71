#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "troupe/deploy/cli/event_cursor.hpp"
#include "troupe/deploy/cli/event_text.hpp"
#include "troupe/deploy/cli/status_report.hpp"
#include "troupe/deploy/cli/status_watch.hpp"
#include "troupe/deploy/cli/supervisor_presence.hpp"

// The parts of `troupe events` and `troupe status --watch`.
namespace {

using namespace troupe;
using namespace troupe::deploy::cli;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

actors::event_page page(std::uint64_t supervisor, std::uint64_t newest, std::uint64_t first,
                        std::uint64_t last) {
  actors::event_page out;
  out.supervisor_incarnation = supervisor;
  out.newest = newest;
  for (auto i = first; i <= last; ++i) out.events.push_back({i, 0, "up", "n", 1, i, "r"});
  return out;
}

std::vector<std::uint64_t> sequences(const event_cursor::news& news) {
  std::vector<std::uint64_t> out;
  for (const auto& event : news.events) out.push_back(event.sequence);
  return out;
}

// -- event_cursor

TEST(event_cursor, asks_on_until_it_has_the_newest) {
  event_cursor cursor{0};
  EXPECT_EQ(cursor.next().after, 0u);
  const auto first = cursor.take(page(1, 5, 1, 3));
  EXPECT_THAT(sequences(first), ElementsAre(1, 2, 3));
  EXPECT_TRUE(first.more);
  EXPECT_EQ(cursor.next().after, 3u);
  const auto second = cursor.take(page(1, 5, 4, 5));
  EXPECT_THAT(sequences(second), ElementsAre(4, 5));
  EXPECT_FALSE(second.more);
  EXPECT_THAT(sequences(cursor.take(page(1, 5, 1, 0))), IsEmpty());
}

TEST(event_cursor, counts_what_was_dropped_before_it_came) {
  event_cursor cursor{0};
  EXPECT_EQ(cursor.take(page(1, 12, 11, 12)).missed, 10u);
  EXPECT_EQ(cursor.take(page(1, 13, 13, 13)).missed, 0u);
  EXPECT_EQ(cursor.take(page(1, 20, 17, 20)).missed, 3u);
}

TEST(event_cursor, begins_anew_with_another_life_of_the_supervisor) {
  event_cursor cursor{0};
  (void)cursor.take(page(1, 3, 1, 3));
  const auto restarted = cursor.take(page(2, 9, 4, 9));
  EXPECT_TRUE(restarted.restarted);
  EXPECT_TRUE(restarted.more);
  EXPECT_THAT(sequences(restarted), IsEmpty()) << "1 to 3 of that life come first";
  EXPECT_EQ(cursor.next().after, 0u);
  EXPECT_THAT(sequences(cursor.take(page(2, 2, 1, 2))), ElementsAre(1, 2));
}

TEST(event_cursor, begins_anew_where_the_supervisor_has_not_come_so_far) {
  event_cursor cursor{500};
  EXPECT_TRUE(cursor.take(page(1, 3, 1, 0)).restarted);
  const auto news = cursor.take(page(1, 3, 1, 3));
  EXPECT_FALSE(news.restarted);
  EXPECT_THAT(sequences(news), ElementsAre(1, 2, 3));
}

TEST(event_cursor, an_answer_that_repeats_itself_is_neither_shown_twice_nor_asked_for_for_ever) {
  event_cursor cursor{0};
  (void)cursor.take(page(1, 9, 1, 3));
  const auto again = cursor.take(page(1, 9, 1, 3));
  EXPECT_THAT(sequences(again), IsEmpty());
  EXPECT_FALSE(again.more);
}

// -- event_text

TEST(event_text, a_row_stands_under_its_heading_and_moves_no_cursor) {
  const actors::cluster_event event{12, 1'700'000'000'123, "down", "decode-0", 0xab, 7, "x\033[2J"};
  const auto row = event_row(event);
  const auto heading = event_heading();
  EXPECT_EQ(row.find("down"), heading.find("EVENT"));
  EXPECT_EQ(row.find("decode-0"), heading.find("NODE"));
  EXPECT_EQ(row.find("00000000000000ab"), heading.find("INCARNATION"));
  EXPECT_EQ(row.find("x\\x1b[2J"), heading.find("REASON"));
  EXPECT_THAT(row, HasSubstr(":20.123 "));
}

TEST(event_text, json_has_ids_as_text_and_null_for_what_is_not_there) {
  const auto json = nlohmann::json::parse(event_json({12, 5, "unplaced", "", 0, 7, "\xff"}, 0xcd));
  EXPECT_EQ(json.at("sequence"), 12);
  EXPECT_EQ(json.at("event"), "unplaced");
  EXPECT_TRUE(json.at("node").is_null());
  EXPECT_TRUE(json.at("incarnation").is_null());
  EXPECT_EQ(json.at("supervisor_incarnation"), "00000000000000cd");
}

TEST(time_text, of_what_is_no_time_is_a_dash) {
  EXPECT_EQ(time_text(UINT64_MAX), "-");
  EXPECT_EQ(time_text(1'700'000'000'123).size(), 23u);
}

// -- the supervisor's address

TEST(supervisor_presence, names_where_the_supervisor_is_asked_by_then) {
  std::string where = "127.0.0.1:7400";
  supervisor_presence presence{"events", [&where] { return where; }};
  ::testing::internal::CaptureStderr();
  presence.away("gone");
  where = "127.0.0.1:7401";
  presence.here();
  presence.restarted(1, "");
  const auto said = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(said, HasSubstr("the supervisor at 127.0.0.1:7400 does not answer"));
  EXPECT_THAT(said, HasSubstr("the supervisor at 127.0.0.1:7401 answers again"));
  EXPECT_THAT(said, HasSubstr("the supervisor at 127.0.0.1:7401 was restarted"));
}

// -- rates

cluster_status seen(std::uint64_t incarnation, std::uint64_t uptime_ms, std::uint64_t transfers,
                    std::uint64_t bytes) {
  cluster_status status;
  actors::member member;
  member.node.name = "decode-0";
  member.state = static_cast<std::uint8_t>(actors::node_state::up);
  actors::node_report report;
  report.node.incarnation = incarnation;
  report.uptime_ms = uptime_ms;
  report.transfers_done = transfers;
  report.bytes_moved = bytes;
  status.nodes.push_back({member, true, report, {}});
  return status;
}

TEST(rate_meter, divides_by_the_nodes_own_time_between_two_looks) {
  rate_meter rates;
  auto first = seen(1, 1000, 10, 1 << 20);
  rates.measure(first);
  EXPECT_FALSE(first.nodes[0].rates);
  auto second = seen(1, 3000, 30, 5 << 20);
  rates.measure(second);
  ASSERT_TRUE(second.nodes[0].rates);
  EXPECT_DOUBLE_EQ(second.nodes[0].rates->transfers, 10.0);
  EXPECT_DOUBLE_EQ(second.nodes[0].rates->bytes, 2.0 * (1 << 20));
  std::ostringstream out;
  print_tables(second, out);
  EXPECT_THAT(out.str(), HasSubstr("DONE/S   MOVED/S"));
  EXPECT_THAT(out.str(), HasSubstr("10.0  2.00 MiB"));
  const auto json = nlohmann::json::parse(to_json_line(second, 77));
  EXPECT_EQ(json.at("unix_ms"), 77);
  EXPECT_EQ(json.at("nodes").at(0).at("transfers_per_s"), 10.0);
  EXPECT_THAT(to_json_line(second, 77), Not(HasSubstr("\n")));
}

TEST(rate_meter, a_node_that_began_again_or_did_not_answer_has_none) {
  rate_meter rates;
  auto first = seen(1, 1000, 10, 0);
  rates.measure(first);
  auto successor = seen(2, 2000, 20, 0);
  rates.measure(successor);
  EXPECT_FALSE(successor.nodes[0].rates);
  auto silent = seen(2, 3000, 30, 0);
  silent.nodes[0].report = fail(errc::deadline, "silent");
  rates.measure(silent);
  EXPECT_FALSE(silent.nodes[0].rates);
  auto back = seen(2, 4000, 40, 0);
  rates.measure(back);
  EXPECT_FALSE(back.nodes[0].rates);
}

TEST(status_report, rates_are_only_shown_where_the_cluster_is_watched) {
  std::ostringstream out;
  print_tables(seen(1, 1000, 10, 0), out);
  EXPECT_THAT(out.str(), Not(HasSubstr("DONE/S")));
}

TEST(status_report, both_show_why_a_node_is_not_up) {
  auto status = seen(1, 1000, 10, 0);
  status.nodes[0].member.reason = "first heartbeat";
  std::ostringstream up;
  print_tables(status, up);
  EXPECT_THAT(up.str(), Not(HasSubstr("first heartbeat")));
  status.nodes[0].member.state = static_cast<std::uint8_t>(actors::node_state::down);
  status.nodes[0].member.reason = "GPU \033 lost";
  std::ostringstream down;
  print_tables(status, down);
  EXPECT_THAT(down.str(), HasSubstr("decode-0 is down: GPU \\x1b lost\n"));
  EXPECT_EQ(nlohmann::json::parse(to_json(status)).at("nodes").at(0).at("reason"), "GPU \033 lost");
}

// -- the window

TEST(fitted, what_the_window_holds_is_left_as_it_is) {
  EXPECT_EQ(fitted("a\nb\nc\n", {3, 80}), "a\nb\nc");
  EXPECT_EQ(fitted("\n\nc", {3, 80}), "\n\nc");
  EXPECT_EQ(fitted("", {3, 80}), "");
}

TEST(fitted, the_last_row_says_how_many_were_left_out) {
  const auto text = fitted("a\nb\nc\nd\ne\n", {3, 80});
  EXPECT_THAT(text, HasSubstr("a\nb\n... 3 more rows"));
  EXPECT_EQ(std::ranges::count(text, '\n'), 2);
  EXPECT_THAT(fitted("a\nb", {1, 80}), HasSubstr("... 2 more rows"));
  EXPECT_THAT(fitted("a\nb", {0, 0}), ".") << "a window of no size is one of the least";
}

TEST(fitted, rows_are_cut_at_characters_and_not_within_them) {
  EXPECT_EQ(fitted("abcdef\nab", {9, 3}), "abc\nab");
  EXPECT_EQ(fitted("\xc3\xa4\xc3\xb6\xc3\xbc", {9, 2}), "\xc3\xa4\xc3\xb6");
}

TEST(redrawn, goes_home_and_clears_only_what_is_left_of_the_former_one) {
  EXPECT_EQ(redrawn("a\nb"), "\033[Ha\033[K\nb\033[K\033[J");
}

}  // namespace
