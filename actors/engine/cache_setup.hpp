#pragma once

#include <cstdint>
#include <optional>

#include "troupe/actors/context/node_context.hpp"
#include "troupe/actors/engine.hpp"
#include "troupe/config/deployment.hpp"

namespace troupe::actors {

/// The GPU of a node's pool, by the process's own numbering; empty: host memory.
[[nodiscard]] std::optional<std::uint32_t> gpu_of(const config::stage_config& stage,
                                                  const node_info& node);

/// Gives the context a cache: the engine's layout in its memory or in memory of ours, else the
/// deployment's model in its pool; none without either. The endpoint must exist already.
/// `invalid_config` also if the options contradict each other or the deployment's stage.
[[nodiscard]] result<void> make_cache(node_context& context, const config::deployment& deployment,
                                      const config::stage_config& stage,
                                      const engine_options& options);

}  // namespace troupe::actors
