#include <algorithm>
#include <array>
#include <charconv>
#include <system_error>
#include <utility>

#include "troupe/config/sections.hpp"

namespace troupe::config {
namespace {

constexpr std::string_view restart_here = "whether a node is started again is said by `restart`";

constexpr std::array<later_word, 9> later_stage_keys{
    {{"restart_*", restart_here},
     {"restarts", restart_here},
     {"max_restarts", "at most 5 restarts within 60 s, of each node; leave the key out"},
     {"supervision", restart_here},
     {"failover*", "failover is set by limits: {retry_window, retry_budget}; leave the key out"},
     {"affinity",
      "each request names its own affinity (`placement_request::affinity`); leave the key out"},
     {"autoscale*", "scaling arrives with a later release; leave the key out"},
     {"data_parallel", "use `replicas`: each of them serves a copy of the model"},
     {"devices", "a GPU is named by the pool: `pool: {device: gpu:0}`"}}};

constexpr std::string_view port_of_a_joiner =
    "a node of an open stage listens where the OS chooses, and says so when it joins; leave the "
    "key out";

constexpr std::string_view ranks_of_a_joiner =
    "a replica that joins an open stage says how many ranks it has; leave the key out";

/// Keys of nodes that the file names: a node that joins an open stage announces or brings these.
constexpr std::array<later_word, 9> keys_of_named_nodes{
    {{"replicas",
      "replicas join an open stage by themselves, and `max_nodes` bounds it; leave the key out"},
     {"pipeline_parallel", ranks_of_a_joiner},
     {"tensor_parallel", ranks_of_a_joiner},
     {"hosts", "a node of an open stage joins from the host that it runs on; leave the key out"},
     {"port", port_of_a_joiner},
     {"ports", port_of_a_joiner},
     {"engine", "a node that joins an open stage is a process of yours; leave the key out"},
     {"restart",
      "`troupe up` starts no node of an open stage, and so none again; leave the key out"},
     {"layout", "a node that joins an open stage brings its own layout; leave the key out"}}};

constexpr const char* pool_devices = "cpu, or gpu:N with N from 0 to 255";

std::optional<std::uint32_t> gpu_of(std::string_view text) {
  constexpr std::string_view stem = "gpu:";
  if (!text.starts_with(stem)) return std::nullopt;
  text.remove_prefix(stem.size());
  std::uint8_t number = 0;
  const auto [end, failed] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (failed != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return number;
}

/// A list with one value for each node; empty (and refused) if it has more or fewer. An item that
/// `parse` does not understand is refused as not `expected`, and keeps its place.
template <typename Value, typename Parse>
std::optional<std::vector<Value>> read_per_node(section& in, const yaml_node& list,
                                                const std::string& path, std::size_t nodes,
                                                const std::string& what,
                                                const std::string& expected, Parse parse) {
  if (list.items.size() != nodes) {
    in.into().refuse(
        path, std::to_string(nodes) + " " + what + ", one per node (replicas times their ranks)",
        "it has " + std::to_string(list.items.size()));
    return std::nullopt;
  }
  std::vector<Value> values;
  for (const auto& [node, at] : scalars_of(in.into(), list, path, expected)) {
    const std::optional<Value> value = node != nullptr ? parse(*node) : std::nullopt;
    if (node != nullptr && !value) in.into().refuse(at, expected);
    values.push_back(value.value_or(Value{}));
  }
  return values;
}

std::vector<std::uint32_t> read_device(section& pool, std::size_t nodes) {
  const yaml_node* node = pool.get("device");
  if (node != nullptr && node->kind == yaml_node::form::sequence) {
    return read_per_node<std::uint32_t>(pool, *pool.sequence("device"), pool.path_of("device"),
                                        nodes, "GPUs", "gpu:N with N from 0 to 255",
                                        [](const yaml_node& item) { return gpu_of(item.text); })
        .value_or(std::vector<std::uint32_t>{});
  }
  const auto word = pool.text("device", pool_devices);
  if (!word || *word == "cpu") return {};
  const auto gpu = gpu_of(*word);
  if (!gpu) {
    pool.into().refuse(pool.path_of("device"), pool_devices,
                       word->starts_with("cuda") || word->starts_with("hip")
                           ? "GPUs are `gpu:0`, `gpu:1` and so on, whoever made them"
                           : "");
    return {};
  }
  return std::vector<std::uint32_t>(nodes, *gpu);
}

std::optional<pool_config> read_pool(section& stage, std::size_t nodes) {
  const yaml_node* node = stage.mapping("pool");
  if (node == nullptr) return std::nullopt;
  section in{stage.into(), node, stage.path_of("pool")};
  pool_config value;
  value.gpus = read_device(in, nodes);
  in.require("size", "a size such as 1GiB");
  value.size = in.size("size", 0);
  value.on_full = in.word("on_full", value.on_full);
  in.finish();
  return value;
}

std::vector<std::string> read_hosts(section& stage, std::vector<std::string> otherwise) {
  const yaml_node* list = stage.sequence("hosts");
  if (list == nullptr) return otherwise;
  const std::string path = stage.path_of("hosts");
  std::vector<std::string> result;
  if (list->items.empty()) stage.into().refuse(path, "at least one host");
  if (list->items.size() > max_nodes) {
    stage.into().refuse(path, "at most " + std::to_string(max_nodes) + " hosts");
    return otherwise;
  }
  for (const auto& [node, at] :
       scalars_of(stage.into(), *list, path, "a host name or an IP address")) {
    const bool good = node != nullptr && check_host(stage.into(), node->text, at);
    result.push_back(good ? node->text : otherwise.front());  // a refused item keeps its place
  }
  return result.empty() ? otherwise : result;
}

/// One port per node: from `ports`, or `port` for every node.
std::vector<std::uint16_t> read_ports(section& stage, std::size_t nodes) {
  const auto same = static_cast<std::uint16_t>(stage.integer("port", 0, 65'535, 0));
  std::vector<std::uint16_t> result(nodes, same);
  const yaml_node* list = stage.sequence("ports");
  if (list == nullptr) return result;
  const std::string path = stage.path_of("ports");
  if (stage.has("port")) stage.into().refuse(path, "", "`port` is there already; keep one of them");
  const auto port_of = [](const yaml_node& item) -> std::optional<std::uint16_t> {
    const auto value = parse_integer(item);
    if (!value || *value < 0 || *value > 65'535) return std::nullopt;
    return static_cast<std::uint16_t>(*value);
  };
  return read_per_node<std::uint16_t>(stage, *list, path, nodes, "ports",
                                      "a whole number from 0 to 65535", port_of)
      .value_or(std::move(result));
}

engine_kind read_engine(section& in, config::role role) {
  if (role != role::store) return in.word("engine", engine_kind::reference);
  if (in.get("engine") != nullptr) {
    in.into().refuse(in.path_of("engine"), "", "a store runs no engine; leave the key out");
  }
  return engine_kind::none;
}

/// Refuses the similar policies of other tools with an explanation.
restart_policy read_restart(section& in) {
  static constexpr std::array<later_word, 3> elsewhere{
      {{"always", "a node that ends in good order was told to; one that fails is `on-failure`"},
       {"on_failure", "it has a hyphen"},
       {"unless-stopped", "`on-failure` restarts nothing that was told to stop"}}};
  return in.word("restart", restart_policy::never, elsewhere);
}

std::optional<cache_arrangement> read_stage_layout(section& in, config::role role,
                                                   const std::optional<model_config>& model) {
  if (role != role::store && model) return read_arrangement(in, model->layout);
  if (in.get("layout") != nullptr) {
    in.into().refuse(in.path_of("layout"), "",
                     role == role::store
                         ? "a store keeps values, not blocks; leave the key out"
                         : "there is no `model` to lay out; the engine registers its own layout");
  }
  return std::nullopt;
}

std::optional<open_config> read_open(section& stage) {
  const yaml_node* node = stage.mapping("open");
  if (!stage.has("open")) return std::nullopt;
  // Refused or not, the key says that the stage is to be open.
  section in{stage.into(), node, stage.path_of("open")};
  open_config value;
  value.max_nodes =
      static_cast<std::uint32_t>(in.integer("max_nodes", 1, max_nodes - 1, value.max_nodes));
  in.finish();
  return value;
}

/// The keys that depend on whether the file names the nodes, for an open stage.
stage_config read_open_nodes(section& in, stage_config value) {
  in.later(keys_of_named_nodes);
  const bool is_store = value.role == role::store;
  value.hosts = {"auto"};
  value.engine = is_store ? engine_kind::none : engine_kind::external;
  if (is_store) {
    value.pool = read_pool(in, 1);  // the same for every node
  } else if (in.get("pool") != nullptr && !in.into().failed(in.path_of("role"))) {
    in.into().refuse(in.path_of("pool"), "",
                     "a node that joins an open stage brings its own memory; leave the key out");
  }
  return value;
}

/// The same keys for a stage whose nodes the file names.
stage_config read_named_nodes(section& in, stage_config value, const std::string& path,
                              const std::optional<model_config>& model) {
  const auto count = [&in](std::string_view key) {
    return static_cast<std::uint32_t>(in.integer(key, 1, max_nodes, 1));
  };
  value.replicas = count("replicas");
  value.pipeline_parallel = count("pipeline_parallel");
  value.tensor_parallel = count("tensor_parallel");
  value.hosts = read_hosts(in, value.hosts);
  if (value.node_count() < max_nodes) {
    value.ports = read_ports(in, value.node_count());
  } else {
    in.get("port");
    in.get("ports");
    in.into().refuse(path, "fewer than " + std::to_string(max_nodes) + " nodes in a deployment",
                     "this stage alone has " + std::to_string(value.node_count()));
  }
  // Checks that depend on the role are made only if the role could be read.
  value.engine = read_engine(in, value.role);
  value.restart = read_restart(in);
  value.layout = read_stage_layout(in, value.role, model);
  // A stage with too many nodes was refused above.
  value.pool = read_pool(in, std::min<std::size_t>(value.node_count(), max_nodes));
  return value;
}

}  // namespace

stage_config read_stage(findings& into, const yaml_node& node, const std::string& path,
                        const std::optional<model_config>& model) {
  section in{into, &node, path};
  static constexpr std::array<later_word, 1> no_roles{
      {{"supervisor", "the supervisor has a section of its own"}}};
  in.later(later_stage_keys);
  stage_config value;
  in.require("name", "a name that no other stage has");
  value.name = in.name("name", stage_name, "");
  in.require("role", "one of prefill, decode, store, both");
  value.role = in.word("role", value.role, no_roles);
  value.open = read_open(in);
  value = value.open ? read_open_nodes(in, std::move(value))
                     : read_named_nodes(in, std::move(value), path, model);
  value.policy = in.word("policy", value.policy);
  value.transport = read_transport(in);
  in.finish();
  return value;
}

}  // namespace troupe::config
