#include "troupe/actors/membership/event_log.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace troupe::actors {
namespace {

cluster_event down(const std::string& node, const std::string& why) {
  return {0, 1'700'000'000'000, "down", node, 0x59c1, 7, why};
}

event_log log_of(std::size_t events, const std::string& text = "x") {
  event_log log;
  for (std::size_t i = 0; i < events; ++i) log.add(down("decode-0", text));
  return log;
}

std::vector<std::uint64_t> sequences(const event_page& page) {
  std::vector<std::uint64_t> out;
  for (const auto& event : page.events) out.push_back(event.sequence);
  return out;
}

TEST(event_log, numbers_events_from_one_without_gaps_and_says_whose_they_are) {
  const auto log = log_of(3);
  const auto page = log.page({0, 0}, 0xabc);
  EXPECT_THAT(sequences(page), ::testing::ElementsAre(1, 2, 3));
  EXPECT_EQ(page.newest, 3u);
  EXPECT_EQ(page.supervisor_incarnation, 0xabcu);
  EXPECT_EQ(page.events[0].what, "down");
  EXPECT_EQ(page.events[0].unix_ms, 1'700'000'000'000u);
}

TEST(event_log, an_empty_one_answers_with_nothing) {
  const auto page = event_log{}.page({0, 0}, 1);
  EXPECT_TRUE(page.events.empty());
  EXPECT_EQ(page.newest, 0u);
}

TEST(event_log, gives_only_what_came_after_what_is_known) {
  const auto log = log_of(5);
  EXPECT_THAT(sequences(log.page({3, 0}, 1)), ::testing::ElementsAre(4, 5));
  EXPECT_THAT(sequences(log.page({5, 0}, 1)), ::testing::IsEmpty());
  EXPECT_THAT(sequences(log.page({UINT64_MAX, 0}, 1)), ::testing::IsEmpty());
  EXPECT_THAT(sequences(log.page({1, 2}, 1)), ::testing::ElementsAre(2, 3));
}

TEST(event_log, keeps_the_newest_and_a_reader_sees_what_is_gone_by_the_numbers) {
  const auto log = log_of(max_events + 10);
  const auto page = log.page({3, 1}, 1);
  EXPECT_THAT(sequences(page), ::testing::ElementsAre(11));
  EXPECT_EQ(page.newest, max_events + 10);
  std::size_t read = 0;
  for (std::uint64_t known = 0; known < log.newest();) {
    const auto next = log.page({known, 0}, 1);
    ASSERT_FALSE(next.events.empty());
    for (const auto& event : next.events) {
      if (read > 0) {
        EXPECT_EQ(event.sequence, known + 1);
      }
      known = event.sequence;
      ++read;
    }
  }
  EXPECT_EQ(read, max_events);
}

TEST(event_log, a_page_is_bounded_by_number_and_by_bytes_whatever_is_asked_for) {
  EXPECT_EQ(log_of(1000).page({0, 0}, 1).events.size(), max_page_events);
  EXPECT_EQ(log_of(1000).page({0, 100'000}, 1).events.size(), max_page_events);
  const auto large = log_of(1000, std::string(100'000, 'x')).page({0, 0}, 1);
  std::size_t taken = 0;
  for (const auto& event : large.events) taken += event.text.size() + event.node.size();
  EXPECT_LE(taken, max_page_bytes);
  EXPECT_GT(taken, max_page_bytes / 2);
  EXPECT_THAT(sequences(large), ::testing::Contains(1));
}

TEST(event_log, what_strangers_say_is_cut_and_printable) {
  event_log log;
  const auto& kept = log.add({0, 0, std::string(900, 'w'), "\033[2J" + std::string(900, 'n'), 1, 1,
                              "a\nb\xff\x80"
                              "c"});
  EXPECT_LE(kept.what.size(), max_event_word);
  EXPECT_LE(kept.node.size(), max_event_word);
  EXPECT_EQ(kept.node.substr(0, 4), "?[2J");
  EXPECT_EQ(kept.text, "a?b??c");
  const auto& cut = log.add(down("n", std::string(5000, 'x')));
  EXPECT_EQ(cut.text.size(), max_event_text);
  EXPECT_TRUE(cut.text.ends_with("x..."));
}

TEST(event_line, has_the_same_keys_in_the_same_order_each_time) {
  EXPECT_EQ(event_line(down("decode-0", "not heard for 5003 ms")),
            "event=down node=decode-0 incarnation=00000000000059c1 epoch=7 "
            "reason=\"not heard for 5003 ms\"");
  EXPECT_EQ(event_line({1, 2, "unplaced", "", 0, 3, ""}),
            "event=unplaced node=- incarnation=- epoch=3 reason=\"\"");
}

TEST(event_line, a_value_cannot_be_taken_for_another_key) {
  EXPECT_EQ(event_line({1, 2, "refused", "a event=up", 1, 3, "no \"b\" \\ c"}),
            "event=refused node=\"a event=up\" incarnation=0000000000000001 epoch=3 "
            "reason=\"no \\\"b\\\" \\\\ c\"");
}

}  // namespace
}  // namespace troupe::actors
