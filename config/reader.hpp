#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "troupe/config/name_rule.hpp"
#include "troupe/config/parse.hpp"
#include "troupe/config/syntax.hpp"
#include "troupe/config/words.hpp"

/// Reads sections of the file: typed access to the keys of one mapping, which collects errors
/// instead of stopping at the first.
namespace troupe::config {

/// A word that a later release will accept, and the sentence that refuses it until then. A `word`
/// ending in `*` matches every word with that prefix.
struct later_word {
  std::string_view word;
  std::string_view why;
};

/// The errors found so far, and the place of each key.
class findings {
 public:
  explicit findings(std::string file) : file_{std::move(file)} {}

  /// Records the place of a key, for issues that are found later.
  void locate(const std::string& path, int line, int column, std::string text);
  /// Adds an issue at `path`, or at the nearest enclosing section that is in the file. The text
  /// found is included only if `path` itself is in the file.
  void refuse(const std::string& path, std::string expected, std::string message = {});
  /// Adds an issue whose place and text are not those of the key's value.
  void refuse_at(const std::string& path, int line, int column, std::string found,
                 std::string expected, std::string message = {});

  /// Whether a value at or below `path` was refused, so that dependent checks can be skipped.
  [[nodiscard]] bool failed(const std::string& path) const;
  /// Whether `path` itself was refused, regardless of the values below it.
  [[nodiscard]] bool refused(const std::string& path) const { return failed_.contains(path); }
  [[nodiscard]] bool has(const std::string& path) const { return places_.contains(path); }

  /// The issues by line, without repetitions; beyond `max_issues`, a last issue says that there are
  /// more.
  [[nodiscard]] std::vector<issue> take();

 private:
  struct place {
    int line{0};
    int column{0};
    std::string text;
  };

  std::string file_;
  std::map<std::string, place> places_;
  std::set<std::string> failed_;
  std::vector<issue> issues_;
};

/// One mapping of the file. Read every key that it may have, then call `finish`.
class section {
 public:
  /// If `node` is null, the section is not in the file, and every key has its default.
  section(findings& into, const yaml_node* node, std::string path);

  [[nodiscard]] bool has(std::string_view key) const;
  [[nodiscard]] std::string path_of(std::string_view key) const;
  [[nodiscard]] findings& into() const noexcept { return *into_; }

  /// The value of `key`; null if the key is missing (or has no value, which is refused).
  const yaml_node* get(std::string_view key);
  /// The mapping or the sequence under `key`; refuses anything else.
  const yaml_node* mapping(std::string_view key);
  const yaml_node* sequence(std::string_view key);

  /// Refuses the section if the key is missing.
  void require(std::string_view key, const std::string& expected);

  /// A scalar's text, quoted or not.
  std::optional<std::string> text(std::string_view key, const std::string& expected);
  std::int64_t integer(std::string_view key, std::int64_t low, std::int64_t high,
                       std::int64_t otherwise);
  std::chrono::milliseconds duration(std::string_view key, std::chrono::milliseconds low,
                                     std::chrono::milliseconds high,
                                     std::chrono::milliseconds otherwise);
  std::uint64_t size(std::string_view key, std::uint64_t otherwise);
  bool boolean(std::string_view key, bool otherwise);
  std::string name(std::string_view key, const name_rule& rule, std::string otherwise);
  std::string host(std::string_view key, std::string otherwise);

  template <typename Enum>
  Enum word(std::string_view key, Enum otherwise, std::span<const later_word> later = {}) {
    const auto chosen = text(key, one_of<Enum>());
    return chosen ? word_in<Enum>(*chosen, path_of(key), later).value_or(otherwise) : otherwise;
  }
  /// The enum value named by the text `chosen` at `path`; refuses any other word.
  template <typename Enum>
  std::optional<Enum> word_in(const std::string& chosen, const std::string& path,
                              std::span<const later_word> later = {}) {
    for (const auto& [value, word] : words<Enum>) {
      if (word == chosen) return value;
    }
    refuse_word(chosen, path, one_of<Enum>(), later);
    return std::nullopt;
  }

  /// Refuses each of these keys that is present.
  void later(std::span<const later_word> keys);
  /// Refuses every key that was not read, naming the key that was probably meant.
  void finish();

 private:
  template <typename Enum>
  static std::string one_of() {
    std::string list = words<Enum>.size() > 1 ? "one of " : "";
    for (const auto& [value, word] : words<Enum>) {
      if (value != words<Enum>.front().first) list += ", ";
      list += word;
    }
    return list;
  }
  void refuse_word(const std::string& chosen, const std::string& path, const std::string& expected,
                   std::span<const later_word> later);

  findings* into_;
  const yaml_node* node_;
  std::string path_;
  std::set<std::string, std::less<>> known_;
};

/// The items of a sequence with their paths; refuses items that are not scalars and returns them as
/// null to keep positions.
[[nodiscard]] std::vector<std::pair<const yaml_node*, std::string>> scalars_of(
    findings& into, const yaml_node& sequence, const std::string& path,
    const std::string& expected);
/// Whether `text` is a host; refuses it at `path` if not.
bool check_host(findings& into, const std::string& text, const std::string& path);
/// A whole number in decimal digits, not in quotes. Empty for anything else.
[[nodiscard]] std::optional<std::int64_t> parse_integer(const yaml_node& node);
/// The text of a node, as shown in a message.
[[nodiscard]] std::string shown(const yaml_node& node);
[[nodiscard]] std::string item_path(const std::string& path, std::size_t index);
/// The word of `known` that `word` was probably meant to be; empty if none is close.
[[nodiscard]] std::string nearest(std::string_view word,
                                  const std::set<std::string, std::less<>>& known);

}  // namespace troupe::config
