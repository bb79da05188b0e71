#include "troupe/deploy/report_json.hpp"

#include <string>
#include <utility>

#include <nlohmann/json.hpp>
#include <spdlog/fmt/fmt.h>

namespace troupe::deploy {

using nlohmann::json;

namespace {

json json_of(const actors::lane_report& l) {
  return {{"device", l.device},
          {"port", l.port},
          {"gid_index", l.gid_index},
          {"gid", l.gid},
          {"requests_posted", l.requests_posted},
          {"requests_completed", l.requests_completed},
          {"bytes", l.bytes},
          {"port_up", l.port_up != 0},
          {"port_downs", l.port_downs},
          {"port_changes", l.port_changes},
          {"port_retries", l.port_retries < 0 ? json{} : json(l.port_retries)}};
}

json json_of(const actors::link_report& l) {
  json by_lane = json::array();
  for (const auto& lane : l.by_lane) by_lane.push_back(json_of(lane));
  return {{"peer", l.peer},           {"peer_incarnation", hex(l.peer_incarnation)},
          {"backend", l.backend},     {"reason", l.reason},
          {"state", l.state},         {"lanes", l.lanes},
          {"bytes_out", l.bytes_out}, {"bytes_in", l.bytes_in},
          {"in_flight", l.in_flight}, {"refused", l.refused},
          {"rebuilds", l.rebuilds},   {"last_break", l.last_break},
          {"posted", l.posted},       {"completed", l.completed},
          {"failed", l.failed},       {"by_lane", std::move(by_lane)}};
}

json json_of(const actors::transfer_report& t) {
  return {{"transfer", hex(t.transfer)},
          {"request", t.request},
          {"peer", t.peer},
          {"side", t.side},
          {"state", t.state},
          {"bytes", t.bytes},
          {"age_ms", t.age_ms}};
}

json json_of(const actors::pool_report& p) {
  return {{"device", p.device},
          {"bytes", p.bytes},
          {"block_bytes", p.block_bytes},
          {"blocks_total", p.blocks_total},
          {"blocks_free", p.blocks_free},
          {"blocks_quarantined", p.blocks_quarantined},
          {"waiting", p.waiting},
          {"store_bytes", p.store_bytes},
          {"store_used", p.store_used},
          {"store_keys", p.store_keys},
          {"memory", p.memory}};
}

json json_of(const actors::backend_report& backend) {
  return {{"name", backend.name}, {"usable", backend.usable != 0}, {"reason", backend.reason}};
}

json json_of(const actors::parked_report& parked) {
  return {{"peer", parked.peer}, {"receives", parked.receives}};
}

template <class Report>
json list_of(const std::vector<Report>& reports) {
  json all = json::array();
  for (const auto& report : reports) all.push_back(json_of(report));
  return all;
}

}  // namespace

std::string hex(std::uint64_t id) {
  return fmt::format("{:016x}", id);
}

std::string hex(const kvcache::layout_fingerprint& of) {
  std::string text;
  for (const auto byte : of) text += fmt::format("{:02x}", byte);
  return text;
}

std::string text_of(const json& document, int indent) {
  return document.dump(indent, ' ', false, json::error_handler_t::replace);
}

json to_json(const std::vector<actors::backend_report>& backends) {
  return list_of(backends);
}

json to_json(const actors::node_info& node) {
  const auto role = actors::node_role_from(node.role);
  json out{{"name", node.name},
           {"stage", node.stage},
           {"role", role ? std::string{to_string(*role)} : "unknown"},
           {"replica", node.replica},
           {"rank", node.rank},
           {"ranks", node.ranks}};
  if (!node.replica_name.empty()) out["replica_name"] = node.replica_name;
  if (node.fingerprint != kvcache::layout_fingerprint{}) out["fingerprint"] = hex(node.fingerprint);
  for (const auto& label : node.labels) out["labels"][label.key] = label.value;
  return out;
}

void add_address(json& out, const actors::node_info& node) {
  out["host"] = node.host;
  out["port"] = node.port;
  out["pid"] = node.pid;
  out["incarnation"] = hex(node.incarnation);
}

json to_json(const actors::member& member) {
  auto out = to_json(member.node);
  const auto state = actors::node_state_from(member.state);
  out["registered"] = true;
  out["state"] = state ? json(to_string(*state)) : json{};
  add_address(out, member.node);
  out["queue_length"] = member.load.queue_length;
  out["reason"] = member.reason;
  return out;
}

void add_report(json& out, const actors::node_report& report) {
  out["epoch"] = report.epoch;
  out["supervisor_reachable"] = report.supervisor_reachable;
  out["uptime_ms"] = report.uptime_ms;
  out["transfers_done"] = report.transfers_done;
  out["transfers_failed"] = report.transfers_failed;
  out["bytes_moved"] = report.bytes_moved;
  out["operations_open"] = report.operations_open;
  out["waiting_for_link"] = report.waiting_for_link;
  out["pool"] = json_of(report.pool);
  out["backends"] = list_of(report.backends);
  out["links"] = list_of(report.links);
  out["transfers"] = list_of(report.transfers);
  out["parked"] = list_of(report.parked);
}

json to_json(const actors::node_report& report) {
  auto out = to_json(report.node);
  add_address(out, report.node);
  add_report(out, report);
  return out;
}

json to_json(const actors::membership& members) {
  json out{{"cluster", members.cluster},
           {"epoch", members.epoch},
           {"supervisor_incarnation", hex(members.supervisor_incarnation)},
           {"nodes", json::array()}};
  for (const auto& member : members.members) out["nodes"].push_back(to_json(member));
  return out;
}

json to_json(const actors::cluster_event& event, std::uint64_t supervisor_incarnation) {
  return {{"sequence", event.sequence},
          {"unix_ms", event.unix_ms},
          {"event", event.what},
          {"node", event.node.empty() ? json{} : json(event.node)},
          {"incarnation", event.incarnation == 0 ? json{} : json(hex(event.incarnation))},
          {"epoch", event.epoch},
          {"reason", event.text},
          {"supervisor_incarnation", hex(supervisor_incarnation)}};
}

json to_json(const actors::event_page& page) {
  json out{{"supervisor_incarnation", hex(page.supervisor_incarnation)},
           {"newest", page.newest},
           {"events", json::array()}};
  for (const auto& event : page.events)
    out["events"].push_back(to_json(event, page.supervisor_incarnation));
  return out;
}

}  // namespace troupe::deploy
