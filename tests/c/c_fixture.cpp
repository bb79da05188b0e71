#include "c_fixture.hpp"

#include <charconv>
#include <cstring>

namespace troupe::testing {

namespace {

std::string head_of_deployment(std::uint16_t supervisor_port) {
  return "cluster: c-abi\nsupervisor: {host: 127.0.0.1, port: " + std::to_string(supervisor_port) +
         ", heartbeat_interval: 100ms, heartbeat_timeout: 10min, state_file: none}\n"
         "security: {mode: none}\nstages:\n";
}

// No peer is given up because the machine is busy.
constexpr const char* patient = ", transport: {peer_silence: 1min, connect_timeout: 1min}}\n";

}  // namespace

std::string deployment_text(std::uint16_t supervisor_port) {
  return head_of_deployment(supervisor_port) +
         "  - {name: prefill, role: prefill, engine: external" + patient +
         "  - {name: decode, role: decode, engine: external" + patient +
         "edges:\n  - {from: prefill, to: decode, mode: write}\n";
}

std::string open_deployment_text(std::uint16_t supervisor_port) {
  return head_of_deployment(supervisor_port) +
         "  - {name: engines, role: both, open: {max_nodes: 8}" + patient +
         "edges:\n  - {from: engines, to: engines, mode: read}\n";
}

own_supervisor::own_supervisor(const std::string& deployment)
    : file_{deployment}, up_{{"up", file_.path()}} {
  const std::string said = "listens at 127.0.0.1:";
  if (!up_.says(said)) return;
  (void)up_.reads_until(
      [&] { return up_.out().find('\n', up_.out().find(said)) != std::string::npos; });
  const auto at = up_.out().find(said) + said.size();
  std::from_chars(up_.out().data() + at, up_.out().data() + up_.out().size(), port_);
}

troupe_cache_geometry geometry_of(const char* dtype) {
  troupe_cache_geometry geometry{};
  geometry.size = sizeof geometry;
  geometry.dtype = dtype;
  geometry.block_tokens = 4;
  geometry.blocks = 8;
  return geometry;
}

layout_handle small_layout() {
  const auto geometry = geometry_of("bf16");
  const troupe_layer_shape shapes[] = {{TROUPE_LAYER_ATTENTION, 2, 8},
                                       {TROUPE_LAYER_ATTENTION, 2, 8}};
  troupe_layout* layout = nullptr;
  EXPECT_EQ(troupe_layout_make(&geometry, shapes, 2, nullptr, &layout), TROUPE_OK)
      << troupe_last_error();
  return layout_handle{layout};
}

troupe_cluster_options cluster_options_of(const std::string& text) {
  troupe_cluster_options options{};
  options.size = sizeof options;
  options.deployment_text = text.c_str();
  options.timeout_ms = 30'000;
  return options;
}

troupe_send_spec send_of(const char* request) {
  troupe_send_spec spec{};
  spec.size = sizeof spec;
  spec.request = request;
  spec.blocks = sent_blocks;
  spec.block_count = 3;
  return spec;
}

troupe_receive_spec receive_of(const char* request, const char* const* source) {
  troupe_receive_spec spec{};
  spec.size = sizeof spec;
  spec.request = request;
  spec.sources = source;
  spec.source_count = 1;
  spec.tokens = tokens;
  spec.blocks = received_blocks;
  spec.block_count = 3;
  return spec;
}

own_engine::own_engine(std::uint16_t supervisor_port, const std::string& name,
                       std::uint32_t flags) {
  troupe_engine_options options{};
  options.flags = flags;
  options.node = name.c_str();
  start(deployment_text(supervisor_port), options);
}

own_engine::own_engine(std::uint16_t supervisor_port, const troupe_announcement& join,
                       std::uint32_t flags) {
  troupe_engine_options options{};
  options.flags = flags;
  options.join = &join;
  start(open_deployment_text(supervisor_port), options);
}

void own_engine::start(const std::string& deployment, troupe_engine_options options) {
  const auto layout = small_layout();
  std::uint64_t size = 0;
  std::size_t count = 0;
  EXPECT_EQ(troupe_layout_region_sizes(layout.get(), &size, 1, &count), TROUPE_OK);
  memory.resize(size);
  const troupe_memory region{memory.data(), memory.size()};
  options.size = sizeof options;
  options.deployment_text = deployment.c_str();
  options.layout = layout.get();
  options.regions = &region;
  options.region_count = 1;
  EXPECT_EQ(troupe_engine_start(&options, &engine_), TROUPE_OK) << troupe_last_error();
}

own_engine::~own_engine() {
  troupe_engine_free(engine_);
}

void expect_same_cache(const own_engine& sent, const own_engine& received) {
  const auto layout = small_layout();
  for (std::uint32_t layer = 0; layer < 2; ++layer)
    for (std::uint32_t plane = 0; plane < 2; ++plane)
      for (std::uint32_t token = 0; token < tokens; ++token)
        for (std::uint32_t head = 0; head < 2; ++head) {
          const troupe_cache_place place{layer, plane, token, head};
          troupe_region_bytes from{}, to{};
          ASSERT_DONE(troupe_layout_locate(layout.get(), sent_blocks, 3, &place, &from));
          ASSERT_DONE(troupe_layout_locate(layout.get(), received_blocks, 3, &place, &to));
          ASSERT_EQ(from.length, 16u);
          ASSERT_EQ(
              std::memcmp(&sent.memory[from.offset], &received.memory[to.offset], from.length), 0)
              << layer << " " << plane << " " << token << " " << head;
        }
}

}  // namespace troupe::testing
