// A deployment that is printed and parsed again is unchanged, for 1000 generated ones.

#include <algorithm>
#include <array>
#include <random>
#include <string>

#include <gtest/gtest.h>

#include "troupe/config/parse.hpp"
#include "troupe/config/print.hpp"

#include "sanitized.hpp"

namespace troupe::config {
namespace {

class generator {
 public:
  explicit generator(std::uint64_t seed) : random_{seed} {}

  deployment make() {
    deployment value;
    value.cluster = name("c");
    value.supervisor.host = host();
    value.supervisor.port = port();
    value.supervisor.heartbeat_interval = milliseconds(10, 60'000);
    value.supervisor.heartbeat_timeout =
        3 * value.supervisor.heartbeat_interval + milliseconds(0, 100'000);
    value.supervisor.ease_in = milliseconds(0, 3'600'000);
    value.supervisor.state_file = any<std::string>(
        {"auto", "none", "/var/lib/x.state", "/a b/#c: 'd' \"e\"", "/back\\slash", "/\xc3\xa9"});
    value.supervisor.begin = chance();
    value.supervisor.idle = milliseconds(1000, 86'400'000);
    if (chance()) value.model = model();
    const auto stages = number(1, 6);
    for (std::uint64_t i = 0; i < stages; ++i) value.stages.push_back(stage(i, value.model));
    edges(value);
    value.limits.transfer_deadline = milliseconds(1, 86'400'000);
    value.limits.retry_window = milliseconds(0, 3'600'000);
    value.limits.source_lease = milliseconds(1000, 86'400'000);
    value.limits.retry_budget = small(0, 1000);
    value.security.mode = any({security_mode::none, security_mode::secret, security_mode::tls});
    value.security.secret = "/a b/secret";
    if (value.security.mode == security_mode::none) value.security.secret = "";
    if (value.security.mode == security_mode::secret && chance()) value.security.secret = "auto";
    if (value.security.mode == security_mode::tls) {
      value.security.certificate = "/c.crt";
      value.security.key = "/c.key";
      value.security.ca = "/ca: #.crt";
    }
    value.limits.max_operations = small(1, 1'048'576);
    value.limits.max_waiting = small(1, 1'048'576);
    value.limits.max_parked = small(1, 1'048'576);
    return value;
  }

 private:
  std::uint64_t number(std::uint64_t low, std::uint64_t high) {
    return std::uniform_int_distribution<std::uint64_t>{low, high}(random_);
  }
  std::uint32_t small(std::uint32_t low, std::uint32_t high) {
    return static_cast<std::uint32_t>(number(low, high));
  }
  std::chrono::milliseconds milliseconds(std::uint64_t low, std::uint64_t high) {
    const std::array<std::uint64_t, 3> grains{1, 1000, 60'000};
    const auto grain = grains[number(0, 2)];
    const auto value = number(low, high);
    return std::chrono::milliseconds{value / grain * grain >= low ? value / grain * grain : value};
  }
  bool chance() { return number(0, 1) == 1; }
  template <typename Enum>
  Enum any(std::initializer_list<Enum> all) {
    return *(all.begin() + number(0, all.size() - 1));
  }
  std::string name(const std::string& stem) {
    const std::array<std::string, 7> words{"null", "true", "0x10", "1e3", "a-b_c", "7", "no"};
    return chance() ? words[number(0, 6)] : stem + std::to_string(number(0, 1'000'000));
  }
  std::string host() {
    return any<std::string>({"127.0.0.1", "localhost", "::1", "127.1.2.3", "LOCALHOST"});
  }
  // Each fixed port is used once, so that ports never clash.
  std::uint16_t port() { return chance() ? std::uint16_t{0} : next_port_++; }

  cache_arrangement arrangement(bool mla) {
    cache_arrangement value;
    value.order =
        any({block_order::layers_first, block_order::blocks_first, block_order::block_interleaved});
    if (mla) return value;
    if (value.order != block_order::block_interleaved && chance())
      value.kv = kv_placement::separate;
    if (chance()) value.inner = block_inner::head_major;
    return value;
  }

  model_config model() {
    model_config value;
    value.layers = small(1, 2048);
    if (number(0, 3) == 0) {
      value.latent_dim = small(1, 65'536);
    } else {
      value.kv_heads = 8;
      value.head_dim = small(1, 1024);
    }
    value.dtype = any<std::string>({"fp32", "fp16", "bf16", "fp8", "int8"});
    value.block_tokens = small(1, 1024);
    value.layout = arrangement(value.is_mla());
    if (chance()) value.state = state_config{number(1, 1U << 20U), small(1, 65'536)};
    return value;
  }

  stage_config stage(std::uint64_t index, const std::optional<model_config>& model) {
    stage_config value;
    value.name = name("s") + "-" + std::to_string(index);
    value.role = any({role::prefill, role::decode, role::store, role::both});
    if (number(0, 3) == 0) return open_stage(std::move(value));
    value.replicas = small(1, 4);
    if (value.role != role::store) value.tensor_parallel = any({1U, 2U, 4U, 8U, 16U});
    const bool divides = value.role != role::store && value.tensor_parallel <= 4 &&
                         (!model || (model->layers >= 4 && !model->state));
    if (divides) value.pipeline_parallel = small(1, 4);
    value.hosts.clear();
    const auto hosts = chance() ? number(1, value.replicas) : value.node_count();
    for (std::uint64_t i = 0; i < hosts; ++i) value.hosts.push_back(host());
    for (std::size_t i = 0; i < value.node_count(); ++i) value.ports.push_back(port());
    value.policy = any({placement_policy::random, placement_policy::round_robin,
                        placement_policy::least_queue_length});
    const bool built_in =
        model && value.role != role::both && value.pipeline_parallel == 1 && chance();
    value.engine = value.role == role::store ? engine_kind::none
                   : built_in                ? engine_kind::reference
                                             : engine_kind::external;
    if (value.engine != engine_kind::external && chance())
      value.restart = restart_policy::on_failure;
    if (model && value.role != role::store) value.layout = arrangement(model->is_mla());
    if (value.engine != engine_kind::external || chance()) {
      pool_config pool;
      const auto least =
          model ? bytes_per_block(*model, value.tensor_parallel, value.pipeline_parallel) +
                      (model->state ? model->state->bytes * model->state->slots : 0)
                : 1;
      pool.size = least + number(0, std::uint64_t{1} << 40U);
      pool.on_full = any({pool_full::wait, pool_full::fail});
      if (value.engine == engine_kind::external && chance()) {
        const bool one = chance();
        const auto first = small(0, 255);
        for (std::size_t i = 0; i < value.node_count(); ++i) {
          pool.gpus.push_back(one ? first : small(0, 255));
        }
      }
      value.pool = pool;
    }
    value.transport = transport(value.node_count(), value.engine != engine_kind::external);
    return value;
  }

  stage_config open_stage(stage_config value) {
    value.open = open_config{small(1, 150)};
    value.hosts = {"auto"};
    value.policy = any({placement_policy::random, placement_policy::round_robin,
                        placement_policy::least_queue_length});
    value.engine = value.role == role::store ? engine_kind::none : engine_kind::external;
    if (value.role == role::store) {
      pool_config pool;
      pool.size = number(1, std::uint64_t{1} << 40U);
      pool.on_full = any({pool_full::wait, pool_full::fail});
      value.pool = pool;
    }
    value.transport = transport(0, value.role == role::store);
    return value;
  }

  transport_config transport(std::size_t nodes, bool on_host) {
    transport_config value;
    value.backend = any({backend_kind::automatic, backend_kind::shm, backend_kind::tcp,
                         backend_kind::rdma, backend_kind::xgmi});
    if (on_host && value.backend == backend_kind::xgmi) value.backend = backend_kind::shm;
    if (value.backend != backend_kind::tcp && chance()) value.fallback.push_back(backend_kind::tcp);
    if (value.backend != backend_kind::shm && chance()) value.fallback.push_back(backend_kind::shm);
    if (value.backend == backend_kind::automatic || value.backend == backend_kind::rdma) {
      value.device = any({"auto", "mlx5_0", "mlx5_0,mlx5_1", "^rxe-0.1"});
      if (chance()) {
        value.rdma.port = static_cast<std::uint8_t>(small(0, 255));
        value.rdma.gid_index = static_cast<std::int32_t>(small(0, 256)) - 1;
        value.rdma.traffic_class = static_cast<std::uint8_t>(small(0, 255));
        value.rdma.service_level = static_cast<std::uint8_t>(small(0, 15));
        value.rdma.pkey_index = static_cast<std::uint16_t>(small(0, 65'535));
        value.rdma.hop_limit = static_cast<std::uint8_t>(small(1, 255));
        value.rdma.timeout = static_cast<std::uint8_t>(small(8, 20));
        value.rdma.retry_count = static_cast<std::uint8_t>(small(0, 7));
        value.rdma.memory_windows = any({feature_use::automatic, feature_use::off});
        value.rdma.relaxed_ordering = any({feature_use::automatic, feature_use::off});
        value.rdma.max_registration = chance() ? 0 : number(4096, std::uint64_t{1} << 40U);
        if (chance()) value.rdma.fence_patience = milliseconds(10, 60'000);
      }
    }
    const bool gpus =
        value.backend == backend_kind::automatic || value.backend == backend_kind::xgmi;
    if (gpus && chance()) {
      value.xgmi.copy_blocks = small(1, 1024);
      value.xgmi.engine_size = number(1, std::uint64_t{1} << 40U);
      value.xgmi.bulk = any({feature_use::automatic, feature_use::off});
    }
    value.qp_per_transfer = small(1, 64);
    value.post_batch_size = chance() ? -1 : static_cast<std::int32_t>(number(1, 65'536));
    value.num_workers = small(1, 64);
    const bool listens =
        value.backend == backend_kind::automatic || value.backend == backend_kind::tcp ||
        std::ranges::find(value.fallback, backend_kind::tcp) != value.fallback.end();
    if (nodes == 1 && listens) value.data_port = port();
    value.connect_timeout = milliseconds(1, 600'000);
    value.max_reconnects = small(0, 1000);
    value.peer_silence = milliseconds(100, 60'000);
    return value;
  }

  void edges(deployment& value) {
    for (const auto& from : value.stages) {
      for (const auto& to : value.stages) {
        if ((from.name == to.name && from.role != role::both) || !chance()) continue;
        edge_config edge{from.name, to.name, std::nullopt};
        const bool gives = from.role == role::prefill || from.role == role::both;
        const bool takes = to.role == role::decode || to.role == role::both;
        if (gives && takes) {
          edge.mode = any({transfer_mode::write, transfer_mode::read});
        }
        value.edges.push_back(std::move(edge));
      }
    }
  }

  std::mt19937_64 random_;
  std::uint16_t next_port_{10'000};
};

TEST(round_trip, a_printed_deployment_parses_to_the_same_structs) {
  for (std::uint64_t seed = 0; seed < troupe::testing::tries(1000U); ++seed) {
    const deployment value = generator{seed}.make();
    const std::string text = print(value);
    const auto outcome = parse(text, "seed-" + std::to_string(seed));
    ASSERT_TRUE(outcome.value) << to_string(outcome.issues) << text;
    ASSERT_EQ(*outcome.value, value) << "seed " << seed << "\n" << text;
    ASSERT_EQ(print(*outcome.value), text) << "seed " << seed;
  }
}

TEST(round_trip, every_field_makes_a_difference_to_what_is_printed) {
  // Different deployments must print differently, or the round trip above would prove nothing.
  std::uint64_t seed = 1;
  deployment first = generator{seed}.make();
  while (first.stages[0].open) first = generator{++seed}.make();  // it has no port to change
  first.security.mode = security_mode::secret;  // in mode `none` there is no secret to print
  first.stages[0].transport.device = "auto";
  first.stages[0].transport.rdma = {};
  first.stages[0].transport.xgmi = {};
  const std::string text = print(first);
  const auto differs = [&](auto change) {
    deployment changed = first;
    change(changed);
    return print(changed) != text;
  };
  EXPECT_TRUE(
      differs([](auto& d) { d.supervisor.heartbeat_timeout += std::chrono::milliseconds{1}; }));
  EXPECT_TRUE(differs([](auto& d) { d.supervisor.ease_in += std::chrono::milliseconds{1}; }));
  EXPECT_TRUE(differs([](auto& d) { d.supervisor.state_file = "/elsewhere"; }));
  EXPECT_TRUE(differs([](auto& d) { d.supervisor.begin = !d.supervisor.begin; }));
  EXPECT_TRUE(differs([](auto& d) { d.supervisor.idle += std::chrono::milliseconds{1}; }));
  EXPECT_TRUE(differs([](auto& d) { d.stages[0].transport.max_reconnects += 1; }));
  EXPECT_TRUE(differs([](auto& d) { d.stages[0].transport.device = "mlx5_0"; }));
  EXPECT_TRUE(differs([](auto& d) { d.stages[0].transport.rdma.port += 1; }));
  EXPECT_TRUE(differs([](auto& d) { d.stages[0].transport.rdma.gid_index += 1; }));
  EXPECT_TRUE(differs([](auto& d) { d.stages[0].transport.rdma.traffic_class += 1; }));
  EXPECT_TRUE(differs([](auto& d) { d.stages[0].transport.rdma.service_level += 1; }));
  EXPECT_TRUE(differs([](auto& d) { d.stages[0].transport.rdma.pkey_index += 1; }));
  EXPECT_TRUE(differs([](auto& d) { d.stages[0].transport.rdma.hop_limit += 1; }));
  EXPECT_TRUE(differs([](auto& d) { d.stages[0].transport.rdma.timeout += 1; }));
  EXPECT_TRUE(differs([](auto& d) { d.stages[0].transport.rdma.retry_count -= 1; }));
  EXPECT_TRUE(
      differs([](auto& d) { d.stages[0].transport.rdma.memory_windows = feature_use::off; }));
  EXPECT_TRUE(
      differs([](auto& d) { d.stages[0].transport.rdma.relaxed_ordering = feature_use::off; }));
  EXPECT_TRUE(differs([](auto& d) { d.stages[0].transport.rdma.max_registration += 4096; }));
  EXPECT_TRUE(differs(
      [](auto& d) { d.stages[0].transport.rdma.fence_patience += std::chrono::milliseconds{10}; }));
  EXPECT_TRUE(differs([](auto& d) { d.stages[0].transport.xgmi.copy_blocks += 1; }));
  EXPECT_TRUE(differs([](auto& d) { d.stages[0].transport.xgmi.engine_size += 1; }));
  EXPECT_TRUE(differs([](auto& d) { d.stages[0].transport.xgmi.bulk = feature_use::off; }));
  EXPECT_TRUE(differs([](auto& d) { d.stages[0].pool = pool_config{.gpus = {3}, .size = 9}; }));
  EXPECT_TRUE(differs([](auto& d) { d.stages[0].ports[0] += 1; }));
  EXPECT_TRUE(differs([](auto& d) { d.stages[0].open = open_config{}; }));
  EXPECT_TRUE(differs([](auto& d) { d.limits.max_waiting += 1; }));
  EXPECT_TRUE(differs([](auto& d) { d.limits.max_parked += 1; }));
  EXPECT_TRUE(differs([](auto& d) { d.limits.retry_budget += 1; }));
  EXPECT_TRUE(differs([](auto& d) { d.limits.source_lease += std::chrono::milliseconds{1}; }));
  EXPECT_TRUE(differs([](auto& d) { d.security.secret += "x"; }));
  EXPECT_TRUE(
      differs([](auto& d) { d.stages[0].transport.peer_silence += std::chrono::milliseconds{1}; }));
}

}  // namespace
}  // namespace troupe::config
