// The parts of `troupe status --watch` that need neither a terminal nor a clock.
#include <algorithm>
#include <utility>
#include <vector>

#include "troupe/deploy/cli/status_watch.hpp"

namespace troupe::deploy::cli {

namespace {

std::vector<std::string_view> lines_of(std::string_view text) {
  std::vector<std::string_view> lines;
  while (!text.empty()) {
    const auto end = std::min(text.find('\n'), text.size());
    lines.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return lines;
}

/// The first `columns` characters of UTF-8: a continuation byte takes no column.
std::string_view cut(std::string_view line, std::size_t columns) {
  std::size_t taken = 0;
  for (std::size_t i = 0; i < line.size(); ++i) {
    const bool begins = (static_cast<unsigned char>(line[i]) & 0xC0U) != 0x80U;
    if (begins && taken++ == columns) return line.substr(0, i);
  }
  return line;
}

}  // namespace

void rate_meter::measure(cluster_status& status) {
  std::map<std::string, reading> now;
  for (auto& node : status.nodes) {
    if (!node.report) continue;
    const auto& report = *node.report;
    const auto& name = node.member.node.name;
    const reading here{report.node.incarnation, report.uptime_ms, report.transfers_done,
                       report.bytes_moved};
    if (const auto it = last_.find(name); it != last_.end()) {
      const reading& before = it->second;
      const bool goes_on = before.incarnation == here.incarnation &&
                           here.uptime_ms > before.uptime_ms &&
                           here.transfers >= before.transfers && here.bytes >= before.bytes;
      if (goes_on) {
        const auto seconds = static_cast<double>(here.uptime_ms - before.uptime_ms) / 1000.0;
        node.rates = {static_cast<double>(here.transfers - before.transfers) / seconds,
                      static_cast<double>(here.bytes - before.bytes) / seconds};
      }
    }
    now[name] = here;
  }
  last_ = std::move(now);
  status.watched = true;
}

std::string fitted(std::string_view text, window size) {
  auto lines = lines_of(text);
  const auto rows = std::max<std::size_t>(size.rows, 1);
  std::string last;
  if (lines.size() > rows) {
    last = "... " + std::to_string(lines.size() - rows + 1) +
           " more rows; make the window taller, or run without --watch";
    lines.resize(rows - 1);
    lines.emplace_back(last);
  }
  std::string out;
  for (std::size_t i = 0; i < lines.size(); ++i) {
    if (i > 0) out += '\n';
    out += cut(lines[i], std::max<std::size_t>(size.columns, 1));
  }
  return out;
}

std::string redrawn(std::string_view text) {
  constexpr std::string_view home = "\033[H";
  constexpr std::string_view clear_rest_of_line = "\033[K";
  constexpr std::string_view clear_below = "\033[J";
  std::string out{home};
  for (const char c : text) {
    if (c == '\n') out += clear_rest_of_line;
    out += c;
  }
  out += clear_rest_of_line;
  out += clear_below;
  return out;
}

}  // namespace troupe::deploy::cli
