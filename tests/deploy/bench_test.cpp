#include <algorithm>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <tuple>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "command.hpp"

namespace {

using ::testing::HasSubstr;
using ::testing::Values;
using namespace troupe::testing;

/// A load that takes a fraction of a second, and whose last block is not full.
std::vector<std::string> small_load(std::vector<std::string> more) {
  std::vector<std::string> arguments{"bench", "--layers", "2",  "--kv-heads",    "2", "--head-dim",
                                     "16",    "--tokens", "40", "--concurrency", "3"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

class results_file {
 public:
  ~results_file() { std::remove(path.c_str()); }
  [[nodiscard]] nlohmann::json read() const {
    std::ifstream in{path};
    return nlohmann::json::parse(in);
  }
  const std::string path = ::testing::TempDir() + "troupe-bench-" + std::to_string(free_port());
};

class bench : public ::testing::TestWithParam<std::tuple<const char*, const char*, const char*>> {};

TEST_P(bench, moves_every_byte_and_writes_down_what_it_measured) {
  const auto& [mode, backend, more] = GetParam();
  const results_file file;
  auto arguments = small_load(
      {"--requests", "50", "--verify", "--mode", mode, "--backend", backend, "--json", file.path});
  if (*more != '\0') arguments.emplace_back(more);
  const auto ended = run(arguments);
  ASSERT_EQ(ended.code, 0) << ended.out << ended.err;
  EXPECT_THAT(ended.out, HasSubstr("verified    every byte of 50 transfers"));
  for (const auto* word : {"throughput", "p50", "p90", "p99", "max"})
    EXPECT_THAT(ended.out, HasSubstr(word));

  const auto results = file.read();
  constexpr std::uint64_t bytes = 2 * 2 * 2 * 16 * 2 * 40;  // layers, K and V, heads, dim, bf16
  EXPECT_EQ(results.at("transfers"), 50);
  EXPECT_EQ(results.at("verified"), 50);
  EXPECT_EQ(results.at("bytes"), 50 * bytes);
  EXPECT_EQ(results.at("load").at("bytes_per_transfer"), bytes);
  EXPECT_EQ(results.at("load").at("mode"), mode);
  EXPECT_EQ(results.at("link").at("backend"), backend);
  const auto& latency = results.at("latency_us");
  EXPECT_GT(latency.at("p50"), 0.0);
  EXPECT_GT(latency.at("mean"), 0.0);
  EXPECT_LE(latency.at("mean"), latency.at("max"));
  EXPECT_THAT(results.at("supervisor").get<std::string>(), ::testing::StartsWith("127.0.0.1:"));
  EXPECT_LE(latency.at("p50"), latency.at("p90"));
  EXPECT_LE(latency.at("p90"), latency.at("p99"));
  EXPECT_LE(latency.at("p99"), latency.at("max"));
}

INSTANTIATE_TEST_SUITE_P(every, bench,
                         ::testing::Combine(Values("write", "read"), Values("shm", "tcp"),
                                            Values("", "--polling", "--in-process",
                                                   "--contiguous")),
                         [](const auto& tested) {
                           const std::string more = std::get<2>(tested.param);
                           auto name = std::string{std::get<0>(tested.param)} + "_" +
                                       std::get<1>(tested.param) +
                                       (more.empty() ? more : "_" + more.substr(2));
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

class verified_bench : public ::testing::TestWithParam<const char*> {};

TEST_P(verified_bench, counts_only_the_time_in_which_caches_move) {
  const results_file file;
  // One after the other, so that the measured time contains only transfers.
  const auto ended =
      run({"bench", "--layers", "4", "--tokens", "1024", "--concurrency", "1", "--requests", "30",
           "--verify", "--mode", GetParam(), "--json", file.path});
  ASSERT_EQ(ended.code, 0) << ended.err;
  const auto results = file.read();
  EXPECT_EQ(results.at("verified"), 30);
  const auto moving = results.at("latency_us").at("mean").get<double>() * 30 / 1e6;
  EXPECT_GT(results.at("seconds"), 0.0);
  const auto verifying = results.at("verify_seconds").get<double>();
  EXPECT_GT(verifying, 0.0);
  // Verifying takes ten times as long as moving.
  EXPECT_LT(results.at("seconds").get<double>(), moving + verifying / 2) << results;
}

INSTANTIATE_TEST_SUITE_P(bench, verified_bench, Values("write", "read"),
                         [](const auto& tested) { return std::string{tested.param}; });

TEST(bench, a_verified_one_ends_after_its_duration_too) {
  const results_file file;
  const auto ended = run(small_load({"--duration", "700ms", "--verify", "--json", file.path}));
  ASSERT_EQ(ended.code, 0) << ended.err;
  const auto results = file.read();
  EXPECT_GT(results.at("verified"), 0);
  EXPECT_EQ(results.at("verified"), results.at("transfers"));
}

TEST(bench, a_duration_ends_it_and_progress_is_lines_where_there_is_no_terminal) {
  const auto ended = run(small_load({"--duration", "1500ms"}));
  ASSERT_EQ(ended.code, 0) << ended.err;
  EXPECT_THAT(ended.out, ::testing::ContainsRegex("\n[0-9]+%  [0-9.]+ GB/s, [0-9]+ transfers\n"));
  EXPECT_THAT(ended.out, ::testing::Not(HasSubstr("\r")));
}

TEST(bench, ctrl_c_ends_it_with_what_was_measured) {
  command bench{small_load({"--duration", "1h"})};
  ASSERT_TRUE(bench.says("GB/s")) << bench.out() << bench.err();
  bench.signal(SIGINT);
  EXPECT_EQ(bench.wait(), 130) << bench.err();
  EXPECT_THAT(bench.out(), HasSubstr("latency"));
}

TEST(bench, a_results_file_that_cannot_be_written_is_named) {
  const auto ended = run(small_load({"--requests", "5", "--json", "/nowhere/at/all.json"}));
  EXPECT_NE(ended.code, 0);
  EXPECT_THAT(ended.err, HasSubstr("/nowhere/at/all.json"));
}

TEST(bench, a_load_that_fits_no_memory_is_refused) {
  const auto ended = run({"bench", "--layers", "2048", "--kv-heads", "65536", "--head-dim", "65536",
                          "--tokens", "16777216", "--concurrency", "16384"});
  EXPECT_EQ(ended.code, 2);
  EXPECT_THAT(ended.err, HasSubstr("--tokens"));
}

}  // namespace
