#pragma once

#include "troupe/actors/actor_host_options.hpp"
#include "troupe/config/deployment.hpp"
#include "troupe/kvcache/result.hpp"

namespace troupe::actors {

/// How the processes of a deployment authenticate each other. Makes the user's own secret of the
/// cluster (`door_user_secret.hpp`) if the deployment names no other and it does not exist yet.
/// `invalid_config` if it cannot be made; and, naming the host, if a host is open to other machines
/// and the mode is not `tls`, even for a deployment that was not parsed from a file. The
/// credentials themselves are read when a host is made from the result.
[[nodiscard]] result<door_security> door_security_of(const config::deployment& deployment);

/// The host options of every process of a deployment, supervisor or node. Errors as above.
[[nodiscard]] result<actor_host_options> host_options_of(const config::deployment& deployment);

}  // namespace troupe::actors
