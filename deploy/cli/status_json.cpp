#include <nlohmann/json.hpp>

#include "troupe/deploy/cli/status_report.hpp"
#include "troupe/deploy/report_json.hpp"

namespace troupe::deploy::cli {

namespace {

using nlohmann::json;

json json_of(const cluster_status::node& n) {
  auto out = n.registered ? deploy::to_json(n.member) : deploy::to_json(n.member.node);
  if (!n.registered) {
    out["registered"] = false;
    out["state"] = json{};
  }
  if (n.rates) {
    out["transfers_per_s"] = n.rates->transfers;
    out["bytes_per_s"] = n.rates->bytes;
  }
  if (n.report) {
    add_report(out, *n.report);
  } else {
    out["error"] = {{"code", std::string{to_string(n.report.error().code)}},
                    {"message", n.report.error().message}};
  }
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
