#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "troupe/config/deployment.hpp"
#include "troupe/config/hosts.hpp"

namespace troupe::config {

/// One process of a deployment.
struct resolved_node {
  /// "supervisor", "decode-0", with tensor parallelism "decode-0-tp1", with parts "decode-0-pp1" and
  /// "decode-0-pp1-tp0"; unique.
  std::string name;
  config::role role{role::supervisor};
  std::string stage;                       ///< empty for the supervisor
  std::optional<std::size_t> stage_index;  ///< into `deployment::stages`; empty for the supervisor
  std::uint32_t replica{0};                ///< the slot; the supervisor assigns the id
  std::uint32_t rank{0};  ///< in the replica: number of the part * tensor_parallel + rank in it
  std::uint32_t tensor_parallel{1};
  std::string host;
  std::uint16_t port{0};  ///< 0: the OS chooses
  engine_kind engine{engine_kind::none};
  bool local{false};  ///< belongs to this host; a node with host `auto` belongs to every host
  std::uint32_t pipeline_parallel{1};

  /// Ranks of its replica.
  [[nodiscard]] std::uint32_t ranks() const noexcept { return pipeline_parallel * tensor_parallel; }
  friend bool operator==(const resolved_node&, const resolved_node&) = default;
};

/// The host of node `replica`, `rank`: its own if there is one host per node, else all ranks of a
/// replica share `hosts[replica mod count]`. Needs a stage with at least one host.
[[nodiscard]] const std::string& host_of(const stage_config& stage, std::uint32_t replica,
                                         std::uint32_t rank) noexcept;

/// The name of a node of a stage. No two nodes of a deployment share one.
[[nodiscard]] std::string node_name(const stage_config& stage, std::uint32_t replica,
                                    std::uint32_t rank);

/// All nodes: the supervisor, then stage by stage, replica by replica, rank by rank. `here` are the
/// addresses of this machine in canonical form; loopback addresses are always local.
[[nodiscard]] std::vector<resolved_node> resolve(const deployment& of,
                                                 const std::set<std::string>& here = this_host());

/// The node of that name, or null. The pointer is into `nodes`.
[[nodiscard]] const resolved_node* find_node(const std::vector<resolved_node>& nodes,
                                             std::string_view name) noexcept;

}  // namespace troupe::config
