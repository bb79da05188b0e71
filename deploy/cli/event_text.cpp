#include "troupe/deploy/cli/event_text.hpp"

#include <nlohmann/json.hpp>
#include <spdlog/fmt/fmt.h>

#include "troupe/deploy/cli/supervisor_presence.hpp"
#include "troupe/deploy/cli/text_table.hpp"

namespace troupe::deploy::cli {

namespace {

constexpr auto columns = "{:<23}  {:>6}  {:<9}  {:<14}  {:<16}  {:>6}  {}";

std::string hex(std::uint64_t id) {
  return fmt::format("{:016x}", id);
}

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
  using nlohmann::json;
  const json out{{"sequence", event.sequence},
                 {"unix_ms", event.unix_ms},
                 {"event", event.what},
                 {"node", event.node.empty() ? json{} : json(event.node)},
                 {"incarnation", event.incarnation == 0 ? json{} : json(hex(event.incarnation))},
                 {"epoch", event.epoch},
                 {"reason", event.text},
                 {"supervisor_incarnation", hex(supervisor_incarnation)}};
  return out.dump(-1, ' ', false, json::error_handler_t::replace);
}

}  // namespace troupe::deploy::cli
