#include "troupe/deploy/cli/bench_options.hpp"

#include <chrono>

#include "troupe/config/parse.hpp"
#include "troupe/config/print.hpp"

namespace troupe::deploy::cli {

namespace {

config::stage_config stage_of(const char* name, config::role role, const bench_options& options,
                              std::uint64_t pool) {
  config::stage_config stage;
  stage.name = name;
  stage.role = role;
  stage.ports = {0};
  stage.layout = config::cache_arrangement{};
  stage.pool = config::pool_config{};
  stage.pool->size = pool;
  stage.transport.backend =
      config::backend_of(options.backend).value_or(config::backend_kind::automatic);
  stage.transport.qp_per_transfer = options.lanes;
  // A single silence would end a run that may have taken hours, and the machine is as busy as can
  // be.
  stage.transport.peer_silence = std::chrono::seconds{10};
  return stage;
}

}  // namespace

std::uint64_t warm_up_of(const bench_options& options) noexcept {
  return 2 * std::uint64_t{options.concurrency};
}

std::uint32_t blocks_per_request(const bench_options& options) noexcept {
  if (options.blocks != 0) return options.blocks;
  return (options.tokens + options.block_tokens - 1) / options.block_tokens;
}

result<config::deployment> bench_deployment(const bench_options& options) {
  config::deployment made;
  made.cluster = "bench";
  made.supervisor.port = 0;
  made.model = config::model_config{};
  made.model->layers = options.layers;
  made.model->kv_heads = options.kv_heads;
  made.model->head_dim = options.head_dim;
  made.model->dtype = options.dtype;
  made.model->block_tokens = options.block_tokens;
  const auto block = config::bytes_per_block(*made.model, 1);
  const auto count = std::uint64_t{blocks_per_request(options)} * options.concurrency;
  constexpr std::uint64_t most = std::uint64_t{1} << 50;
  if (block == 0 || count == 0 || block > most / count)
    return fail(errc::invalid_config,
                "requests of this geometry are too large for any memory; ask "
                "for fewer --tokens, --layers or --concurrency");
  const auto pool = block * count;
  made.stages = {stage_of("prefill", config::role::prefill, options, pool),
                 stage_of("decode", config::role::decode, options, pool)};
  const auto mode = transfer_mode_of(options.mode);
  if (!mode)
    return fail(errc::invalid_config, "--mode must be write or read, found " + options.mode);
  made.edges = {{"prefill", "decode", mode}};
  made.limits.max_operations = 1'048'576;
  // Parsed again, so that the deployment passes every check.
  auto checked = config::parse(config::print(made), "bench");
  if (!checked.value) return fail(errc::invalid_config, config::to_string(checked.issues));
  return *checked.value;
}

std::vector<std::string> arguments_of(const bench_options& options) {
  std::vector<std::string> all{"--layers",       std::to_string(options.layers),
                               "--kv-heads",     std::to_string(options.kv_heads),
                               "--head-dim",     std::to_string(options.head_dim),
                               "--dtype",        options.dtype,
                               "--block-tokens", std::to_string(options.block_tokens),
                               "--concurrency",  std::to_string(options.concurrency),
                               "--mode",         options.mode,
                               "--backend",      options.backend,
                               "--lanes",        std::to_string(options.lanes)};
  const auto add = [&](const char* name, std::uint64_t value) {
    if (value != 0) all.insert(all.end(), {name, std::to_string(value)});
  };
  add("--blocks", options.blocks);
  if (options.blocks == 0) add("--tokens", options.tokens);
  add("--requests", options.requests);
  if (options.polling) all.emplace_back("--polling");
  if (options.contiguous) all.emplace_back("--contiguous");
  if (options.verify) all.emplace_back("--verify");
  return all;
}

std::string bench_request(std::uint64_t index) {
  return "bench-" + std::to_string(index);
}

std::string bench_round(std::uint64_t round) {
  return "bench-pattern-" + std::to_string(round);
}

}  // namespace troupe::deploy::cli
