#include <algorithm>
#include <ostream>
#include <string_view>
#include <utility>

#include <spdlog/fmt/fmt.h>

#include "troupe/deploy/cli/backends.hpp"
#include "troupe/deploy/cli/status_report.hpp"
#include "troupe/deploy/cli/text_table.hpp"
#include "troupe/deploy/report_json.hpp"

namespace troupe::deploy::cli {

namespace {

using align = text_table::align;

template <class Number>
std::string number(Number value) {
  return std::to_string(value);
}

std::string state_of(const cluster_status::node& n) {
  if (!n.registered) return "not registered";
  const auto state = actors::node_state_from(n.member.state);
  return state ? std::string{to_string(*state)} : "unknown";
}

std::string role_of(const actors::node_info& node) {
  const auto role = actors::node_role_from(node.role);
  return role ? std::string{to_string(*role)} : "unknown";
}

/// Adds the columns that only a watched cluster has.
void add_rates(const cluster_status::node& n, std::vector<std::string>& row) {
  if (n.rates) {
    row.insert(row.end(), {fixed_text(n.rates->transfers, 1),
                           bytes_text(static_cast<std::uint64_t>(n.rates->bytes))});
  } else {
    row.insert(row.end(), {"-", "-"});
  }
}

/// Counts the transfers that move or are about to; a source that is held for a decode rank waits.
std::ptrdiff_t active_transfers(const actors::node_report& report) {
  return std::ranges::count_if(report.transfers,
                               [](const auto& one) { return one.side != "held"; });
}

void print_nodes(const cluster_status& status, std::ostream& out) {
  std::vector<text_table::column> columns{{"NODE"},
                                          {"ROLE"},
                                          {"REPLICA", align::right},
                                          {"RANK", align::right},
                                          {"STATE"},
                                          {"ADDRESS"},
                                          {"PID", align::right},
                                          {"UPTIME", align::right},
                                          {"QUEUE", align::right},
                                          {"ACTIVE", align::right},
                                          {"OPEN", align::right},
                                          {"NO LINK", align::right},
                                          {"DONE", align::right},
                                          {"FAILED", align::right},
                                          {"MOVED", align::right}};
  if (status.watched)
    columns.insert(columns.end(), {{"DONE/S", align::right}, {"MOVED/S", align::right}});
  text_table table{std::move(columns)};
  for (const auto& n : status.nodes) {
    const auto& info = n.member.node;
    std::vector<std::string> row{printable(info.name), role_of(info), number(info.replica),
                                 number(info.rank) + "/" + number(info.ranks), state_of(n)};
    if (n.registered) {
      row.insert(row.end(), {printable(info.host) + ":" + number(info.port), number(info.pid)});
    } else {
      row.insert(row.end(), {"-", "-"});
    }
    if (n.report) {
      const auto& r = *n.report;
      row.insert(row.end(), {duration_text(r.uptime_ms), number(n.member.load.queue_length),
                             number(active_transfers(r)), number(r.operations_open),
                             number(r.waiting_for_link), number(r.transfers_done),
                             number(r.transfers_failed), bytes_text(r.bytes_moved)});
    } else {
      row.insert(row.end(), {"-", "-", "-", "-", "-", "-", "-", "-"});
    }
    if (status.watched) add_rates(n, row);
    table.add(std::move(row));
  }
  table.print(out);
  constexpr auto up = static_cast<std::uint8_t>(actors::node_state::up);
  for (const auto& n : status.nodes)
    if (n.registered && n.member.state != up && !n.member.reason.empty())
      out << printable(n.member.node.name) << " is " << state_of(n) << ": "
          << printable(n.member.reason) << "\n";
  for (const auto& n : status.nodes)
    if (!n.report)
      out << printable(n.member.node.name) << ": " << printable(to_string(n.report.error()))
          << "\n";
}

/// Prints a further table, or the sentence that stands for an empty one.
void print_below(const text_table& table, std::ostream& out, std::string_view if_empty = {}) {
  if (table.empty() && if_empty.empty()) return;
  out << "\n";
  if (table.empty()) {
    out << if_empty;
  } else {
    table.print(out);
  }
}

std::string labels_text(const std::vector<actors::node_label>& labels) {
  std::string text;
  for (const auto& label : labels)
    text += (text.empty() ? "" : ", ") + printable(label.key) + "=" + printable(label.value);
  return text.empty() ? "-" : text;
}

/// Prints what nodes of open stages announced; nothing if there is no such node.
void print_announced(const cluster_status& status, std::ostream& out) {
  text_table table{{{"JOINED"}, {"REPLICA NAME"}, {"FINGERPRINT"}, {"LABELS"}}};
  for (const auto& n : status.nodes) {
    const auto& info = n.member.node;
    if (info.replica_name.empty()) continue;
    const bool has_cache = info.fingerprint != kvcache::layout_fingerprint{};
    table.add({printable(info.name), printable(info.replica_name),
               has_cache ? hex(info.fingerprint) : "-", labels_text(info.labels)});
  }
  print_below(table, out);
}

void print_backends(const cluster_status& status, std::ostream& out) {
  text_table table{{{"BACKENDS OF"}, {"USABLE"}, {"NOT USABLE"}}};
  for (const auto& n : status.nodes) {
    if (!n.report) continue;
    const auto& all = n.report->backends;
    table.add({printable(n.member.node.name), printable(usable_text(all)),
               printable(unusable_text(all))});
  }
  print_below(table, out);
}

void print_links(const cluster_status& status, std::ostream& out) {
  text_table table{{{"NODE"},
                    {"PEER"},
                    {"BACKEND"},
                    {"STATE"},
                    {"LANES", align::right},
                    {"OUT", align::right},
                    {"IN", align::right},
                    {"POSTED", align::right},
                    {"DONE", align::right},
                    {"FAILED", align::right},
                    {"REFUSED", align::right},
                    {"REBUILT", align::right},
                    {"WHY THIS BACKEND"}}};
  for (const auto& n : status.nodes) {
    if (!n.report) continue;
    for (const auto& l : n.report->links)
      table.add(
          {printable(n.member.node.name), printable(l.peer),
           l.backend.empty() ? "-" : printable(l.backend), printable(l.state), number(l.lanes),
           bytes_text(l.bytes_out), bytes_text(l.bytes_in), number(l.posted), number(l.completed),
           number(l.failed), number(l.refused), number(l.rebuilds),
           printable(l.last_break.empty() ? l.reason : l.reason + "; broke: " + l.last_break)});
  }
  print_below(table, out, "no links: they are made when two nodes first move something\n");
}

/// Prints each lane's device; nothing if no lane is a queue pair.
void print_lanes(const cluster_status& status, std::ostream& out) {
  text_table table{{{"LANE OF"},
                    {"PEER"},
                    {"LANE", align::right},
                    {"DEVICE"},
                    {"PORT", align::right},
                    {"GID"},
                    {"POSTED", align::right},
                    {"DONE", align::right},
                    {"BYTES", align::right},
                    {"PORT WENT DOWN", align::right},
                    {"PORT RETRIES", align::right}}};
  for (const auto& n : status.nodes) {
    if (!n.report) continue;
    for (const auto& l : n.report->links) {
      for (std::size_t i = 0; i < l.by_lane.size(); ++i) {
        const auto& lane = l.by_lane[i];
        table.add({printable(n.member.node.name), printable(l.peer), number(i),
                   printable(lane.device), number(lane.port),
                   number(lane.gid_index) + " " + printable(lane.gid), number(lane.requests_posted),
                   number(lane.requests_completed), bytes_text(lane.bytes),
                   number(lane.port_downs) + (lane.port_up != 0 ? "" : ", is down"),
                   lane.port_retries < 0 ? "not counted"
                                         : number(static_cast<std::uint64_t>(lane.port_retries))});
      }
    }
  }
  print_below(table, out);
}

void print_pools(const cluster_status& status, std::ostream& out) {
  text_table table{{{"POOL OF"},
                    {"DEVICE"},
                    {"SIZE", align::right},
                    {"BLOCK", align::right},
                    {"BLOCKS", align::right},
                    {"FREE", align::right},
                    {"QUARANTINED", align::right},
                    {"WAITING", align::right},
                    {"VALUES", align::right},
                    {"USED", align::right},
                    {"OF", align::right},
                    {"MEMORY"}}};
  for (const auto& n : status.nodes) {
    if (!n.report) continue;
    const auto& p = n.report->pool;
    table.add({printable(n.member.node.name), printable(p.device), bytes_text(p.bytes),
               bytes_text(p.block_bytes), number(p.blocks_total), number(p.blocks_free),
               number(p.blocks_quarantined), number(p.waiting), number(p.store_keys),
               bytes_text(p.store_used), bytes_text(p.store_bytes),
               p.memory.empty() ? "-" : printable(p.memory)});
  }
  print_below(table, out);
}

void print_transfers(const cluster_status& status, std::ostream& out) {
  text_table table{{{"TRANSFER"},
                    {"NODE"},
                    {"REQUEST"},
                    {"PEER"},
                    {"SIDE"},
                    {"STATE"},
                    {"MOVED", align::right},
                    {"AGE", align::right}}};
  for (const auto& n : status.nodes) {
    if (!n.report) continue;
    for (const auto& t : n.report->transfers)
      table.add({fmt::format("{:016x}", t.transfer), printable(n.member.node.name),
                 printable(t.request), printable(t.peer), printable(t.side), printable(t.state),
                 bytes_text(t.bytes), duration_text(t.age_ms)});
  }
  print_below(table, out, "no transfers now\n");
}

}  // namespace

bool cluster_status::complete() const noexcept {
  return std::ranges::all_of(nodes, [](const node& n) {
    return n.registered && n.report.has_value() &&
           n.member.state == static_cast<std::uint8_t>(actors::node_state::up);
  });
}

void print_tables(const cluster_status& status, std::ostream& out) {
  out << "cluster " << printable(status.members.cluster) << ", supervisor " << status.supervisor
      << ", epoch " << status.members.epoch << "\n\n";
  print_nodes(status, out);
  print_announced(status, out);
  print_backends(status, out);
  print_links(status, out);
  print_lanes(status, out);
  print_pools(status, out);
  print_transfers(status, out);
}

}  // namespace troupe::deploy::cli
