#pragma once

/// Who a node is. Used in cluster messages and by engines.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "troupe/kvcache/layout_fingerprint.hpp"

namespace troupe::actors {

enum class node_role : std::uint8_t { supervisor = 1, prefill, decode, store, both };
enum class node_state : std::uint8_t { joining = 1, up, suspect, down, leaving };
[[nodiscard]] std::string_view to_string(node_role role) noexcept;
[[nodiscard]] std::string_view to_string(node_state state) noexcept;
[[nodiscard]] std::optional<node_role> node_role_from(std::uint8_t number) noexcept;
[[nodiscard]] std::optional<node_state> node_state_from(std::uint8_t number) noexcept;

/// A name by which the outside of Troupe knows a node of an open stage: an engine's id, the address
/// of its HTTP server. Only `cluster_client::find_label` looks at it.
struct node_label {
  std::string key;
  std::string value;
  friend bool operator==(const node_label&, const node_label&) = default;
};
inline constexpr std::size_t max_labels = 16;
inline constexpr std::size_t max_label_key = 64;      ///< bytes, at least 1
inline constexpr std::size_t max_label_value = 256;   ///< bytes
inline constexpr std::size_t max_label_bytes = 1024;  ///< of all keys and values of a node

/// Who a node is and where it can be reached.
struct node_info {
  std::string name;  ///< of the deployment, e.g. `decode-1-0`, or of an open stage, `engines.a.0`
  std::string stage;
  std::uint8_t role{0};      ///< `node_role`
  std::uint32_t replica{0};  ///< assigned by the supervisor; meaningless before
  /// Within the replica, and how many ranks the replica has: P * T for P parts of T tensor-parallel
  /// ranks, where tensor-parallel rank t of part p is p * T + t.
  std::uint32_t rank{0};
  std::uint32_t ranks{1};
  std::string host;
  std::uint16_t port{0};  ///< the cluster port actually bound
  std::uint64_t incarnation{0};
  std::uint32_t pid{0};
  /// Where its process runs, as in `transport::host_identity`: tells a dialler in advance which
  /// backends work within one host only. Empty: unknown.
  std::string boot_id{};
  std::uint64_t network_namespace{0};
  std::uint64_t pid_namespace{0};
  std::uint64_t user_namespace{0};
  std::uint32_t uid{0};
  // Of nodes of open stages only:
  std::string replica_name{};                 ///< the engine's own id, the same for all its ranks
  kvcache::layout_fingerprint fingerprint{};  ///< of its layout; all zero: not stated, fits any
  std::vector<node_label> labels{};
};
/// What is wrong with the labels of a node. Empty if nothing is.
[[nodiscard]] std::optional<std::string> wrong_labels(const std::vector<node_label>& labels);
/// Whether `text` is valid as `node_info::boot_id`: empty, or hex digits and dashes.
[[nodiscard]] bool is_boot_id(std::string_view text) noexcept;

// -- inspection

template <class I>
auto inspect(I& f, node_label& x) {
  return f(x.key, x.value);
}
template <class I>
auto inspect(I& f, node_info& x) {
  return f(x.name, x.stage, x.role, x.replica, x.rank, x.ranks, x.host, x.port, x.incarnation,
           x.pid, x.boot_id, x.network_namespace, x.pid_namespace, x.user_namespace, x.uid,
           x.replica_name, x.fingerprint, x.labels);
}

}  // namespace troupe::actors
