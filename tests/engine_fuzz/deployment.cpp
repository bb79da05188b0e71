#include <sstream>

#include "troupe/config/parse.hpp"

#include "node.hpp"

namespace troupe::engine_fuzz {

namespace {

std::string arrangement_text(const kvcache::arrangement& how) {
  std::string text = "{order: ";
  text += how.order == kvcache::block_order::layers_first   ? "layers_first"
          : how.order == kvcache::block_order::blocks_first ? "blocks_first"
                                                            : "block_interleaved";
  text += how.kv == kvcache::kv_placement::together ? ", kv: together" : ", kv: separate";
  text += how.inner == kvcache::block_inner::token_major ? ", inner: token_major}"
                                                         : ", inner: head_major}";
  return text;
}

void write_model(std::ostream& out, const scenario& s) {
  const auto& first = s.model.layers.front();
  out << "model:\n  layers: " << s.model.layers.size() << "\n  dtype: " << s.model.dtype
      << "\n  block_tokens: " << s.model.block_tokens << "\n";
  if (first.kind == kvcache::layer_kind::mla) {
    out << "  mla: {latent_dim: " << first.head_dim << "}\n";
  } else {
    out << "  kv_heads: " << first.kv_heads << "\n  head_dim: " << first.head_dim << "\n";
  }
  if (!s.model.states.empty()) {
    out << "  state: {bytes: " << s.model.states.front().bytes
        << "B, slots: " << s.model.state_slots << "}\n";
  }
}

std::string device_text(const side& its) {
  if (!its.on_gpu) return "cpu";
  // There are two GPU doubles.
  std::string all = "[";
  const auto nodes = its.ranks * its.replicas;
  for (std::uint32_t node = 0; node < nodes; ++node)
    all += (node > 0 ? ", gpu:" : "gpu:") + std::to_string(node % 2);
  return all + "]";
}

/// A frozen process is lost soon, others never. An emulated machine gets more time.
void write_transport(std::ostream& out, const scenario& s, const std::string& backend) {
  const char* silence = !s.may_freeze ? "1min" : backend == "rdma" ? "20s" : "4s";
  out << "    transport: {backend: " << backend << ", qp_per_transfer: " << s.lanes
      << ", max_reconnects: 1000, peer_silence: " << silence << ", connect_timeout: " << silence;
  if (backend == "rdma") out << ", rdma: {timeout: 19}";
  out << "}\n";
}

/// The file names none of its nodes.
void write_open_stage(std::ostream& out, const scenario& s, const char* name, const char* role) {
  out << "  - name: " << name << "\n    role: " << role
      << "\n    open: {max_nodes: " << most_nodes_of_open_stage << "}\n";
  write_transport(out, s, s.backend);
}

void write_stage(std::ostream& out, const scenario& s, const char* name, const side& its,
                 std::uint32_t node) {
  out << "  - name: " << name << "\n    role: " << name << "\n    replicas: " << its.replicas
      << "\n    tensor_parallel: " << its.ranks << "\n    engine: external\n";
  if (its.pooled) {
    auto bytes = kvcache::bytes_per_block(s.layout_of(node)) * its.blocks;
    if (!s.model.states.empty()) bytes += s.model.states.front().bytes * s.model.state_slots + 64;
    out << "    pool: {device: " << device_text(its) << ", size: " << bytes
        << "B}\n    layout: " << arrangement_text(its.how) << "\n";
  }
  write_transport(out, s, s.backend);
}

void write_stages(std::ostream& out, const scenario& s) {
  switch (s.named_by) {
    case naming::file:
      write_stage(out, s, "prefill", s.prefill, 0);
      write_stage(out, s, "decode", s.decode, s.prefill.ranks);
      return;
    case naming::open:
      write_open_stage(out, s, "prefill", "prefill");
      write_open_stage(out, s, "decode", "decode");
      return;
    case naming::open_both: write_open_stage(out, s, "engines", "both"); return;
  }
}

void write_aside(std::ostream& out, const scenario& s) {
  out << "  - name: aside\n    role: " << (s.seed % 2 == 0 ? "prefill" : "decode")
      << "\n    engine: external\n";
  write_transport(out, s, s.backend == "xgmi" ? "auto" : s.backend);
}

}  // namespace

std::string deployment_text(const scenario& s, int supervisor_port) {
  std::ostringstream out;
  out << "cluster: fuzz\nsupervisor: {host: 127.0.0.1, port: " << supervisor_port
      << ", heartbeat_interval: 200ms, heartbeat_timeout: 30min, state_file: none}\n"
      << "security: {mode: none}\n";
  if (s.has_model()) write_model(out, s);
  out << "limits: {transfer_deadline: " << s.default_deadline_ms
      << "ms, source_lease: 10min, retry_window: " << (s.retries ? "10min" : "0s")
      << "}\nstages:\n";
  write_stages(out, s);
  if (s.has_aside) write_aside(out, s);
  out << "edges: [{from: " << s.stage_of(0) << ", to: " << s.stage_of(s.prefill.ranks)
      << ", mode: " << (s.reads ? "read" : "write") << "}]\n";
  return out.str();
}

result<config::deployment> deployment_of(const scenario& s, int supervisor_port) {
  auto parsed = config::parse(deployment_text(s, supervisor_port), "fuzz");
  if (!parsed.value) return fail(errc::invalid_config, config::to_string(parsed.issues));
  return std::move(*parsed.value);
}

}  // namespace troupe::engine_fuzz
