#include "troupe/actors/membership/event_log.hpp"

#include <algorithm>
#include <string_view>
#include <utility>

#include <spdlog/fmt/fmt.h>

namespace troupe::actors {

namespace {

bool is_plain(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
         c == '_' || c == '.' || c == ':' || c == '/';
}

/// Makes a text of any origin safe for a terminal, a log and a JSON reader.
std::string tamed(std::string text, std::size_t most) {
  constexpr std::string_view cut = "...";
  if (text.size() > most) text.replace(most - cut.size(), std::string::npos, cut);
  std::ranges::replace_if(
      text, [](char c) { return c < ' ' || c > '~'; }, '?');
  return text;
}

/// The approximate size of an event in an answer, in bytes.
std::size_t bytes_of(const cluster_event& event) {
  constexpr std::size_t numbers = 64;  // with the lengths of the texts
  return numbers + event.what.size() + event.node.size() + event.text.size();
}

/// One word as the value of a key, in quotes if it could be taken for several words.
std::string value_of(const std::string& word) {
  if (word.empty()) return "-";
  if (std::ranges::all_of(word, is_plain)) return word;
  std::string out = "\"";
  for (const char c : word) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + "\"";
}

/// The reason, always in quotes: it ends the line.
std::string reason_of(const std::string& text) {
  const auto value = value_of(text);
  return value.front() == '"' ? value : "\"" + text + "\"";
}

}  // namespace

event_log::event_log(std::size_t kept) : kept_{std::max<std::size_t>(kept, 1)} {}

const cluster_event& event_log::add(cluster_event event) {
  event.sequence = ++newest_;
  event.what = tamed(std::move(event.what), max_event_word);
  event.node = tamed(std::move(event.node), max_event_word);
  event.text = tamed(std::move(event.text), max_event_text);
  events_.push_back(std::move(event));
  if (events_.size() > kept_) events_.pop_front();
  return events_.back();
}

event_page event_log::page(const event_query& query, std::uint64_t supervisor_incarnation) const {
  event_page out;
  out.supervisor_incarnation = supervisor_incarnation;
  out.newest = newest_;
  if (query.after >= newest_) return out;
  const auto most =
      query.max == 0 ? max_page_events : std::min<std::size_t>(query.max, max_page_events);
  const auto oldest = newest_ - events_.size() + 1;
  auto next = query.after < oldest ? 0 : static_cast<std::size_t>(query.after - oldest + 1);
  std::size_t taken = 0;
  for (; next < events_.size() && out.events.size() < most; ++next) {
    taken += bytes_of(events_[next]);
    if (taken > max_page_bytes && !out.events.empty()) break;
    out.events.push_back(events_[next]);
  }
  return out;
}

std::string event_line(const cluster_event& event) {
  const auto incarnation =
      event.incarnation == 0 ? std::string{"-"} : fmt::format("{:016x}", event.incarnation);
  return fmt::format("event={} node={} incarnation={} epoch={} reason={}", value_of(event.what),
                     value_of(event.node), incarnation, event.epoch, reason_of(event.text));
}

}  // namespace troupe::actors
