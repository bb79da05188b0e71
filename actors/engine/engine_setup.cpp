#include "troupe/actors/engine/engine_setup.hpp"

#include <algorithm>
#include <limits>
#include <set>
#include <string>
#include <utility>

#include <spdlog/spdlog.h>

#include "troupe/actors/base/phrases.hpp"
#include "troupe/actors/context/node_place.hpp"
#include "troupe/actors/engine/cache_setup.hpp"
#include "troupe/actors/logging.hpp"
#include "troupe/actors/membership/membership.hpp"
#include "troupe/actors/messages/node_roles.hpp"
#include "troupe/actors/node/node_end.hpp"
#include "troupe/actors/runtime/local_address.hpp"
#include "troupe/config/open_name.hpp"
#include "troupe/kvcache/layer_parts.hpp"
#include "troupe/kvcache/layout.hpp"
#include "troupe/kvcache/layout_fingerprint.hpp"
#include "troupe/transport/xgmi/gpu_site.hpp"

namespace troupe::actors {

namespace {

std::optional<transport::backend_kind> backend_of(config::backend_kind kind) {
  switch (kind) {
    case config::backend_kind::automatic: return std::nullopt;
    case config::backend_kind::shm: return transport::backend_kind::shm;
    case config::backend_kind::tcp: return transport::backend_kind::tcp;
    case config::backend_kind::rdma: return transport::backend_kind::rdma;
    case config::backend_kind::xgmi: return transport::backend_kind::xgmi;
  }
  return std::nullopt;
}

kvcache::arrangement arrangement_of(const config::cache_arrangement& from) {
  kvcache::arrangement to;
  switch (from.order) {
    case config::block_order::layers_first: to.order = kvcache::block_order::layers_first; break;
    case config::block_order::blocks_first: to.order = kvcache::block_order::blocks_first; break;
    case config::block_order::block_interleaved:
      to.order = kvcache::block_order::block_interleaved;
      break;
  }
  to.kv = from.kv == config::kv_placement::together ? kvcache::kv_placement::together
                                                    : kvcache::kv_placement::separate;
  to.inner = from.inner == config::block_inner::token_major ? kvcache::block_inner::token_major
                                                            : kvcache::block_inner::head_major;
  return to;
}

}  // namespace

transport::rdma_options rdma_options_of(const config::transport_config& from) {
  transport::rdma_options to;
  to.device = from.device;
  to.port = from.rdma.port;
  to.gid_index = from.rdma.gid_index;
  to.traffic_class = from.rdma.traffic_class;
  to.service_level = from.rdma.service_level;
  to.pkey_index = from.rdma.pkey_index;
  to.hop_limit = from.rdma.hop_limit;
  to.timeout = from.rdma.timeout;
  to.retry_count = from.rdma.retry_count;
  to.memory_windows = from.rdma.memory_windows == config::feature_use::automatic;
  to.relaxed_ordering = from.rdma.relaxed_ordering == config::feature_use::automatic;
  to.max_registration = from.rdma.max_registration;
  to.stall_limit = std::max(to.stall_limit, 2 * from.peer_silence);
  // A peer is shut out only after it would be taken for lost: shutting it out costs its link.
  to.fence_patience =
      from.rdma.fence_patience.count() == 0 ? from.peer_silence : from.rdma.fence_patience;
  return to;
}

transport::xgmi_options xgmi_options_of(const config::transport_config& from) {
  transport::xgmi_options to;
  to.copy_blocks = from.xgmi.copy_blocks;
  to.engine_bytes = from.xgmi.engine_size;
  to.bulk = from.xgmi.bulk == config::feature_use::automatic;
  return to;
}

namespace {

std::set<std::string> open_stages_of(const config::deployment& deployment) {
  std::set<std::string> names;
  for (const auto& stage : deployment.stages) {
    if (stage.open) names.insert(stage.name);
  }
  return names;
}

/// The settings that all nodes of a stage share.
node_settings settings_of_stage(const config::deployment& deployment,
                                const config::stage_config& stage) {
  node_settings settings;
  settings.cluster = deployment.cluster;
  settings.self.stage = stage.name;
  settings.self.role = static_cast<std::uint8_t>(node_role_of(stage.role));
  settings.supervisor_host = deployment.supervisor.host;
  settings.supervisor_port = deployment.supervisor.port;
  settings.heartbeat_interval = deployment.supervisor.heartbeat_interval;
  settings.heartbeat_timeout = deployment.supervisor.heartbeat_timeout;
  settings.backend = backend_of(stage.transport.backend);
  for (const auto kind : stage.transport.fallback) {
    if (const auto backend = backend_of(kind)) settings.fallback.push_back(*backend);
  }
  settings.lanes = stage.transport.qp_per_transfer;
  settings.post_batch_size = stage.transport.post_batch_size;
  settings.connect_timeout = stage.transport.connect_timeout;
  settings.max_reconnects = stage.transport.max_reconnects;
  settings.default_deadline = deployment.limits.transfer_deadline;
  settings.retry_window = deployment.limits.retry_window;
  settings.source_lease = deployment.limits.source_lease;
  settings.peer_silence = stage.transport.peer_silence;
  settings.max_operations = deployment.limits.max_operations;
  settings.max_parked = deployment.limits.max_parked;
  for (const auto& node : config::resolve(deployment)) {
    settings.nodes.emplace(node.name,
                           node_place{node.stage, node.replica, node.rank, node.ranks()});
  }
  settings.open_stages = open_stages_of(deployment);
  for (const auto& edge : deployment.edges) {
    settings.edges.emplace(std::pair{edge.from, edge.to}, edge.mode);
  }
  settings.fail_when_full = stage.pool && stage.pool->on_full == config::pool_full::fail;
  return settings;
}

}  // namespace

result<node_settings> settings_of(const config::deployment& deployment, std::string_view name) {
  const auto nodes = config::resolve(deployment);
  const auto* found = config::find_node(nodes, name);
  if (found == nullptr) {
    std::string names;
    for (const auto& node : nodes) names += (names.empty() ? "" : ", ") + node.name;
    return fail(errc::not_found,
                "the deployment has no node `" + std::string{name} + "`; it has " + names);
  }
  if (!found->stage_index) {
    return fail(errc::invalid_config,
                "`" + found->name + "` is the supervisor, which has no engine");
  }
  auto settings = settings_of_stage(deployment, deployment.stages[*found->stage_index]);
  settings.self.name = found->name;
  settings.self.replica = found->replica;
  settings.self.rank = found->rank;
  settings.self.ranks = found->ranks();
  auto host = address_of(found->host, deployment.supervisor);
  if (!host) return fail(host.error());
  settings.self.host = std::move(*host);
  settings.self.port = found->port;
  return settings;
}

result<node_settings> settings_to_join(const config::deployment& deployment,
                                       const engine_options& options) {
  const announcement& of = *options.join;
  const auto* stage = config::find_stage(deployment, of.stage);
  if (stage == nullptr || !stage->open) {
    return fail(errc::not_found, "the deployment has no open stage `" + printable(of.stage, 64) +
                                     "` to join; open are: " + list_of(open_stages_of(deployment)));
  }
  auto settings = settings_of_stage(deployment, *stage);
  settings.joins = true;
  settings.self.name = config::open_node_name({of.stage, of.replica, of.rank});
  settings.self.replica_name = of.replica;
  settings.self.rank = of.rank;
  settings.self.ranks = of.ranks;
  settings.self.labels = of.labels;
  // Refused here, at once, with the supervisor's own check.
  const open_stage joined{stage->name, node_role_of(stage->role), stage->open->max_nodes};
  if (auto fine = check_announcement(settings.self, joined); !fine) return fail(fine.error());
  if (options.layout) {
    const auto& layout = *options.layout;
    // The rank and the fingerprint are read from the layout, so it has to be valid.
    if (auto fine = kvcache::check(layout); !fine) return fail(fine.error());
    if (const auto wrong = kvcache::contradicts_rank(layout, of.rank, of.ranks)) {
      return fail(errc::invalid_config, "the announcement says rank " + std::to_string(of.rank) +
                                            " of " + std::to_string(of.ranks) + ", the layout " +
                                            *wrong);
    }
    settings.self.fingerprint = kvcache::fingerprint_of(layout);
  }
  auto host = address_of("auto", deployment.supervisor);
  if (!host) return fail(host.error());
  settings.self.host = std::move(*host);
  return settings;
}

result<kvcache::cache_layout> layout_of(const config::deployment& deployment,
                                        const config::stage_config& stage, std::uint32_t rank) {
  if (!deployment.model || !stage.pool) {
    return fail(errc::invalid_config,
                "stage `" + stage.name +
                    "` has no model or no pool to make a cache from; add them to "
                    "the deployment, or let the engine bring its own layout");
  }
  const auto& model = *deployment.model;
  const auto held =
      config::layers_of_part(model.layers, stage.pipeline_parallel, rank / stage.tensor_parallel);
  kvcache::cache_shape shape;
  shape.layers = model.is_mla()
                     ? kvcache::mla_layers(held.count, model.latent_dim)
                     : kvcache::attention_layers(held.count, model.kv_heads, model.head_dim);
  if (stage.pipeline_parallel > 1) {
    shape.first_layer = held.first;
    shape.total_layers = model.layers;
  }
  shape.dtype = model.dtype;
  shape.element_size = config::dtype_size(model.dtype);
  shape.block_tokens = model.block_tokens;
  shape.tp_rank = rank % stage.tensor_parallel;
  shape.tp_size = stage.tensor_parallel;
  shape.blocks = 1;
  std::uint64_t state_bytes = 0;
  if (model.state) {
    shape.states.push_back({"state", model.state->bytes, kvcache::state_sharding::replicated});
    shape.state_slots = model.state->slots;
    // Includes room for the alignment between blocks and states.
    state_bytes = model.state->bytes * model.state->slots + 64;
  }
  const auto how = arrangement_of(stage.layout.value_or(model.layout));
  auto one = kvcache::make_layout(shape, how);
  if (!one) return one;
  const auto block_bytes = kvcache::bytes_per_block(*one);
  const auto for_blocks = stage.pool->size > state_bytes ? stage.pool->size - state_bytes : 0;
  const auto blocks = block_bytes == 0 ? 0 : for_blocks / block_bytes;
  if (blocks == 0) {
    return fail(errc::invalid_config,
                "pool of stage `" + stage.name + "` (" + std::to_string(stage.pool->size) +
                    " bytes) does not hold one block (" + std::to_string(block_bytes) + " bytes)");
  }
  shape.blocks = static_cast<std::uint32_t>(
      std::min<std::uint64_t>(blocks, std::numeric_limits<std::uint32_t>::max()));
  return kvcache::make_layout(shape, how);
}

result<void> furnish(node_context& context, const config::deployment& deployment,
                     const engine_options& options, std::function<void()> after_progress) {
  const auto* stage = config::find_stage(deployment, context.settings.self.stage);
  if (stage == nullptr) return fail(errc::internal, "node without a stage");
  transport::endpoint_options wanted;
  wanted.self = incarnation{context.self.incarnation};
  wanted.host = context.self.host;
  wanted.data_port = stage->transport.data_port;
  wanted.num_workers = options.polling ? 0 : stage->transport.num_workers;
  context.polled = wanted.num_workers == 0;
  wanted.rdma = rdma_options_of(stage->transport);
  if (const auto gpu = gpu_of(*stage, context.self)) {
    const auto ids = transport::xgmi::gpu_site::of_process()->bus_ids();
    if (*gpu < ids.size()) wanted.rdma.gpu = ids[*gpu];
  }
  wanted.xgmi = xgmi_options_of(stage->transport);
  wanted.after_progress = std::move(after_progress);
  wanted.on_thread_lost = [&context](const troupe::error& why) { end_node(context, why.message); };
  wanted.notice = [](const std::string& sentence) { logger("transport")->warn("{}", sentence); };
  auto endpoint = transport::endpoint::create(std::move(wanted));
  if (!endpoint) return fail(endpoint.error());
  context.endpoint = std::move(*endpoint);
  context.self = placed_at(std::move(context.self), context.endpoint->identity());

  if (auto made = make_cache(context, deployment, *stage, options); !made) return made;
  if (context.layout) {
    context.encoded_layout = kvcache::encode(*context.layout);
    // Refuses the layout at start, not at the first transfer.
    if (auto mapped = kvcache::cache_map::create(*context.layout); !mapped) {
      return fail(mapped.error());
    }
    context.table_pools = kvcache::pools_of_tables(*context.layout);
  }
  if (stage->role == config::role::store && stage->pool) {
    auto values = value_store::create(*context.endpoint, stage->pool->size);
    if (!values) return fail(values.error());
    context.values = std::move(*values);
  } else {
    context.values = value_store::on_demand(*context.endpoint, default_value_bytes);
  }
  return {};
}

}  // namespace troupe::actors
