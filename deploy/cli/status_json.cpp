#include <utility>

#include <nlohmann/json.hpp>
#include <spdlog/fmt/fmt.h>

#include "troupe/deploy/cli/backend_text.hpp"
#include "troupe/deploy/cli/status_report.hpp"

namespace troupe::deploy::cli {

namespace {

using nlohmann::json;

/// Incarnations and transfers are 64-bit numbers, which many readers of JSON round: they are text,
/// as in the logs.
std::string hex(std::uint64_t id) {
  return fmt::format("{:016x}", id);
}

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

template <class Report>
json list_of(const std::vector<Report>& reports) {
  json all = json::array();
  for (const auto& report : reports) all.push_back(json_of(report));
  return all;
}

json json_of(const cluster_status::node& n) {
  const auto& info = n.member.node;
  const auto role = actors::node_role_from(info.role);
  const auto state = actors::node_state_from(n.member.state);
  json out{{"name", info.name},
           {"stage", info.stage},
           {"role", role ? std::string{to_string(*role)} : "unknown"},
           {"replica", info.replica},
           {"rank", info.rank},
           {"ranks", info.ranks},
           {"registered", n.registered},
           {"state", n.registered && state ? json(to_string(*state)) : json{}}};
  if (n.registered) {
    out["host"] = info.host;
    out["port"] = info.port;
    out["pid"] = info.pid;
    out["incarnation"] = hex(info.incarnation);
    out["queue_length"] = n.member.load.queue_length;
    out["reason"] = n.member.reason;
  }
  if (n.rates) {
    out["transfers_per_s"] = n.rates->transfers;
    out["bytes_per_s"] = n.rates->bytes;
  }
  if (!n.report) {
    out["error"] = {{"code", std::string{to_string(n.report.error().code)}},
                    {"message", n.report.error().message}};
    return out;
  }
  const auto& r = *n.report;
  out["epoch"] = r.epoch;
  out["supervisor_reachable"] = r.supervisor_reachable;
  out["uptime_ms"] = r.uptime_ms;
  out["transfers_done"] = r.transfers_done;
  out["transfers_failed"] = r.transfers_failed;
  out["bytes_moved"] = r.bytes_moved;
  out["operations_open"] = r.operations_open;
  out["waiting_for_link"] = r.waiting_for_link;
  out["pool"] = json_of(r.pool);
  out["backends"] = to_json(r.backends);
  out["links"] = list_of(r.links);
  out["transfers"] = list_of(r.transfers);
  return out;
}

json json_of(const cluster_status& status) {
  json out{{"cluster", status.members.cluster},
           {"epoch", status.members.epoch},
           {"supervisor", status.supervisor},
           {"supervisor_incarnation", hex(status.members.supervisor_incarnation)},
           {"complete", status.complete()},
           {"nodes", json::array()}};
  for (const auto& n : status.nodes) out["nodes"].push_back(json_of(n));
  return out;
}

/// Names come from the network and may be no UTF-8.
std::string text_of(const json& document, int indent) {
  return document.dump(indent, ' ', false, json::error_handler_t::replace);
}

}  // namespace

std::string to_json(const cluster_status& status) {
  return text_of(json_of(status), 2);
}

std::string to_json_line(const cluster_status& status, std::uint64_t unix_ms) {
  auto out = json_of(status);
  out["unix_ms"] = unix_ms;
  return text_of(out, -1);
}

}  // namespace troupe::deploy::cli
