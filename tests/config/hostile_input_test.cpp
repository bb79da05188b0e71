// The file comes from a person, or from anyone who can write it: no content may crash the process,
// take long or use much memory.

#include <chrono>
#include <random>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "troupe/config/parse.hpp"

#include "text_of.hpp"
#include "waiting.hpp"

namespace troupe::config {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;

std::string example() {
  return troupe::testing::text_of(TROUPE_SOURCE_DIR "/deploy/examples/store.yaml");
}

/// "*aN", and "aN: &aN ".
std::string alias(int number) {
  return std::string{"*a"}.append(std::to_string(number));
}
std::string anchored(int number) {
  const std::string digits = std::to_string(number);
  return std::string{"a"}.append(digits).append(": &a").append(digits).append(" ");
}

/// Parsing returns a deployment or at least one issue, never both and never neither.
void expect_one_of_both(const parse_outcome& outcome, const std::string& text) {
  ASSERT_NE(outcome.value.has_value(), !outcome.issues.empty()) << text;
  for (const auto& what : outcome.issues) ASSERT_FALSE(to_string(what).empty());
}

TEST(hostile_input, random_bytes_are_refused_and_never_crash) {
  std::mt19937_64 random{11};
  for (int i = 0; i < 3000; ++i) {
    std::string text(random() % 200, '\0');
    for (char& c : text) c = static_cast<char>(random());
    expect_one_of_both(parse(text, "f"), text);
  }
}

TEST(hostile_input, random_yaml_punctuation_never_crashes) {
  constexpr std::string_view alphabet = "{}[],:-?&*!|>'\"%@`#\n\n  \tab01<~=";
  std::mt19937_64 random{12};
  for (int i = 0; i < troupe::testing::tries(20'000); ++i) {
    std::string text(random() % 60, '\0');
    for (char& c : text) c = alphabet[random() % alphabet.size()];
    expect_one_of_both(parse(text, "f"), text);
  }
}

TEST(hostile_input, a_damaged_example_is_a_deployment_or_issues) {
  const std::string whole = example();
  ASSERT_TRUE(parse(whole, "f").value);
  std::mt19937_64 random{13};
  std::size_t refused = 0;
  for (int i = 0; i < 1500; ++i) {
    std::string text = whole;
    for (auto edits = random() % 4 + 1; edits > 0; --edits) {
      const auto at = random() % text.size();
      switch (random() % 4) {
        case 0: text.erase(at, random() % 20); break;
        case 1: text.insert(at, 1, static_cast<char>(random())); break;
        case 2: text[at] = "{}[]:,-\n 09az"[random() % 13]; break;
        default: text.insert(at, text.substr(random() % text.size(), random() % 40)); break;
      }
      if (text.empty()) text.push_back(' ');
    }
    const auto outcome = parse(text, "f");
    expect_one_of_both(outcome, text);
    refused += outcome.issues.empty() ? 0U : 1U;
  }
  EXPECT_GT(refused, 1000U);
}

TEST(hostile_input, every_prefix_of_a_file_is_a_deployment_or_issues) {
  const std::string whole = example();
  for (std::size_t length = 0; length <= whole.size(); ++length) {
    const std::string text = whole.substr(0, length);
    expect_one_of_both(parse(text, "f"), text);
  }
}

TEST(hostile_input, a_file_of_more_than_a_mebibyte_is_refused_by_its_size) {
  const std::string head = "cluster: c\nstages: [{name: p, role: prefill, engine: external}]\n#";
  std::string text = head + std::string(max_file_bytes - head.size(), 'x');
  EXPECT_TRUE(parse(text, "f").value);
  text += 'x';
  const auto outcome = parse(text, "f");
  ASSERT_THAT(outcome.issues, SizeIs(1));
  EXPECT_THAT(outcome.issues[0].message, HasSubstr("larger than 1 MiB"));
}

TEST(hostile_input, what_a_terminal_would_act_on_is_spelt_out) {
  const auto outcome = parse(
      "cluster: c\nstages: [{name: p, role: \"\\e[31mred\\x07\\x9b\\x7fü\"}]\n", "f\x1b.yaml");
  ASSERT_FALSE(outcome.issues.empty());
  const auto text = to_string(outcome.issues);
  EXPECT_THAT(text, HasSubstr("f\\x1b.yaml:2"));
  EXPECT_THAT(text, HasSubstr("\\x1b[31mred\\x07\\x9b\\x7fü"));
  for (const char control : {'\x1b', '\x07', '\x7f'})
    EXPECT_EQ(text.find(control), std::string::npos) << int{control};
  EXPECT_EQ(text.find("\xc2\x9b"), std::string::npos);
}

TEST(hostile_input, a_mebibyte_of_nesting_or_of_values_ends_soon) {
  const auto size = max_file_bytes;
  std::string pairs;
  while (pairs.size() + 8 < size) pairs += "[a,b],\n";
  std::string keys;
  for (int i = 0; keys.size() + 16 < size; ++i) {
    keys.append("k").append(std::to_string(i)).append(": 1\n");
  }
  std::string same;
  while (same.size() + 16 < size) same += "cluster: 1\n";
  const auto end = troupe::testing::end_of_wait();
  for (const auto& text :
       {std::string(size, '['), std::string(size, '{'), std::string{"a: ["}.append(pairs), keys,
        same, std::string(size, '-'), std::string{"a: '"}.append(size - 10, 'b')}) {
    const auto outcome = parse(text, "f");
    EXPECT_FALSE(outcome.value);
    EXPECT_FALSE(outcome.issues.empty());
    EXPECT_LE(outcome.issues.size(), max_issues + 1);
  }
  EXPECT_LT(std::chrono::steady_clock::now(), end) << "it takes for ever";
}

TEST(hostile_input, an_alias_bomb_is_refused_by_what_it_would_repeat) {
  std::string text = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n";
  for (int i = 1; i < 30; ++i) {
    const std::string inner = alias(i - 1);
    text.append(anchored(i)).append("[").append(inner).append(",").append(inner).append("]\n");
  }
  const auto outcome = parse(text, "f");
  ASSERT_THAT(outcome.issues, SizeIs(1));
  EXPECT_THAT(outcome.issues[0].message, HasSubstr("counting what aliases repeat"));
}

TEST(hostile_input, aliases_cannot_nest_deeper_than_a_file_may) {
  std::string text = "a0: &a0 [x]\n";
  for (int i = 1; i < 200; ++i) {
    text.append(anchored(i)).append("[").append(alias(i - 1)).append("]\n");
  }
  const auto outcome = parse(text, "f");
  ASSERT_THAT(outcome.issues, SizeIs(1));
  EXPECT_THAT(outcome.issues[0].message, HasSubstr("levels of nesting"));
}

}  // namespace
}  // namespace troupe::config
