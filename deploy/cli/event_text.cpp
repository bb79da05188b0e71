#include "troupe/deploy/cli/event_text.hpp"

#include <nlohmann/json.hpp>
#include <spdlog/fmt/fmt.h>

#include "troupe/deploy/cli/supervisor_presence.hpp"
#include "troupe/deploy/cli/text_table.hpp"
#include "troupe/deploy/report_json.hpp"

namespace troupe::deploy::cli {

namespace {

constexpr auto columns = "{:<23}  {:>6}  {:<9}  {:<14}  {:<16}  {:>6}  {}";

std::string shown(const std::string& word) {
  return word.empty() ? "-" : printable(word);
}

}  // namespace

std::string event_heading() {
  return fmt::format(columns, "TIME", "SEQ", "EVENT", "NODE", "INCARNATION", "EPOCH", "REASON");
}

std::string event_row(const actors::cluster_event& event) {
  return fmt::format(columns, time_text(event.unix_ms), event.sequence, shown(event.what),
                     shown(event.node), event.incarnation == 0 ? "-" : hex(event.incarnation),
                     event.epoch, shown(event.text));
}

std::string event_json(const actors::cluster_event& event, std::uint64_t supervisor_incarnation) {
  return text_of(deploy::to_json(event, supervisor_incarnation), -1);
}

}  // namespace troupe::deploy::cli
