#include "troupe/deploy/cli/text_table.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <ostream>

namespace troupe::deploy::cli {

namespace {

std::string padded(const std::string& text, std::size_t width, text_table::align side) {
  const std::string space(width > text.size() ? width - text.size() : 0, ' ');
  return side == text_table::align::right ? space + text : text + space;
}

}  // namespace

void text_table::add(std::vector<std::string> row) {
  row.resize(columns_.size());
  rows_.push_back(std::move(row));
}

void text_table::print(std::ostream& out) const {
  std::vector<std::size_t> widths;
  for (std::size_t i = 0; i < columns_.size(); ++i) {
    widths.push_back(columns_[i].heading.size());
    for (const auto& row : rows_) widths[i] = std::max(widths[i], row[i].size());
  }
  const auto line = [&](const auto& word_of) {
    std::string text;
    for (std::size_t i = 0; i < columns_.size(); ++i) {
      if (i > 0) text += "  ";
      text += padded(word_of(i), widths[i], columns_[i].side);
    }
    text.erase(text.find_last_not_of(' ') + 1);
    out << text << "\n";
  };
  line([&](std::size_t i) { return columns_[i].heading; });
  for (const auto& row : rows_) line([&](std::size_t i) { return row[i]; });
}

std::string fixed_text(double value, int digits) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%.*f", digits, value);
  return text.data();
}

std::string bytes_text(std::uint64_t bytes) {
  static constexpr std::array units{"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 1024.0 && unit + 1 < units.size()) {
    value /= 1024.0;
    ++unit;
  }
  return fixed_text(value, unit == 0 ? 0 : 2) + " " + units[unit];
}

std::string duration_text(std::uint64_t ms) {
  if (ms < 1000) return std::to_string(ms) + " ms";
  if (ms < 60'000) return fixed_text(static_cast<double>(ms) / 1000.0, 1) + " s";
  const auto seconds = ms / 1000;
  std::array<char, 32> clock{};
  std::snprintf(clock.data(), clock.size(), "%02u:%02u:%02u",
                static_cast<unsigned>(seconds / 3600 % 24),
                static_cast<unsigned>(seconds / 60 % 60), static_cast<unsigned>(seconds % 60));
  const auto days = seconds / 86'400;
  return days == 0 ? std::string{clock.data()} : std::to_string(days) + "d " + clock.data();
}

}  // namespace troupe::deploy::cli
