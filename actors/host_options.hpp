#pragma once

#include "troupe/actors/actor_host_options.hpp"
#include "troupe/config/deployment.hpp"
#include "troupe/kvcache/result.hpp"

namespace troupe::actors {

/// How the processes of a deployment know each other. Makes the user's own secret of the cluster
/// (`door_user_secret.hpp`) where the deployment names no other and it is not there yet. `invalid_config`
/// where that cannot be; and naming the host where one is open to other machines and the mode is not
/// `tls`, also for a deployment that no file was parsed for. The credentials themselves are read when a
/// host is made of it.
[[nodiscard]] result<door_security> door_security_of(const config::deployment& deployment);

/// What every process of a deployment, supervisor or node, makes its host with. Errors as above.
[[nodiscard]] result<actor_host_options> host_options_of(const config::deployment& deployment);

}  // namespace troupe::actors
