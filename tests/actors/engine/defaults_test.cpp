// Two layers that do not know each other have the same defaults.

#include <gtest/gtest.h>

#include "troupe/actors/engine/engine_setup.hpp"
#include "troupe/config/deployment.hpp"
#include "troupe/config/parse.hpp"
#include "troupe/transport/rdma/options.hpp"
#include "troupe/transport/xgmi/options.hpp"

namespace troupe::testing {
namespace {

/// The only stage of a file with this `transport` section, each of whose lines is indented.
config::transport_config stage_with(const std::string& transport) {
  const auto file = config::parse(
      "cluster: demo\nstages:\n  - name: decode\n    role: decode\n    engine: external\n"
      "    transport:" +
          transport,
      "deployment.yaml");
  EXPECT_TRUE(file.value) << to_string(file.issues);
  return file.value ? file.value->stages.at(0).transport : config::transport_config{};
}

TEST(defaults, of_rdma_are_the_same_in_the_file_and_in_the_transport) {
  const config::transport_config stage;
  const config::rdma_config& file = stage.rdma;
  const transport::rdma_options backend;
  EXPECT_EQ(stage.device, backend.device);
  EXPECT_EQ(file.port, backend.port);
  EXPECT_EQ(file.gid_index, backend.gid_index);
  EXPECT_EQ(file.traffic_class, backend.traffic_class);
  EXPECT_EQ(file.service_level, backend.service_level);
  EXPECT_EQ(file.pkey_index, backend.pkey_index);
  EXPECT_EQ(file.hop_limit, backend.hop_limit);
  EXPECT_EQ(file.timeout, backend.timeout);
  EXPECT_EQ(file.retry_count, backend.retry_count);
  EXPECT_EQ(file.memory_windows == config::feature_use::automatic, backend.memory_windows);
  EXPECT_EQ(file.relaxed_ordering == config::feature_use::automatic, backend.relaxed_ordering);
  EXPECT_EQ(file.max_registration, backend.max_registration);
  EXPECT_EQ(actors::rdma_options_of(stage), backend);
}

TEST(defaults, what_the_file_says_of_rdma_is_what_the_transport_is_told) {
  const auto stage = stage_with(R"(
      backend: rdma
      device: mlx5_1
      rdma:
        port: 2
        gid_index: 7
        traffic_class: 106
        service_level: 3
        pkey_index: 1
        hop_limit: 2
        timeout: 17
        retry_count: 5
        memory_windows: off
        relaxed_ordering: off
        max_registration: 2GiB
        fence_patience: 1500ms
)");
  transport::rdma_options wanted;
  wanted.device = "mlx5_1";
  wanted.port = 2;
  wanted.gid_index = 7;
  wanted.traffic_class = 106;
  wanted.service_level = 3;
  wanted.pkey_index = 1;
  wanted.hop_limit = 2;
  wanted.timeout = 17;
  wanted.retry_count = 5;
  wanted.memory_windows = false;
  wanted.relaxed_ordering = false;
  wanted.max_registration = std::uint64_t{2} << 30;
  wanted.fence_patience = std::chrono::milliseconds{1500};
  EXPECT_EQ(actors::rdma_options_of(stage), wanted);
}

TEST(defaults, a_fence_over_rdma_is_as_patient_as_the_transport_is_with_a_silent_peer) {
  const auto stage = stage_with(R"(
      backend: rdma
      peer_silence: 20s
)");
  EXPECT_EQ(actors::rdma_options_of(stage).fence_patience, std::chrono::seconds{20});
  const auto hasty = stage_with(R"(
      backend: rdma
      peer_silence: 20s
      rdma: {fence_patience: 10ms}
)");
  EXPECT_EQ(actors::rdma_options_of(hasty).fence_patience, std::chrono::milliseconds{10});
}

TEST(defaults, of_xgmi_are_the_same_in_the_file_and_in_the_transport) {
  const config::transport_config stage;
  const transport::xgmi_options backend;
  const auto told = actors::xgmi_options_of(stage);
  EXPECT_EQ(told.copy_blocks, backend.copy_blocks);
  EXPECT_EQ(told.engine_bytes, backend.engine_bytes);
  EXPECT_EQ(told.bulk, backend.bulk);
}

TEST(defaults, what_the_file_says_of_xgmi_is_what_the_transport_is_told) {
  const auto told = actors::xgmi_options_of(stage_with(R"(
      backend: xgmi
      xgmi: {copy_blocks: 7, engine_size: 3MiB, bulk: off}
)"));
  EXPECT_EQ(told.copy_blocks, 7U);
  EXPECT_EQ(told.engine_bytes, std::uint64_t{3} << 20);
  EXPECT_FALSE(told.bulk);
}

}  // namespace
}  // namespace troupe::testing
