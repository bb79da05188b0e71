#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "command.hpp"

namespace {

using ::testing::HasSubstr;
using troupe::testing::run;

class help : public ::testing::TestWithParam<std::string> {};

TEST_P(help, is_there_at_every_level_and_says_what_the_exit_codes_mean) {
  std::vector<std::string> arguments;
  if (!GetParam().empty()) arguments.push_back(GetParam());
  arguments.emplace_back("--help");
  const auto ended = run(arguments);
  EXPECT_EQ(ended.code, 0) << ended.err;
  EXPECT_THAT(ended.out, HasSubstr("Usage: troupe"));
  EXPECT_THAT(ended.out, HasSubstr("Exit codes:"));
  EXPECT_EQ(ended.err, "");
}

INSTANTIATE_TEST_SUITE_P(verbs, help,
                         ::testing::Values("", "demo", "up", "node", "check", "status", "events",
                                           "drain", "certs", "info", "bench"),
                         [](const auto& tested) {
                           return tested.param.empty() ? std::string{"troupe"} : tested.param;
                         });

TEST(usage, names_every_verb) {
  const auto ended = run({"--help"});
  for (const auto* verb :
       {"demo", "up", "node", "check", "status", "events", "drain", "certs", "info", "bench"})
    EXPECT_THAT(ended.out, HasSubstr(std::string{"\n  "} + verb + " "));
}

TEST(usage, the_version_is_a_version) {
  const auto ended = run({"--version"});
  EXPECT_EQ(ended.code, 0);
  EXPECT_THAT(ended.out, ::testing::MatchesRegex("[0-9]+\\.[0-9]+\\.[0-9]+\n"));
}

TEST(usage, wrong_arguments_end_with_two_and_a_sentence_on_standard_error) {
  const std::vector<std::vector<std::string>> wrong{{},
                                                    {"fly"},
                                                    {"check"},
                                                    {"node", "file.yaml"},
                                                    {"up", "file.yaml", "--faster"},
                                                    {"events", "file.yaml", "--since", "soon"},
                                                    {"status", "a:1", "--interval", "2s"},
                                                    {"status", "a:1", "-w", "--interval", "1"},
                                                    {"status", "a:1", "-w", "--interval", "1ms"},
                                                    {"bench", "--mode", "sideways"},
                                                    {"bench", "--duration", "5"},
                                                    {"bench", "--layers", "0"},
                                                    {"bench", "--tokens", "5", "--blocks", "5"},
                                                    {"demo", "--backend", "pigeon"}};
  for (const auto& arguments : wrong) {
    const auto ended = run(arguments);
    EXPECT_EQ(ended.code, 2) << ::testing::PrintToString(arguments);
    EXPECT_NE(ended.err, "") << ::testing::PrintToString(arguments);
    EXPECT_EQ(ended.out, "") << ::testing::PrintToString(arguments);
  }
}

TEST(usage, an_unknown_word_is_named_at_every_level) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> wrong{
      {{}, "there are demo, up, node, check, ask, status, events, drain, certs, info, bench"},
      {{"fly"}, "unknown verb `fly`"},
      {{"chek", "file.yaml"},
       "demo, up, node, check, ask, status, events, drain, certs, info, bench"},
      {{"fly", "--help"}, "unknown verb `fly`"},
      {{"router"}, "troupe-kv[router]"},
      {{"--faster"}, "--faster"},
      {{"--faster", "check"}, "--faster"},
      {{"check", "--faster"}, "--faster"},
      {{"node", "file.yaml", "--faster"}, "--faster"},
      {{"up", "--faster", "7"}, "--faster"},
      {{"status", "--faster"}, "--faster"},
      {{"events", "--faster"}, "--faster"},
      {{"demo", "fly"}, "fly"},
      {{"info", "fly"}, "fly"},
      {{"bench", "--verfy"}, "--verfy"},
      {{"check", "file.yaml", "fly"}, "fly"}};
  for (const auto& [arguments, named] : wrong) {
    const auto ended = run(arguments);
    EXPECT_EQ(ended.code, 2) << ::testing::PrintToString(arguments);
    EXPECT_THAT(ended.err, HasSubstr(named)) << ::testing::PrintToString(arguments);
    EXPECT_THAT(ended.err, HasSubstr("--help")) << ::testing::PrintToString(arguments);
    EXPECT_EQ(ended.out, "") << ::testing::PrintToString(arguments);
  }
}

TEST(usage, the_first_word_is_the_verb) {
  const auto ended = run({"fly", "check"});
  EXPECT_EQ(ended.code, 2);
  EXPECT_THAT(ended.err, HasSubstr("unknown verb `fly`"));
}

}  // namespace
