#pragma once

#include <string_view>

#include "troupe/actors/context/node_context.hpp"
#include "troupe/actors/engine.hpp"
#include "troupe/config/deployment.hpp"
#include "troupe/config/resolve.hpp"

namespace troupe::actors {

/// Memory for keyed values of a node that also has blocks. A store gives its whole pool to them.
inline constexpr std::uint64_t default_value_bytes = std::uint64_t{64} << 20;

/// What the deployment says of node `name`, as the actors want it. `not_found` listing the names
/// there are; `invalid_config` for the supervisor, which has no engine; `peer_unreachable` where the
/// host is `auto` and no route leads to the supervisor.
[[nodiscard]] result<node_settings> settings_of(const config::deployment& deployment,
                                                std::string_view name);

/// The same of one that no file names. `invalid_config` for what no supervisor would take in, also where
/// the layout of `options` is of another rank; `not_found` for a stage that is not there or not open.
[[nodiscard]] result<node_settings> settings_to_join(const config::deployment& deployment,
                                                     const engine_options& options);

/// The layout of a stage's pool on one rank: as many blocks as fit beside the state tensors.
/// `invalid_config` without a model or a pool.
[[nodiscard]] result<kvcache::cache_layout> layout_of(const config::deployment& deployment,
                                                      const config::stage_config& stage,
                                                      std::uint32_t rank);

/// How a stage's file says that RDMA devices are used, as the transport wants it.
[[nodiscard]] transport::rdma_options rdma_options_of(const config::transport_config& from);
/// The same of GPUs.
[[nodiscard]] transport::xgmi_options xgmi_options_of(const config::transport_config& from);

/// Gives the context its endpoint, cache, pool and values. The endpoint calls `after_progress`.
[[nodiscard]] result<void> furnish(node_context& context, const config::deployment& deployment,
                                   const engine_options& options,
                                   std::function<void()> after_progress);

}  // namespace troupe::actors
