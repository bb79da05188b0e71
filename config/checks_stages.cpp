#include <algorithm>
#include <map>
#include <utility>

#include "troupe/config/automatic_host.hpp"
#include "troupe/config/checks.hpp"
#include "troupe/config/hosts.hpp"
#include "troupe/config/resolve.hpp"
#include "troupe/config/units.hpp"

namespace troupe::config {
namespace {

void check_names(findings& into, const deployment& value) {
  std::map<std::string, std::size_t> first;
  for (std::size_t i = 0; i < value.stages.size(); ++i) {
    const std::string path = item_path("stages", i) + ".name";
    if (into.failed(path) || into.refused(item_path("stages", i))) continue;
    const auto [known, fresh] = first.emplace(value.stages[i].name, i);
    if (!fresh) {
      into.refuse(path, "a name that no other stage has",
                  item_path("stages", known->second) + " has it");
    } else if (value.stages[i].name == "supervisor") {
      into.refuse(path, "another name", "the supervisor's node has that name");
    }
  }
}

bool ranks_failed(const findings& into, const std::string& path) {
  return into.failed(path + ".tensor_parallel") || into.failed(path + ".pipeline_parallel");
}

bool check_hosts(findings& into, const stage_config& stage, const std::string& path) {
  if (into.failed(path + ".hosts") || into.failed(path + ".replicas") || ranks_failed(into, path)) {
    return false;
  }
  const std::size_t hosts = stage.hosts.size();
  if (hosts <= stage.replicas || hosts == stage.node_count()) return true;
  std::string expected = "at most " + std::to_string(stage.replicas) + " entries, one per replica";
  if (stage.ranks() > 1) {
    expected += ", or " + std::to_string(stage.node_count()) + ", one per node";
  }
  into.refuse(path + ".hosts", std::move(expected), "it has " + std::to_string(hosts));
  return false;
}

/// Which owner takes which port of which address, in file order.
class port_book {
 public:
  explicit port_book(findings& into) : into_{&into} {}

  /// `owner` listens there; `path` is the key that says so.
  void take(const std::string& host, std::uint16_t port, const std::string& owner,
            const std::string& path) {
    if (port == 0 || is_automatic(host)) return;  // port or host is not known yet
    const auto [known, fresh] = owners_.try_emplace({canonical_host(host), port}, owner);
    if (fresh || into_->failed(path)) return;
    into_->refuse(path, "a port of its own for each node",
                  "port " + std::to_string(port) + " of " + host + " is taken by " + known->second +
                      "; use 0 to let the OS choose");
  }

 private:
  findings* into_;
  std::map<std::pair<std::string, std::uint16_t>, std::string> owners_;
};

void take_ports(findings& into, port_book& book, const stage_config& stage,
                const std::string& path) {
  std::size_t slot = 0;
  for (std::uint32_t replica = 0; replica < stage.replicas; ++replica) {
    for (std::uint32_t rank = 0; rank < stage.ranks(); ++rank, ++slot) {
      const auto& host = host_of(stage, replica, rank);
      const std::string name = node_name(stage, replica, rank);
      const bool listed = into.has(path + ".ports");
      book.take(host, stage.ports[slot], name,
                listed ? item_path(path + ".ports", slot) : path + ".port");
      book.take(host, stage.transport.data_port, name + " (data)", path + ".transport.data_port");
    }
  }
}

void check_engine(findings& into, const deployment& value, const stage_config& stage,
                  const std::string& path) {
  if (into.failed(path + ".role") || into.failed(path + ".engine")) return;
  if (stage.role == role::both && stage.engine == engine_kind::reference) {
    into.refuse(path + ".engine", "external", "the reference engine prefills or decodes, not both");
    return;
  }
  if (!stage.pool && stage.engine != engine_kind::external && !into.failed(path + ".pool")) {
    into.refuse(path + ".pool", "a mapping with the size of each node's pool",
                stage.engine == engine_kind::none ? "a store keeps its values there"
                                                  : "only `engine: external` can do without");
  }
  // A refused `model` may still be one.
  if (stage.engine == engine_kind::reference && !value.model && !into.failed("model")) {
    into.refuse(path + ".engine", "`external`, or a `model` section",
                "the reference engine takes its shape from `model`");
  }
}

/// `troupe up` does not start the user's processes, so it cannot restart them.
void check_restart(findings& into, const stage_config& stage, const std::string& path) {
  if (into.failed(path + ".engine") || into.failed(path + ".restart")) return;
  if (stage.engine != engine_kind::external || stage.restart == restart_policy::never) return;
  into.refuse(path + ".restart", "never",
              "a process of `engine: external` is started by you, and so is its next life");
}

/// Engines that compute on the host keep their memory there.
void check_gpus(findings& into, const stage_config& stage, const std::string& path) {
  if (into.failed(path + ".role") || into.failed(path + ".engine")) return;
  if (stage.engine == engine_kind::external) return;
  const std::string why = stage.engine == engine_kind::none
                              ? "a store keeps its values in memory of the host"
                              : "the reference engine computes on the host; GPUs need "
                                "`engine: external`";
  if (stage.pool && !stage.pool->gpus.empty() && !into.failed(path + ".pool.device")) {
    into.refuse(path + ".pool.device", "cpu", why);
  }
  if (stage.transport.backend == backend_kind::xgmi && !into.failed(path + ".transport.backend")) {
    into.refuse(path + ".transport.backend", "one of auto, shm, tcp, rdma",
                "xgmi moves memory of GPUs, and " + why);
  }
}

void check_heads(findings& into, const model_config& model, const stage_config& stage,
                 const std::string& path) {
  const auto heads = model.kv_heads;
  const auto ranks = stage.tensor_parallel;
  if (model.is_mla() || heads % ranks == 0 || ranks % heads == 0) return;
  into.refuse(
      path + ".tensor_parallel",
      "a divisor or a multiple of model.kv_heads (" + std::to_string(heads) + ")",
      "each rank holds an equal share of the heads, or each head has an equal number of ranks");
}

/// Whether the model can be divided into the stage's parts. An engine may divide its own model at
/// will.
void check_parts(findings& into, const model_config& model, const stage_config& stage,
                 const std::string& path) {
  if (stage.pipeline_parallel == 1) return;
  const auto key = path + ".pipeline_parallel";
  if (stage.pipeline_parallel > model.layers) {
    into.refuse(key, "at most model.layers (" + std::to_string(model.layers) + ")",
                "each part of a replica holds a layer at least");
  } else if (model.state && stage.pool && !into.failed(path + ".pool")) {
    into.refuse(
        key, "1 where `model.state` is there",
        "no key says which layers the state is of; an engine that is divided brings its own "
        "layout, without a `pool` here");
  }
}

void check_pool_size(findings& into, const model_config& model, const stage_config& stage,
                     const std::string& path) {
  const auto block = bytes_per_block(model, stage.tensor_parallel, stage.pipeline_parallel);
  std::uint64_t states = 0;
  std::uint64_t least = 0;
  const bool overflows =
      block == 0 ||
      (model.state &&
       __builtin_mul_overflow(model.state->bytes, std::uint64_t{model.state->slots}, &states)) ||
      __builtin_add_overflow(block, states, &least) ||
      // Adds room for the alignment between blocks and states.
      (model.state && __builtin_add_overflow(least, std::uint64_t{64}, &least));
  if (!overflows && stage.pool->size >= least) return;
  std::string holds = "one block of all layers";
  if (stage.pipeline_parallel > 1) holds += " of the largest part";
  if (model.state) holds += " and " + std::to_string(model.state->slots) + " state slots";
  into.refuse(path + ".pool.size",
              overflows ? "a model whose blocks fit into memory" : "at least " + format_size(least),
              "that is " + holds + " on one rank");
}

void check_against_model(findings& into, const model_config& model, const stage_config& stage,
                         const std::string& path) {
  if (stage.role == role::store || stage.open || ranks_failed(into, path)) return;
  check_heads(into, model, stage, path);
  check_parts(into, model, stage, path);
  if (ranks_failed(into, path) || into.failed(path + ".pool") || !stage.pool) return;
  check_pool_size(into, model, stage, path);
}

void check_store(findings& into, const stage_config& stage, const std::string& path) {
  if (stage.role != role::store) return;
  if (stage.tensor_parallel != 1) {
    into.refuse(path + ".tensor_parallel", "1", "a store keeps values, which have no ranks");
  }
  if (stage.pipeline_parallel != 1) {
    into.refuse(path + ".pipeline_parallel", "1", "a store keeps values, which have no layers");
  }
}

/// The reference engine computes a whole model in one process, even if it keeps only part of its
/// heads.
void check_pipeline(findings& into, const stage_config& stage, const std::string& path) {
  if (stage.engine != engine_kind::reference || stage.pipeline_parallel == 1) return;
  if (into.failed(path + ".engine") || into.failed(path + ".pipeline_parallel")) return;
  into.refuse(path + ".pipeline_parallel", "1",
              "the reference engine computes all layers of a model; parts of one need "
              "`engine: external`");
}

void check_data_port(findings& into, const stage_config& stage, const std::string& path) {
  const auto& transport = stage.transport;
  const bool listens = transport.backend == backend_kind::automatic ||
                       transport.backend == backend_kind::tcp ||
                       std::find(transport.fallback.begin(), transport.fallback.end(),
                                 backend_kind::tcp) != transport.fallback.end();
  if (transport.data_port != 0 && stage.open && !into.failed(path + ".transport")) {
    into.refuse(path + ".transport.data_port", "0",
                "nodes of an open stage may be on one host, where only one of them could have it");
    return;
  }
  if (transport.data_port == 0 || listens || into.failed(path + ".transport")) return;
  into.refuse(path + ".transport.data_port", "0",
              "only tcp listens, and this stage does not use it");
}

void check_total(findings& into, const deployment& value) {
  std::size_t nodes = 1;
  bool any_open = false;
  for (std::size_t i = 0; i < value.stages.size(); ++i) {
    const auto& stage = value.stages[i];
    if (into.failed(item_path("stages", i) + ".open")) continue;
    nodes += stage.open ? std::size_t{stage.open->max_nodes} : stage.node_count();
    any_open = any_open || stage.open.has_value();
  }
  if (nodes <= max_nodes || into.refused("stages")) return;
  for (std::size_t i = 0; i < value.stages.size(); ++i) {
    if (into.refused(item_path("stages", i))) return;  // a stage that is too large by itself
  }
  into.refuse("stages",
              "at most " + std::to_string(max_nodes) + " nodes, the supervisor among them",
              "the stages make " + std::to_string(nodes) +
                  (any_open ? ", open ones by their `max_nodes`" : ""));
}

}  // namespace

void check_stages(findings& into, const deployment& value) {
  port_book ports{into};
  ports.take(value.supervisor.host, value.supervisor.port, "the supervisor", "supervisor.port");
  check_total(into, value);
  check_names(into, value);
  for (std::size_t i = 0; i < value.stages.size(); ++i) {
    const auto& stage = value.stages[i];
    const std::string path = item_path("stages", i);
    if (into.refused(path)) continue;
    const bool placed = check_hosts(into, stage, path);
    check_engine(into, value, stage, path);
    check_restart(into, stage, path);
    check_pipeline(into, stage, path);
    check_gpus(into, stage, path);
    if (!into.failed(path + ".role")) {
      check_store(into, stage, path);
      if (value.model && !into.failed("model"))
        check_against_model(into, *value.model, stage, path);
    }
    check_data_port(into, stage, path);
    if (placed && !stage.open && stage.ports.size() == stage.node_count()) {
      take_ports(into, ports, stage, path);
    }
  }
}

}  // namespace troupe::config
