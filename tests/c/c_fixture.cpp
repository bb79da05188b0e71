#include "c_fixture.hpp"

#include <charconv>

namespace troupe::testing {

std::string deployment_text(std::uint16_t supervisor_port) {
  return "cluster: c-abi\nsupervisor: {host: 127.0.0.1, port: " + std::to_string(supervisor_port) +
         ", state_file: none}\nsecurity: {mode: none}\nstages:\n"
         "  - {name: prefill, role: prefill, engine: external}\n"
         "  - {name: decode, role: decode, engine: external}\n"
         "edges:\n  - {from: prefill, to: decode, mode: write}\n";
}

own_supervisor::own_supervisor() : file_{deployment_text(0)}, up_{{"up", file_.path()}} {
  const std::string said = "listens at 127.0.0.1:";
  if (!up_.says(said)) return;
  (void)up_.reads_until(
      [&] { return up_.out().find('\n', up_.out().find(said)) != std::string::npos; });
  const auto at = up_.out().find(said) + said.size();
  std::from_chars(up_.out().data() + at, up_.out().data() + up_.out().size(), port_);
}

layout_handle small_layout() {
  troupe_cache_geometry geometry{};
  geometry.size = sizeof geometry;
  geometry.dtype = "bf16";
  geometry.block_tokens = 4;
  geometry.blocks = 8;
  const troupe_layer_shape shapes[] = {{TROUPE_LAYER_ATTENTION, 2, 8},
                                       {TROUPE_LAYER_ATTENTION, 2, 8}};
  troupe_layout* layout = nullptr;
  EXPECT_EQ(troupe_layout_make(&geometry, shapes, 2, nullptr, &layout), TROUPE_OK)
      << troupe_last_error();
  return layout_handle{layout};
}

own_engine::own_engine(std::uint16_t supervisor_port, const std::string& name,
                       std::uint32_t flags) {
  const auto layout = small_layout();
  std::uint64_t size = 0;
  std::size_t count = 0;
  EXPECT_EQ(troupe_layout_region_sizes(layout.get(), &size, 1, &count), TROUPE_OK);
  memory.resize(size);
  const troupe_memory region{memory.data(), memory.size()};
  const auto text = deployment_text(supervisor_port);
  troupe_engine_options options{};
  options.size = sizeof options;
  options.flags = flags;
  options.deployment_text = text.c_str();
  options.node = name.c_str();
  options.layout = layout.get();
  options.regions = &region;
  options.region_count = 1;
  EXPECT_EQ(troupe_engine_start(&options, &engine_), TROUPE_OK) << troupe_last_error();
}

own_engine::~own_engine() {
  troupe_engine_free(engine_);
}

}  // namespace troupe::testing
