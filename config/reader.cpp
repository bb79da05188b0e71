#include "troupe/config/reader.hpp"

#include <algorithm>
#include <charconv>
#include <system_error>

#include "troupe/config/hosts.hpp"
#include "troupe/config/units.hpp"

namespace troupe::config {
namespace {

constexpr std::size_t max_shown = 60;  // bytes of a value in a message

/// Makes any text printable and short.
std::string shorten(std::string_view text) {
  std::string result;
  for (const char c : text.substr(0, max_shown))
    result += c == '\n' || c == '\r' || c == '\t' ? ' ' : c;
  if (text.size() <= max_shown) return result;
  while (!result.empty() && (static_cast<unsigned char>(result.back()) & 0xC0U) == 0x80U)
    result.pop_back();
  if (!result.empty() && static_cast<unsigned char>(result.back()) >= 0x80) result.pop_back();
  return result + "...";
}

/// Edits (insert, remove, replace, swap neighbours) from one word to the other. Words are short.
std::size_t edits_between(std::string_view a, std::string_view b) {
  std::vector<std::vector<std::size_t>> cost(a.size() + 1, std::vector<std::size_t>(b.size() + 1));
  for (std::size_t i = 0; i <= a.size(); ++i) {
    for (std::size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        cost[i][j] = i + j;
        continue;
      }
      const std::size_t differs = a[i - 1] == b[j - 1] ? 0 : 1;
      cost[i][j] = std::min({cost[i - 1][j] + 1, cost[i][j - 1] + 1, cost[i - 1][j - 1] + differs});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        cost[i][j] = std::min(cost[i][j], cost[i - 2][j - 2] + 1);
      }
    }
  }
  return cost[a.size()][b.size()];
}

const later_word* find_later(std::span<const later_word> later, std::string_view text) {
  for (const auto& entry : later) {
    const bool open = entry.word.ends_with('*');
    const auto stem = open ? entry.word.substr(0, entry.word.size() - 1) : entry.word;
    if (open ? text.starts_with(stem) : text == stem) return &entry;
  }
  return nullptr;
}

/// The path of the section around `path`; empty for a key of the root.
std::string parent_of(const std::string& path) {
  const auto end = path.find_last_of(".[");
  return end == std::string::npos ? "" : path.substr(0, end);
}

}  // namespace

void findings::locate(const std::string& path, int line, int column, std::string text) {
  places_.insert_or_assign(path, place{line, column, std::move(text)});
}

void findings::refuse(const std::string& path, std::string expected, std::string message) {
  auto at = places_.find(path);
  const bool there = at != places_.end();
  for (std::string around = path; at == places_.end() && !around.empty();) {
    around = parent_of(around);
    at = places_.find(around);
  }
  const place where = at == places_.end() ? place{1, 1, {}} : at->second;
  // "found a list" adds nothing if the message says what is wrong with the list.
  const bool obvious = !message.empty() && (where.text == "a list" || where.text == "a mapping");
  refuse_at(path, where.line, where.column, there && !obvious ? where.text : "",
            std::move(expected), std::move(message));
}

void findings::refuse_at(const std::string& path, int line, int column, std::string found,
                         std::string expected, std::string message) {
  failed_.insert(path);
  if (issues_.size() > max_issues) return;  // keeps one more than is shown, to know of more
  issue next;
  next.file = file_;
  next.line = line;
  next.column = column;
  next.key = path;
  next.found = std::move(found);
  next.expected = std::move(expected);
  next.message = std::move(message);
  issues_.push_back(std::move(next));
}

bool findings::failed(const std::string& path) const {
  for (auto it = failed_.lower_bound(path); it != failed_.end() && it->starts_with(path); ++it) {
    if (it->size() == path.size() || (*it)[path.size()] == '.' || (*it)[path.size()] == '[')
      return true;
  }
  return false;
}

std::vector<issue> findings::take() {
  std::stable_sort(issues_.begin(), issues_.end(), [](const issue& a, const issue& b) {
    return std::pair{a.line, a.column} < std::pair{b.line, b.column};
  });
  issues_.erase(std::unique(issues_.begin(), issues_.end()), issues_.end());
  if (issues_.size() > max_issues) {
    issues_.resize(max_issues);
    issue last;
    last.file = file_;
    last.line = issues_.back().line;
    last.message = "more is wrong; only the first " + std::to_string(max_issues) + " are listed";
    issues_.push_back(std::move(last));
  }
  return std::move(issues_);
}

section::section(findings& into, const yaml_node* node, std::string path)
    : into_{&into}, node_{node}, path_{std::move(path)} {
  if (node_ == nullptr) return;
  std::map<std::string_view, int> lines;
  for (const auto& entry : node_->entries) {
    const auto [first, fresh] = lines.emplace(entry.key, entry.line);
    if (fresh) {
      into_->locate(path_of(entry.key), entry.value.line > 0 ? entry.value.line : entry.line,
                    entry.value.column, shown(entry.value));
    } else {
      into_->refuse_at(path_of(entry.key), entry.line, entry.column, "", "",
                       "the key stands on line " + std::to_string(first->second) + " already");
    }
  }
}

bool section::has(std::string_view key) const {
  return into_->has(path_of(key));
}

std::string section::path_of(std::string_view key) const {
  const std::string name = shorten(key);
  return path_.empty() ? name : path_ + "." + name;
}

const yaml_node* section::get(std::string_view key) {
  known_.emplace(key);
  if (node_ == nullptr) return nullptr;
  for (const auto& entry : node_->entries) {
    if (entry.key != key) continue;
    if (entry.value.kind != yaml_node::form::null) return &entry.value;
    into_->refuse_at(path_of(key), entry.line, entry.column, "no value", "",
                     "give it one, or leave the key out");
    return nullptr;
  }
  return nullptr;
}

const yaml_node* section::mapping(std::string_view key) {
  const yaml_node* node = get(key);
  if (node == nullptr || node->is_mapping()) return node;
  into_->refuse(path_of(key), "a mapping of keys to values");
  return nullptr;
}

const yaml_node* section::sequence(std::string_view key) {
  const yaml_node* node = get(key);
  if (node == nullptr || node->kind == yaml_node::form::sequence) return node;
  into_->refuse(path_of(key), "a list");
  return nullptr;
}

void section::require(std::string_view key, const std::string& expected) {
  known_.emplace(key);
  if (!has(key)) into_->refuse(path_of(key), expected, "the key is missing");
}

std::optional<std::string> section::text(std::string_view key, const std::string& expected) {
  const yaml_node* node = get(key);
  if (node == nullptr) return std::nullopt;
  if (node->kind == yaml_node::form::scalar) return node->text;
  into_->refuse(path_of(key), expected);
  return std::nullopt;
}

std::int64_t section::integer(std::string_view key, std::int64_t low, std::int64_t high,
                              std::int64_t otherwise) {
  const yaml_node* node = get(key);
  if (node == nullptr) return otherwise;
  const auto value = parse_integer(*node);
  if (value && *value >= low && *value <= high) return *value;
  into_->refuse(path_of(key),
                "a whole number from " + std::to_string(low) + " to " + std::to_string(high));
  return otherwise;
}

std::chrono::milliseconds section::duration(std::string_view key, std::chrono::milliseconds low,
                                            std::chrono::milliseconds high,
                                            std::chrono::milliseconds otherwise) {
  const std::string expected = "a duration from " + format_duration(low) + " to " +
                               format_duration(high) +
                               " with a unit (ms, s, min, h), such as 500ms";
  const auto chosen = text(key, expected);
  if (!chosen) return otherwise;
  const auto value = parse_duration(*chosen);
  if (value && *value >= low && *value <= high) return *value;
  into_->refuse(path_of(key), expected);
  return otherwise;
}

std::uint64_t section::size(std::string_view key, std::uint64_t otherwise) {
  const std::string expected = "a size from 1B to " + format_size(max_size) +
                               " with a unit (B, KiB, MiB, GiB, TiB, KB, MB, GB, "
                               "TB), such as 1GiB";
  const auto chosen = text(key, expected);
  if (!chosen) return otherwise;
  const auto value = parse_size(*chosen);
  if (value && *value > 0) return *value;
  into_->refuse(path_of(key), expected);
  return otherwise;
}

bool section::boolean(std::string_view key, bool otherwise) {
  const yaml_node* node = get(key);
  if (node == nullptr) return otherwise;
  const bool plain = node->kind == yaml_node::form::scalar && !node->quoted;
  if (plain && (node->text == "true" || node->text == "false")) return node->text == "true";
  into_->refuse(path_of(key), "true or false");
  return otherwise;
}

std::string section::name(std::string_view key, const name_rule& rule, std::string otherwise) {
  const auto expected = rule.text();
  auto chosen = text(key, expected);
  if (!chosen) return otherwise;
  if (rule.allows(*chosen)) return *std::move(chosen);
  into_->refuse(path_of(key), expected);
  return otherwise;
}

std::string section::host(std::string_view key, std::string otherwise) {
  auto chosen = text(key, "a host name or an IP address");
  if (chosen && check_host(*into_, *chosen, path_of(key))) return *std::move(chosen);
  return otherwise;
}

void section::refuse_word(const std::string& chosen, const std::string& path,
                          const std::string& expected, std::span<const later_word> later) {
  const later_word* reason = find_later(later, chosen);
  into_->refuse(path, expected, reason != nullptr ? std::string{reason->why} : "");
}

void section::later(std::span<const later_word> keys) {
  if (node_ == nullptr) return;
  for (const auto& entry : node_->entries) {
    const later_word* reason = find_later(keys, entry.key);
    if (reason == nullptr) continue;
    known_.insert(entry.key);
    into_->refuse_at(path_of(entry.key), entry.line, entry.column, "", "",
                     std::string{reason->why});
  }
}

void section::finish() {
  if (node_ == nullptr) return;
  for (const auto& entry : node_->entries) {
    if (known_.contains(entry.key)) continue;
    std::string hint;
    if (entry.key == "<<") {
      hint = "merge keys are not supported; write the keys out";
    } else if (const std::string meant = nearest(entry.key, known_); !meant.empty()) {
      hint = "unknown key; did you mean `" + meant + "`?";
    } else {
      hint = "unknown key; known here:";
      for (const auto& known : known_) hint += (known == *known_.begin() ? " " : ", ") + known;
    }
    into_->refuse_at(path_of(entry.key), entry.line, entry.column, "", "", std::move(hint));
  }
}

std::vector<std::pair<const yaml_node*, std::string>> scalars_of(findings& into,
                                                                 const yaml_node& sequence,
                                                                 const std::string& path,
                                                                 const std::string& expected) {
  std::vector<std::pair<const yaml_node*, std::string>> result;
  for (std::size_t i = 0; i < sequence.items.size(); ++i) {
    const auto& item = sequence.items[i];
    const std::string at = item_path(path, i);
    into.locate(at, item.line, item.column, shown(item));
    const bool good = item.kind == yaml_node::form::scalar;
    if (!good) into.refuse(at, expected);
    result.emplace_back(good ? &item : nullptr, at);
  }
  return result;
}

bool check_host(findings& into, const std::string& text, const std::string& path) {
  if (is_wildcard(text)) {
    into.refuse(path, "an address that peers can connect to");
    return false;
  }
  if (is_host(text)) return true;
  into.refuse(path, "a host name or an IP address", "ports and brackets have no place here");
  return false;
}

std::optional<std::int64_t> parse_integer(const yaml_node& node) {
  if (node.kind != yaml_node::form::scalar || node.quoted) return std::nullopt;
  const char* const last = node.text.data() + node.text.size();
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(node.text.data(), last, value);
  if (error != std::errc{} || end != last) return std::nullopt;
  return value;
}

std::string shown(const yaml_node& node) {
  switch (node.kind) {
    case yaml_node::form::null: return "no value";
    case yaml_node::form::sequence: return node.items.empty() ? "an empty list" : "a list";
    case yaml_node::form::mapping: return "a mapping";
    case yaml_node::form::scalar:
      return node.quoted ? "`\"" + shorten(node.text) + "\"`" : "`" + shorten(node.text) + "`";
  }
  return "";
}

std::string item_path(const std::string& path, std::size_t index) {
  return path + "[" + std::to_string(index) + "]";
}

std::string nearest(std::string_view word, const std::set<std::string, std::less<>>& known) {
  constexpr std::size_t longest = 40;
  if (word.size() > longest) return "";
  std::string best;
  std::size_t best_edits = std::max<std::size_t>(word.size() / 3, 1) + 1;  // one more than allowed
  for (const auto& candidate : known) {
    const std::size_t edits = edits_between(word, candidate);
    if (edits < best_edits) {
      best = candidate;
      best_edits = edits;
    }
  }
  return best;
}

}  // namespace troupe::config
