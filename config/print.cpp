#include "troupe/config/print.hpp"

#include <algorithm>
#include <functional>
#include <sstream>

#include "troupe/config/units.hpp"

namespace troupe::config {
namespace {

/// A name or a host as a YAML scalar: plain unless YAML would read it as another type.
std::string scalar(const std::string& text) {
  const bool plain =
      text.find(':') == std::string::npos && text != "null" && text != "Null" && text != "NULL";
  return plain ? text : "\"" + text + "\"";
}

/// A path as a YAML scalar.
std::string path_scalar(const std::string& path) {
  if (path.find('/') == std::string::npos) return path;  // a word
  std::string text = "\"";
  for (const char c : path) {
    if (c == '"' || c == '\\') text += '\\';
    text += c;
  }
  return text + "\"";
}

template <typename List, typename Format>
std::string list_of(const List& list, Format format) {
  std::string text;
  for (const auto& item : list) {
    if (!text.empty()) text += ", ";
    text += format(item);
  }
  return "[" + text + "]";
}

void print_layout(std::ostream& out, const cache_arrangement& value, const std::string& indent) {
  out << indent << "layout: {order: " << to_string(value.order) << ", kv: " << to_string(value.kv)
      << ", inner: " << to_string(value.inner) << "}\n";
}

void print_model(std::ostream& out, const model_config& value) {
  out << "model:\n  layers: " << value.layers << "\n";
  if (value.is_mla()) {
    out << "  mla: {latent_dim: " << value.latent_dim << "}\n";
  } else {
    out << "  kv_heads: " << value.kv_heads << "\n  head_dim: " << value.head_dim << "\n";
  }
  out << "  dtype: " << value.dtype << "\n  block_tokens: " << value.block_tokens << "\n";
  print_layout(out, value.layout, "  ");
  if (value.state) {
    out << "  state: {bytes: " << format_size(value.state->bytes)
        << ", slots: " << value.state->slots << "}\n";
  }
}

void print_transport(std::ostream& out, const transport_config& value) {
  const auto word = [](backend_kind kind) { return std::string{to_string(kind)}; };
  out << "    transport:\n"
      << "      backend: " << to_string(value.backend) << "\n"
      << "      fallback: " << list_of(value.fallback, word) << "\n"
      << "      device: " << scalar(value.device) << "\n";
  if (value.rdma != rdma_config{}) {
    const auto number = [](auto of) { return static_cast<int>(of); };
    const auto& rdma = value.rdma;
    out << "      rdma: {port: " << number(rdma.port) << ", gid_index: " << rdma.gid_index
        << ", traffic_class: " << number(rdma.traffic_class)
        << ", service_level: " << number(rdma.service_level) << ", pkey_index: " << rdma.pkey_index
        << ", hop_limit: " << number(rdma.hop_limit) << ", timeout: " << number(rdma.timeout)
        << ", retry_count: " << number(rdma.retry_count)
        << ", memory_windows: " << to_string(rdma.memory_windows)
        << ", relaxed_ordering: " << to_string(rdma.relaxed_ordering)
        << ", max_registration: " << format_size(rdma.max_registration) << ", fence_patience: "
        << (rdma.fence_patience.count() == 0 ? "0" : format_duration(rdma.fence_patience)) << "}\n";
  }
  if (value.xgmi != xgmi_config{}) {
    const auto& xgmi = value.xgmi;
    out << "      xgmi: {copy_blocks: " << xgmi.copy_blocks
        << ", engine_size: " << format_size(xgmi.engine_size) << ", bulk: " << to_string(xgmi.bulk)
        << "}\n";
  }
  out << "      qp_per_transfer: " << value.qp_per_transfer << "\n"
      << "      post_batch_size: " << value.post_batch_size << "\n"
      << "      num_workers: " << value.num_workers << "\n"
      << "      data_port: " << value.data_port << "\n"
      << "      connect_timeout: " << format_duration(value.connect_timeout) << "\n"
      << "      max_reconnects: " << value.max_reconnects << "\n"
      << "      peer_silence: " << format_duration(value.peer_silence) << "\n";
}

/// One word if all nodes have the same, else a list.
std::string device_of(const pool_config& value) {
  const auto word = [](std::uint32_t gpu) { return scalar("gpu:" + std::to_string(gpu)); };
  const auto& gpus = value.gpus;
  if (gpus.empty()) return "cpu";
  if (std::ranges::adjacent_find(gpus, std::not_equal_to{}) == gpus.end()) return word(gpus[0]);
  return list_of(gpus, word);
}

/// Keys that an open stage may not have.
void print_named_nodes(std::ostream& out, const stage_config& value) {
  out << "    replicas: " << value.replicas << "\n"
      << "    pipeline_parallel: " << value.pipeline_parallel << "\n"
      << "    tensor_parallel: " << value.tensor_parallel << "\n"
      << "    hosts: " << list_of(value.hosts, scalar) << "\n"
      << "    ports: "
      << list_of(value.ports, [](std::uint16_t port) { return std::to_string(port); }) << "\n";
  if (value.engine != engine_kind::none) out << "    engine: " << to_string(value.engine) << "\n";
  out << "    restart: " << to_string(value.restart) << "\n";
  if (value.layout) print_layout(out, *value.layout, "    ");
}

void print_stage(std::ostream& out, const stage_config& value) {
  out << "  - name: " << scalar(value.name) << "\n"
      << "    role: " << to_string(value.role) << "\n";
  if (value.open) {
    out << "    open: {max_nodes: " << value.open->max_nodes << "}\n";
  } else {
    print_named_nodes(out, value);
  }
  out << "    policy: " << to_string(value.policy) << "\n";
  if (value.pool) {
    out << "    pool: {device: " << device_of(*value.pool)
        << ", size: " << format_size(value.pool->size)
        << ", on_full: " << to_string(value.pool->on_full) << "}\n";
  }
  print_transport(out, value.transport);
}

void print_edges(std::ostream& out, const std::vector<edge_config>& edges) {
  out << "edges:" << (edges.empty() ? " []\n" : "\n");
  for (const auto& edge : edges) {
    out << "  - {from: " << scalar(edge.from) << ", to: " << scalar(edge.to);
    if (edge.mode) out << ", mode: " << to_string(*edge.mode);
    out << "}\n";
  }
}

}  // namespace

std::string print(const deployment& of) {
  std::ostringstream out;
  out << "cluster: " << scalar(of.cluster) << "\n"
      << "supervisor:\n"
      << "  host: " << scalar(of.supervisor.host) << "\n"
      << "  port: " << of.supervisor.port << "\n"
      << "  heartbeat_interval: " << format_duration(of.supervisor.heartbeat_interval) << "\n"
      << "  heartbeat_timeout: " << format_duration(of.supervisor.heartbeat_timeout) << "\n"
      << "  ease_in: " << format_duration(of.supervisor.ease_in) << "\n"
      << "  state_file: " << path_scalar(of.supervisor.state_file) << "\n"
      << "  begin: " << (of.supervisor.begin ? "true" : "false") << "\n"
      << "  idle: " << format_duration(of.supervisor.idle) << "\n"
      << "security:\n  mode: " << to_string(of.security.mode) << "\n";
  const auto file = [&out](const char* key, const std::string& path) {
    if (!path.empty()) out << "  " << key << ": " << path_scalar(path) << "\n";
  };
  if (of.security.mode != security_mode::none) file("secret", of.security.secret);
  file("certificate", of.security.certificate);
  file("key", of.security.key);
  file("ca", of.security.ca);
  if (of.model) print_model(out, *of.model);
  out << "stages:\n";
  for (const auto& stage : of.stages) print_stage(out, stage);
  print_edges(out, of.edges);
  out << "limits:\n"
      << "  transfer_deadline: " << format_duration(of.limits.transfer_deadline) << "\n"
      << "  retry_window: " << format_duration(of.limits.retry_window) << "\n"
      << "  source_lease: " << format_duration(of.limits.source_lease) << "\n"
      << "  retry_budget: " << of.limits.retry_budget << "\n"
      << "  max_operations: " << of.limits.max_operations << "\n"
      << "  max_waiting: " << of.limits.max_waiting << "\n"
      << "  max_parked: " << of.limits.max_parked << "\n";
  return out.str();
}

}  // namespace troupe::config
