/// One node in a process of its own, for the tests: a reduced `troupe node`, with caches that no
/// deployment file can describe.
///
///     reference_node node FILE --name NAME [--cache per_layer|hybrid]

#include <csignal>
#include <iostream>
#include <memory>
#include <optional>
#include <string>

#include "troupe/actors/host_options.hpp"
#include "troupe/actors/runtime/system.hpp"
#include "troupe/actors/supervisor/supervisor.hpp"
#include "troupe/config/parse.hpp"
#include "troupe/config/resolve.hpp"
#include "troupe/deploy/reference_engine/reference_engine.hpp"

#include "cache_fixture.hpp"

namespace troupe::reference {
namespace {

int fail_with(const error& why) {
  std::cerr << to_string(why) << "\n";
  return 1;
}

int run_supervisor(const config::deployment& deployment, const sigset_t& signals) {
  auto options = actors::host_options_of(deployment);
  if (!options) return fail_with(options.error());
  actors::actor_host host{std::move(*options)};
  const auto supervisor =
      actors::spawn_supervisor(host.system(), actors::supervisor_options_from(deployment));
  const auto port =
      host.publish(supervisor, deployment.supervisor.host, deployment.supervisor.port);
  if (!port) return fail_with(port.error());
  int signal = 0;
  ::sigwait(&signals, &signal);
  return host.shutdown() ? 0 : 1;
}

/// The engine's own memory, which prefill and decode nodes arrange differently.
std::optional<kvcache::cache_layout> own_cache(const std::string& kind, config::role role) {
  const bool prefill = role == config::role::prefill;
  if (kind == "per_layer")
    return layout_of(
        tiny_attention(),
        {.inner = prefill ? kvcache::block_inner::head_major : kvcache::block_inner::token_major,
         .regions = kvcache::region_use::per_layer},
        "bf16");
  if (kind == "hybrid")
    return layout_of(tiny_hybrid(),
                     {.order = prefill ? kvcache::block_order::block_interleaved
                                       : kvcache::block_order::layers_first},
                     "bf16");
  return std::nullopt;
}

int run(int argc, char** argv) {
  const std::string file = argc > 2 ? argv[2] : "";
  const std::string name = argc > 4 ? argv[4] : "";
  const std::string cache = argc > 6 ? argv[6] : "";
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  ::pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  const auto parsed = config::load(file);
  if (!parsed.value) return fail_with({errc::invalid_config, config::to_string(parsed.issues)});
  if (name == "supervisor") return run_supervisor(*parsed.value, signals);
  const auto nodes = config::resolve(*parsed.value);
  const auto* self = config::find_node(nodes, name);
  if (self == nullptr) return fail_with({errc::not_found, name});
  reference_options options;
  options.layout = own_cache(cache, self->role);
  options.model_seed = cache == "hybrid" ? tiny_hybrid().seed : tiny_attention().seed;
  auto engine = reference_engine::start(*parsed.value, name, options);
  if (!engine) return fail_with(engine.error());
  int signal = 0;
  ::sigwait(&signals, &signal);
  (*engine)->stop();
  return 0;
}

}  // namespace
}  // namespace troupe::reference

int main(int argc, char** argv) {
  return troupe::reference::run(argc, argv);
}
