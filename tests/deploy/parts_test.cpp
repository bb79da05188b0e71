#include <algorithm>
#include <chrono>
#include <cmath>
#include <random>
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "troupe/deploy/cli/announcement.hpp"
#include "troupe/deploy/cli/bench_pattern.hpp"
#include "troupe/deploy/cli/idle_time.hpp"
#include "troupe/deploy/cli/latency_histogram.hpp"
#include "troupe/deploy/cli/process_name.hpp"
#include "troupe/deploy/cli/progress_line.hpp"
#include "troupe/deploy/cli/text_table.hpp"

namespace {

using namespace troupe;
using namespace troupe::deploy::cli;
using std::chrono::nanoseconds;

// -- latencies

TEST(latency_histogram, a_percentile_is_never_below_the_exact_one_and_at_most_a_64th_above) {
  std::mt19937_64 random{11};
  for (int round = 0; round < 20; ++round) {
    latency_histogram histogram;
    std::vector<std::int64_t> exact;
    std::lognormal_distribution<double> draw{10.0, 1.0 + round % 4};
    for (int i = 0; i < 5000; ++i) {
      exact.push_back(static_cast<std::int64_t>(draw(random)));
      histogram.add(nanoseconds{exact.back()});
    }
    std::ranges::sort(exact);
    for (const double share : {0.01, 0.5, 0.9, 0.99, 0.999}) {
      const auto at = static_cast<std::size_t>(std::ceil(share * 5000.0)) - 1;
      const auto found = histogram.percentile(share).count();
      EXPECT_GE(found, exact[at]) << share;
      EXPECT_LE(found, exact[at] + exact[at] / 64 + 1) << share;
    }
    EXPECT_EQ(histogram.max().count(), exact.back());
    EXPECT_EQ(histogram.percentile(1.0), histogram.max());
  }
}

TEST(latency_histogram, knows_the_mean) {
  latency_histogram histogram;
  EXPECT_EQ(histogram.mean().count(), 0.0);
  for (const int value : {1, 2, 6}) histogram.add(nanoseconds{value});
  EXPECT_EQ(histogram.mean().count(), 3.0);
}

TEST(latency_histogram, takes_every_value_there_is) {
  latency_histogram histogram;
  EXPECT_EQ(histogram.percentile(0.5), nanoseconds{0});
  histogram.add(nanoseconds{-5});
  histogram.add(nanoseconds{0});
  histogram.add(nanoseconds::max());
  EXPECT_EQ(histogram.count(), 3u);
  EXPECT_EQ(histogram.percentile(0.0), nanoseconds{0});
  EXPECT_EQ(histogram.percentile(1.0), nanoseconds::max());
}

// -- the pattern

class pattern : public ::testing::Test {
 protected:
  pattern() {
    kvcache::cache_shape shape;
    shape.layers = kvcache::attention_layers(2, 2, 9);  // 18 bytes a head: no multiple of a word
    shape.block_tokens = 4;
    shape.blocks = 8;
    layout = *kvcache::make_layout(shape, {});
    memory.resize(kvcache::region_sizes(layout).front());
    regions.emplace_back(memory);
  }
  [[nodiscard]] cache_part part(std::uint32_t tokens) const {
    return {&layout, regions, blocks, tokens};
  }

  kvcache::cache_layout layout;
  std::vector<std::byte> memory;
  std::vector<std::span<std::byte>> regions;
  std::vector<block_id> blocks{block_id{5}, block_id{0}, block_id{6}};
};

TEST_F(pattern, notices_each_single_byte_that_changed) {
  fill_pattern(part(10), 7);
  ASSERT_TRUE(verify_pattern(part(10), 7));
  std::size_t noticed = 0;
  for (auto& byte : memory) {
    byte ^= std::byte{1};
    noticed += verify_pattern(part(10), 7) ? 0 : 1;
    byte ^= std::byte{1};
  }
  EXPECT_EQ(noticed, std::size_t{2} * 2 * 2 * 18 * 10);  // layers, planes, heads, bytes, tokens
}

TEST_F(pattern, tells_requests_and_the_order_of_blocks_apart) {
  fill_pattern(part(12), 7);
  EXPECT_FALSE(verify_pattern(part(12), 8));
  std::swap(blocks[0], blocks[1]);
  EXPECT_FALSE(verify_pattern(part(12), 7));
}

// -- output

// -- names of processes

TEST(process_name, fits_what_the_kernel_keeps_and_tells_nodes_apart) {
  EXPECT_EQ(process_name("cache-0"), "troupe:cache-0");
  EXPECT_EQ(process_name("prefill-0"), "troupe:prefil-0");
  EXPECT_EQ(process_name("supervisor"), "troupe:supervis");
  EXPECT_EQ(process_name("decode-12"), "troupe:decod-12");
  EXPECT_EQ(process_name("decode-0-tp3"), "troupe:de-0-tp3");
  EXPECT_EQ(process_name("decode-10-tp31"), "troupe:-10-tp31");
  EXPECT_EQ(process_name("decode-1000-tp31"), "troupe:000-tp31");
  EXPECT_EQ(process_name("my-long-stage-7"), "troupe:my-lon-7");
  EXPECT_EQ(process_name("a-tp7-and-more"), "troupe:a-tp7-an");
  EXPECT_EQ(process_name("123456789"), "troupe:12345678");
  EXPECT_EQ(process_name("x-tp12345678"), "troupe:12345678");
  EXPECT_EQ(process_name(""), "troupe:");
}

TEST(text_table, every_column_is_as_wide_as_its_widest_word) {
  text_table table{{{"NAME"}, {"SIZE", text_table::align::right}, {"WHY"}}};
  table.add({"a", "1", "because"});
  table.add({"longer", "12345"});
  std::ostringstream out;
  table.print(out);
  EXPECT_EQ(out.str(),
            "NAME     SIZE  WHY\n"
            "a           1  because\n"
            "longer  12345\n");
}

TEST(text, from_the_network_cannot_steer_a_terminal) {
  EXPECT_EQ(printable("a\033[2Jb\nc\x7f"), R"(a\x1b[2Jb\x0ac\x7f)");
}

TEST(text, of_sizes_and_times_is_short) {
  EXPECT_EQ(bytes_text(0), "0 B");
  EXPECT_EQ(bytes_text(1023), "1023 B");
  EXPECT_EQ(bytes_text(1536), "1.50 KiB");
  EXPECT_EQ(bytes_text(~std::uint64_t{0}), "16.00 EiB");
  EXPECT_EQ(duration_text(310), "310 ms");
  EXPECT_EQ(duration_text(5'200), "5.2 s");
  EXPECT_EQ(duration_text(3'723'000), "01:02:03");
  EXPECT_EQ(duration_text(3 * 86'400'000ULL + 14'645'000), "3d 04:04:05");
}

TEST(progress, the_bar_is_never_longer_than_it_is) {
  EXPECT_EQ(bar_text(-1.0), "[------------------------------]   0%");
  EXPECT_EQ(bar_text(0.5), "[###############---------------]  50%");
  EXPECT_EQ(bar_text(7.0), "[##############################] 100%");
}

TEST(progress, a_terminal_gets_one_line_and_is_left_clean) {
  std::ostringstream out;
  {
    progress_line line{out, true};
    line.show(0.1, "one");
    line.show(0.2, "two");
  }
  EXPECT_EQ(out.str().find('\n'), std::string::npos);
  EXPECT_TRUE(out.str().ends_with("\r\033[K"));
}

// -- a supervisor without nodes

TEST(idle_time, is_over_when_no_node_was_there_for_so_long) {
  using std::chrono::seconds;
  const idle_time::time_point began{seconds{1000}};
  idle_time idle{seconds{10}, seconds{5}};
  idle.begin(began);
  EXPECT_FALSE(idle.is_over(began + seconds{9}));
  EXPECT_TRUE(idle.is_over(began + seconds{10}));
  *idle.nodes() = 2;
  EXPECT_FALSE(idle.is_still());
  EXPECT_FALSE(idle.is_over(began + seconds{100}));
  *idle.nodes() = 0;
  EXPECT_TRUE(idle.is_still());
  EXPECT_FALSE(idle.is_over(began + seconds{109})) << "from when it was there last";
  EXPECT_TRUE(idle.is_over(began + seconds{110}));
}

TEST(idle_time, begins_anew_with_each_question_for_a_name) {
  using std::chrono::seconds;
  const idle_time::time_point began{seconds{1000}};
  idle_time idle{seconds{10}, seconds{5}};
  idle.begin(began);
  ++*idle.claims();
  EXPECT_FALSE(idle.is_still()) << "it came at the last moment";
  EXPECT_FALSE(idle.is_over(began + seconds{10}));
  EXPECT_TRUE(idle.is_still());
  ++*idle.claims();
  EXPECT_FALSE(idle.is_over(began + seconds{15}));
  EXPECT_FALSE(idle.is_over(began + seconds{24}));
  EXPECT_TRUE(idle.is_over(began + seconds{25}));
}

/// Names are held back for that long, and a process that asks may ask again only after that time.
TEST(idle_time, lasts_as_long_as_a_name_is_held_for_whoever_asked) {
  using std::chrono::seconds;
  const idle_time::time_point began{seconds{1000}};
  idle_time idle{seconds{1}, seconds{5}};
  idle.begin(began);
  ++*idle.claims();
  EXPECT_FALSE(idle.is_over(began));
  EXPECT_FALSE(idle.is_over(began + seconds{4}));
  EXPECT_TRUE(idle.is_over(began + seconds{5}));
}

// -- announcements

TEST(announcement, every_kind_survives_the_pipe_in_order_and_garbage_is_skipped) {
  auto heard = announcements::open();
  ASSERT_TRUE(heard);
  {
    const announcer tell{::dup(heard->far_end())};
    tell.say({announcement::kind::listening, "127.0.0.1", 7400});
    ASSERT_EQ(::write(heard->far_end(), "nonsense\nlistening x y\n", 23), 23);
    tell.say({announcement::kind::registered, {}, 0});
    tell.say({announcement::kind::failed, "two\nlines", 0});
    tell.say({announcement::kind::drained, {}, 0});
  }
  const auto listening = heard->take();
  ASSERT_TRUE(listening);
  EXPECT_EQ(listening->what, announcement::kind::listening);
  EXPECT_EQ(listening->text, "127.0.0.1");
  EXPECT_EQ(listening->port, 7400);
  const auto registered = heard->take();
  ASSERT_TRUE(registered);
  EXPECT_EQ(registered->what, announcement::kind::registered);
  const auto failed = heard->take();
  ASSERT_TRUE(failed);
  EXPECT_EQ(failed->text, "two lines");
  const auto drained = heard->take();
  ASSERT_TRUE(drained);
  EXPECT_EQ(drained->what, announcement::kind::drained);
  EXPECT_FALSE(heard->take());
  EXPECT_FALSE(heard->over());
  heard->close_far_end();
  EXPECT_FALSE(heard->take());
  EXPECT_TRUE(heard->over());
}

TEST(announcement, a_node_that_has_nobody_to_tell_says_nothing) {
  const announcer tell{-1};
  tell.say({announcement::kind::registered, {}, 0});
}

}  // namespace
