#pragma once

#include <string_view>

#include "troupe/actors/context/node_context.hpp"
#include "troupe/actors/engine.hpp"
#include "troupe/config/deployment.hpp"
#include "troupe/config/resolve.hpp"

namespace troupe::actors {

/// Memory for keyed values of a node that also has blocks. A store gives its whole pool to values.
inline constexpr std::uint64_t default_value_bytes = std::uint64_t{64} << 20;

/// The settings of node `name`, from the deployment. `not_found` listing the existing names;
/// `invalid_config` for the supervisor, which has no engine; `peer_unreachable` if the host is
/// `auto` and no route leads to the supervisor.
[[nodiscard]] result<node_settings> settings_of(const config::deployment& deployment,
                                                std::string_view name);

/// Same, for a node that no file names. `invalid_config` for what no supervisor would admit, also
/// if the layout of `options` is of another rank; `not_found` for a stage that does not exist or is
/// not open.
[[nodiscard]] result<node_settings> settings_to_join(const config::deployment& deployment,
                                                     const engine_options& options);

/// The layout of a stage's pool on one rank: as many blocks as fit beside the state tensors.
/// `invalid_config` without a model or a pool.
[[nodiscard]] result<kvcache::cache_layout> layout_of(const config::deployment& deployment,
                                                      const config::stage_config& stage,
                                                      std::uint32_t rank);

/// The RDMA settings of a stage, for the transport.
[[nodiscard]] transport::rdma_options rdma_options_of(const config::transport_config& from);
/// The GPU settings, likewise.
[[nodiscard]] transport::xgmi_options xgmi_options_of(const config::transport_config& from);

/// Gives the context its endpoint, cache, pool and values. The endpoint calls `after_progress`.
[[nodiscard]] result<void> furnish(node_context& context, const config::deployment& deployment,
                                   const engine_options& options,
                                   std::function<void()> after_progress);

}  // namespace troupe::actors
