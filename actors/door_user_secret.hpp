#pragma once

/// The secret of a cluster whose file names none: one per user and cluster, made by the first process that
/// needs it and found by all others of that user, in
///
///     STATE/troupe/CLUSTER/secret     STATE: $XDG_STATE_HOME, else ~/.local/state
///
/// The folder of the cluster and the file are open to the user alone.

#include <string>
#include <vector>

#include "troupe/kvcache/result.hpp"

namespace troupe::actors {

/// Where programs of this user keep their state: $XDG_STATE_HOME, else ~/.local/state; empty: nothing says
/// where.
[[nodiscard]] std::string user_state_folder();
/// Where it is, or will be made. `invalid_config`: neither variable says where, or `cluster` is no name
/// of a cluster (`config::cluster_name`), which might lead out of the folder.
[[nodiscard]] result<std::string> user_secret_path(const std::string& cluster);
/// The same, and made if it is not there: of processes that start at once one makes it, all have the same.
/// `invalid_config` also where that cannot be, or where others than this user can get at its folder.
[[nodiscard]] result<std::string> make_user_secret(const std::string& cluster);
/// Those that there are, the newest first: at most `most_user_secrets`.
[[nodiscard]] std::vector<std::string> user_secrets();
inline constexpr std::size_t most_user_secrets = 16;

}  // namespace troupe::actors
