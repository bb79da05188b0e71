#include "troupe/config/sections.hpp"

#include <algorithm>
#include <array>

#include "troupe/config/automatic_host.hpp"

namespace troupe::config {
namespace {

using std::chrono::hours;
using std::chrono::milliseconds;
using std::chrono::minutes;

constexpr std::string_view failover_of_limits =
    "failover is set by limits: {retry_window, retry_budget}; leave the key out";

constexpr std::string_view restart_of_stage =
    "whether nodes are started again is said by each stage: `restart: on-failure`";

constexpr std::array<later_word, 6> later_root_keys{
    {{"restart*", restart_of_stage},
     {"failover*", failover_of_limits},
     {"supervision", restart_of_stage},
     {"metrics*", "metrics arrive with a later release; leave the key out"},
     {"tracing", "tracing arrives with a later release; leave the key out"},
     {"tls", "encryption is set by security: {mode: tls}; leave the key out"}}};

std::string read_state_file(section& supervisor, std::string otherwise) {
  constexpr std::size_t longest = 4000;
  const std::string expected = "auto, none or the absolute path of a file";
  const auto chosen = supervisor.text("state_file", expected);
  if (!chosen) return otherwise;
  if (*chosen == "auto" || *chosen == "none") return *chosen;
  const bool printable =
      std::ranges::none_of(*chosen, [](unsigned char c) { return c < ' ' || c == 0x7f; });
  const bool is_file = chosen->starts_with('/') && !chosen->ends_with('/');
  if (is_file && printable && chosen->size() <= longest) return *chosen;
  supervisor.into().refuse(supervisor.path_of("state_file"), expected,
                           "nodes are started in different folders");
  return otherwise;
}

supervisor_config read_supervisor(section& root) {
  section in{root.into(), root.mapping("supervisor"), "supervisor"};
  static constexpr std::array<later_word, 4> later{
      {{"standby*", "a second supervisor arrives with a later release; leave the key out"},
       {"replicas", "a second supervisor arrives with a later release; leave the key out"},
       {"failover*", failover_of_limits},
       {"restart*",
        "it is started again where a stage has `restart: on-failure`; leave the key out"}}};
  in.later(later);
  supervisor_config value;
  value.host = in.host("host", value.host);
  if (is_automatic(value.host) && !in.into().failed(in.path_of("host"))) {
    in.into().refuse(
        in.path_of("host"), "a host name or an IP address",
        "every node has to know where the supervisor is; auto is for the hosts of stages");
  }
  value.port = static_cast<std::uint16_t>(in.integer("port", 0, 65'535, value.port));
  value.heartbeat_interval =
      in.duration("heartbeat_interval", milliseconds{10}, minutes{1}, value.heartbeat_interval);
  value.heartbeat_timeout =
      in.duration("heartbeat_timeout", milliseconds{30}, hours{1}, value.heartbeat_timeout);
  value.ease_in = in.duration("ease_in", milliseconds{0}, hours{1}, value.ease_in);
  value.state_file = read_state_file(in, value.state_file);
  value.begin = in.boolean("begin", value.begin);
  value.idle = in.duration("idle", milliseconds{1000}, hours{24}, value.idle);
  in.finish();
  return value;
}

/// Reads the secret, in mode `secret`.
std::string read_secret(section& in) {
  const std::string expected = "auto or the absolute path of a file";
  const auto chosen = in.text("secret", expected);
  if (!chosen) return "auto";
  if (*chosen != "auto" && !chosen->starts_with('/'))
    in.into().refuse(in.path_of("secret"), expected);
  return *chosen;
}

security_config read_security(section& root) {
  section in{root.into(), root.mapping("security"), "security"};
  security_config value;
  value.mode = in.word("mode", value.mode);
  const bool tls = value.mode == security_mode::tls;
  const auto file = [&in](std::string_view key, bool wanted, std::string_view of) {
    constexpr std::string_view expected = "the absolute path of a file";
    if (wanted) in.require(key, std::string{expected} + ", as `troupe certs init` makes it");
    if (!in.has(key)) return std::string{};
    const auto path = in.text(key, std::string{expected});
    if (!path) return std::string{};
    if (!wanted) {
      in.into().refuse(in.path_of(key), "", "belongs to mode " + std::string{of});
    } else if (!path->starts_with('/')) {
      in.into().refuse(in.path_of(key), std::string{expected});
    }
    return *path;
  };
  value.secret =
      value.mode == security_mode::secret ? read_secret(in) : file("secret", tls, "secret or tls");
  value.certificate = file("certificate", tls, "tls");
  value.key = file("key", tls, "tls");
  value.ca = file("ca", tls, "tls");
  in.finish();
  return value;
}

std::uint32_t read_latent(section& model) {
  section in{model.into(), model.mapping("mla"), model.path_of("mla")};
  in.require("latent_dim", "elements of the latent");
  const auto value = static_cast<std::uint32_t>(in.integer("latent_dim", 1, 65'536, 1));
  in.finish();
  return value;
}

std::optional<state_config> read_state(section& model) {
  const yaml_node* node = model.mapping("state");
  if (node == nullptr) return std::nullopt;
  section in{model.into(), node, model.path_of("state")};
  in.require("bytes", "a size such as 64KiB");
  state_config value;
  value.bytes = in.size("bytes", 1);
  value.slots = static_cast<std::uint32_t>(in.integer("slots", 1, 65'536, value.slots));
  in.finish();
  return value;
}

std::string read_dtype(section& model, std::string otherwise) {
  std::string expected = "one of ";
  for (const auto& known : dtypes) {
    if (known.name != dtypes.front().name) expected += ", ";
    expected += known.name;
  }
  const auto chosen = model.text("dtype", expected);
  if (!chosen) return otherwise;
  if (dtype_size(*chosen) != 0) return *chosen;
  model.into().refuse(model.path_of("dtype"), expected);
  return otherwise;
}

std::optional<model_config> read_model(section& root) {
  const yaml_node* node = root.mapping("model");
  if (node == nullptr) return std::nullopt;
  section in{root.into(), node, "model"};
  const auto number = [&in](std::string_view key, std::int64_t high, std::int64_t otherwise) {
    return static_cast<std::uint32_t>(in.integer(key, 1, high, otherwise));
  };
  model_config value;
  in.require("layers", "a whole number from 1 to 2048");
  value.layers = number("layers", 2048, 1);
  value.kv_heads = number("kv_heads", 65'536, 0);
  value.head_dim = number("head_dim", 65'536, 0);
  if (in.has("mla")) {
    value.latent_dim = read_latent(in);
    for (const std::string_view key : {"kv_heads", "head_dim"}) {
      if (!in.has(key)) continue;
      in.into().refuse(in.path_of(key), "", "an MLA cache has a latent and no heads; leave it out");
    }
    value.kv_heads = value.head_dim = 0;
  } else {
    in.require("kv_heads", "a whole number from 1 to 65536 (or `mla`)");
    in.require("head_dim", "a whole number from 1 to 65536 (or `mla`)");
  }
  in.get("mla");  // a mapping, or refused above
  value.dtype = read_dtype(in, value.dtype);
  value.block_tokens = number("block_tokens", 1024, value.block_tokens);
  value.layout = read_arrangement(in, value.layout);
  value.state = read_state(in);
  in.finish();
  return value;
}

edge_config read_edge(findings& into, const yaml_node& node, const std::string& path) {
  section in{into, &node, path};
  edge_config value;
  for (const std::string_view key : {"from", "to"}) in.require(key, "the name of a stage");
  value.from = in.text("from", "the name of a stage").value_or("");
  value.to = in.text("to", "the name of a stage").value_or("");
  if (in.has("mode")) value.mode = in.word("mode", transfer_mode::write);
  in.get("mode");
  in.finish();
  return value;
}

limits_config read_limits(section& root) {
  section in{root.into(), root.mapping("limits"), "limits"};
  limits_config value;
  value.transfer_deadline =
      in.duration("transfer_deadline", milliseconds{1}, hours{24}, value.transfer_deadline);
  value.retry_window = in.duration("retry_window", milliseconds{0}, hours{1}, value.retry_window);
  const auto count = [&in](std::string_view key, std::uint32_t otherwise) {
    return static_cast<std::uint32_t>(in.integer(key, 1, 1'048'576, otherwise));
  };
  value.source_lease =
      in.duration("source_lease", milliseconds{1000}, hours{24}, value.source_lease);
  value.retry_budget =
      static_cast<std::uint32_t>(in.integer("retry_budget", 0, 1000, value.retry_budget));
  value.max_operations = count("max_operations", value.max_operations);
  value.max_waiting = count("max_waiting", value.max_waiting);
  value.max_parked = count("max_parked", value.max_parked);
  in.finish();
  return value;
}

/// The items of the list under `key` with their paths; refuses more than `most`. Refuses items that
/// are not mappings, and returns them as null to keep positions.
std::vector<std::pair<const yaml_node*, std::string>> mappings_of(section& root,
                                                                  std::string_view key,
                                                                  std::size_t most) {
  std::vector<std::pair<const yaml_node*, std::string>> result;
  const yaml_node* list = root.sequence(key);
  if (list == nullptr) return result;
  if (list->items.size() > most) {
    root.into().refuse(root.path_of(key), "at most " + std::to_string(most) + " entries",
                       "it has " + std::to_string(list->items.size()));
    return result;
  }
  for (std::size_t i = 0; i < list->items.size(); ++i) {
    const auto& item = list->items[i];
    std::string path = item_path(root.path_of(key), i);
    root.into().locate(path, item.line, item.column, shown(item));
    if (item.is_mapping()) {
      result.emplace_back(&item, std::move(path));
    } else {
      root.into().refuse(path, "a mapping of keys to values");
      result.emplace_back(nullptr, std::move(path));
    }
  }
  return result;
}

}  // namespace

cache_arrangement read_arrangement(section& parent, const cache_arrangement& otherwise) {
  section in{parent.into(), parent.mapping("layout"), parent.path_of("layout")};
  cache_arrangement value;
  value.order = in.word("order", otherwise.order);
  value.kv = in.word("kv", otherwise.kv);
  value.inner = in.word("inner", otherwise.inner);
  in.finish();
  return value;
}

deployment read_deployment(findings& into, const yaml_node& root_node) {
  section root{into, &root_node, ""};
  deployment value;
  root.later(later_root_keys);
  root.require("cluster", "a name for the deployment");
  value.cluster = root.name("cluster", cluster_name, "");
  value.supervisor = read_supervisor(root);
  value.security = read_security(root);
  value.model = read_model(root);
  root.require("stages", "a list of stages");
  for (const auto& [node, path] : mappings_of(root, "stages", max_stages)) {
    value.stages.push_back(node == nullptr ? stage_config{}
                                           : read_stage(into, *node, path, value.model));
  }
  if (value.stages.empty() && !into.failed("stages")) {
    into.refuse("stages", "at least one stage");
  }
  for (const auto& [node, path] : mappings_of(root, "edges", max_edges)) {
    value.edges.push_back(node == nullptr ? edge_config{} : read_edge(into, *node, path));
  }
  value.limits = read_limits(root);
  root.finish();
  return value;
}

}  // namespace troupe::config
