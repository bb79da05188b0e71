#pragma once

/// The secret of a cluster whose file names none: one per user and cluster, made by the first process that
/// needs it and found by all others of that user, in
///
///     STATE/troupe/CLUSTER/secret     STATE: $XDG_STATE_HOME, else ~/.local/state
///
/// The folder of the cluster and the file are open to the user alone. What tells of a supervisor that nobody
/// has to start stands beside it (`supervisor_notice.hpp`).

#include <string>
#include <vector>

#include "troupe/kvcache/result.hpp"

namespace troupe::actors {

/// Where programs of this user keep their state: $XDG_STATE_HOME, else ~/.local/state; empty: nothing says
/// where.
[[nodiscard]] std::string user_state_folder();
/// Where the folder of a cluster is, or will be made, whatever its mode of security is. `invalid_config` as
/// `user_secret_path`.
[[nodiscard]] result<std::string> user_folder_path(const std::string& cluster);
/// Makes that folder if it is not there. `invalid_config`: it cannot be, or others than this user can get at
/// it.
[[nodiscard]] result<void> make_user_folder_at(const std::string& path);
/// Both.
[[nodiscard]] result<std::string> make_user_folder(const std::string& cluster);
/// Where the secret is, or will be made. `invalid_config`: neither variable says where, or `cluster` is no name
/// of a cluster (`config::cluster_name`), which might lead out of the folder.
[[nodiscard]] result<std::string> user_secret_path(const std::string& cluster);
/// The same, and made if it is not there: of processes that start at once one makes it, all have the same.
/// The cluster counts as used now.
/// `invalid_config` also where that cannot be, or where others than this user can get at its folder.
[[nodiscard]] result<std::string> make_user_secret(const std::string& cluster);

struct user_secret {
  std::string cluster;
  std::string path;
};
/// Those that there are, of the cluster that was used last first: at most `most_user_secrets`.
[[nodiscard]] std::vector<user_secret> user_secrets();
/// Fewer than the refusals after which a door takes an address for a hostile one.
inline constexpr std::size_t most_user_secrets = 7;

}  // namespace troupe::actors
