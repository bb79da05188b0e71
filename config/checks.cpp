#include "troupe/config/checks.hpp"

#include <utility>

#include "troupe/config/automatic_host.hpp"
#include "troupe/config/hosts.hpp"
#include "troupe/config/units.hpp"

namespace troupe::config {
namespace {

void check_heartbeats(findings& into, const supervisor_config& value) {
  if (into.failed("supervisor")) return;
  const auto least = 3 * value.heartbeat_interval;
  if (value.heartbeat_timeout >= least) return;
  const bool named = into.has("supervisor.heartbeat_timeout");
  into.refuse(named ? "supervisor.heartbeat_timeout" : "supervisor.heartbeat_interval",
              named ? "at least " + format_duration(least)
                    : "at most a third of heartbeat_timeout (" +
                          format_duration(value.heartbeat_timeout) + ")",
              "a node is suspect after 3 missed heartbeats and down after the timeout");
}

void refuse_open_host(findings& into, const std::string& host, const std::string& path) {
  // `auto` is a loopback address if the supervisor's is, which is checked by itself.
  if (is_loopback(host) || is_automatic(host) || into.failed(path)) return;
  into.refuse(path, "a loopback address such as 127.0.0.1",
              "anyone who reaches the node's port could take it over; set security.mode: tls "
              "(`troupe certs init DIR` makes what it needs)");
}

void check_exposure(findings& into, const deployment& value) {
  if (value.security.mode == security_mode::tls) return;
  refuse_open_host(into, value.supervisor.host, "supervisor.host");
  for (std::size_t i = 0; i < value.stages.size(); ++i) {
    const std::string path = item_path("stages", i) + ".hosts";
    if (into.refused(path)) continue;
    for (std::size_t h = 0; h < value.stages[i].hosts.size(); ++h) {
      refuse_open_host(into, value.stages[i].hosts[h], item_path(path, h));
    }
  }
}

/// Whether every stage has an accepted name. If not, an unknown name may mean a refused one.
bool all_names_known(const findings& into, const deployment& value) {
  if (into.refused("stages")) return false;
  for (std::size_t i = 0; i < value.stages.size(); ++i) {
    const std::string path = item_path("stages", i);
    if (into.refused(path) || into.failed(path + ".name")) return false;
  }
  return true;
}

/// The stage named by one end of an edge; refuses a name that no stage has.
const stage_config* end_of(findings& into, const deployment& value, const std::string& name,
                           const std::string& path) {
  if (into.failed(path)) return nullptr;
  const stage_config* stage = find_stage(value, name);
  if (stage != nullptr || !all_names_known(into, value)) return stage;
  std::set<std::string, std::less<>> names;
  std::string list;
  for (const auto& known : value.stages) {
    if (names.insert(known.name).second) list += (list.empty() ? "" : ", ") + known.name;
  }
  const std::string meant = nearest(name, names);
  into.refuse(path, "the name of a stage (" + list + ")",
              meant.empty() ? "" : "did you mean `" + meant + "`?");
  return nullptr;
}

/// Whether an edge between such stages moves layers.
bool moves_layers(const stage_config& from, const stage_config& to) {
  return (from.role == role::prefill || from.role == role::both) &&
         (to.role == role::decode || to.role == role::both);
}

void check_mode(findings& into, edge_config& edge, const stage_config& from, const stage_config& to,
                const std::string& path) {
  if (moves_layers(from, to)) {
    if (!edge.mode) edge.mode = transfer_mode::write;
    return;
  }
  if (!into.has(path + ".mode")) return;
  into.refuse(path + ".mode", "",
              moves_layers(to, from)
                  ? "layers move from a prefill to a decode stage; swap `from` and `to`, or leave "
                    "the mode out for an edge of keyed values"
                  : "only an edge from a prefill to a decode stage moves layers; leave the mode "
                    "out for an edge of keyed values");
}

void check_edges(findings& into, deployment& value) {
  std::set<std::pair<std::string, std::string>> seen;
  for (std::size_t i = 0; i < value.edges.size(); ++i) {
    auto& edge = value.edges[i];
    const std::string path = item_path("edges", i);
    if (into.refused(path)) continue;
    const stage_config* from = end_of(into, value, edge.from, path + ".from");
    const stage_config* to = end_of(into, value, edge.to, path + ".to");
    if (from == nullptr || to == nullptr) continue;
    if (from == to && from->role != role::both) {
      into.refuse(path + ".to", "another stage than `from`");
    } else if (!seen.emplace(edge.from, edge.to).second) {
      into.refuse(path, "", "an edge from " + edge.from + " to " + edge.to + " is there already");
    } else {
      check_mode(into, edge, *from, *to, path);
    }
  }
}

void check_layout(findings& into, const cache_arrangement& layout, bool mla,
                  const std::string& path) {
  if (into.failed(path)) return;
  if (layout.order == block_order::block_interleaved && layout.kv == kv_placement::separate) {
    into.refuse(path, "", "block_interleaved keeps K and V of a block together; separate does not");
  }
  if (mla && (layout.kv == kv_placement::separate || layout.inner == block_inner::head_major)) {
    into.refuse(path, "kv: together and inner: token_major",
                "an MLA cache has one latent and no heads");
  }
}

void check_model(findings& into, const deployment& value) {
  if (!value.model || into.failed("model")) return;
  check_layout(into, value.model->layout, value.model->is_mla(), "model.layout");
  if (into.failed("model.layout")) return;
  for (std::size_t i = 0; i < value.stages.size(); ++i) {
    const auto& layout = value.stages[i].layout;
    if (layout)
      check_layout(into, *layout, value.model->is_mla(), item_path("stages", i) + ".layout");
  }
}

}  // namespace

void check_deployment(findings& into, deployment& value) {
  check_heartbeats(into, value.supervisor);
  check_exposure(into, value);
  check_model(into, value);
  check_stages(into, value);
  check_edges(into, value);
}

}  // namespace troupe::config
