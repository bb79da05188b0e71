#include "troupe/actors/host_options.hpp"

#include <string>
#include <utility>

#include "troupe/actors/secrets/door_user_secret.hpp"
#include "troupe/config/automatic_host.hpp"
#include "troupe/config/hosts.hpp"

namespace troupe::actors {

namespace {

door_security::mode mode_of(config::security_mode mode) noexcept {
  switch (mode) {
    case config::security_mode::none: return door_security::mode::open;
    case config::security_mode::secret: return door_security::mode::secret;
    case config::security_mode::tls: return door_security::mode::tls;
  }
  return door_security::mode::tls;
}

result<void> refuse_open(const std::string& key, const std::string& host,
                         config::security_mode mode) {
  // `auto` resolves by the supervisor's host; the door checks the resulting address.
  if (config::is_loopback(host) || config::is_automatic(host)) return {};
  return fail(errc::invalid_config,
              key + " is " + host + ", which other machines can reach, and security.mode is " +
                  std::string{to_string(mode)} +
                  ": anyone there could take the node over; set security.mode: tls (`troupe certs "
                  "init DIR` makes what it needs), or a loopback address such as 127.0.0.1");
}

}  // namespace

result<door_security> door_security_of(const config::deployment& deployment) {
  const auto& from = deployment.security;
  if (from.mode != config::security_mode::tls) {
    if (auto fine = refuse_open("supervisor.host", deployment.supervisor.host, from.mode); !fine)
      return fail(fine.error());
    for (const auto& stage : deployment.stages) {
      for (const auto& host : stage.hosts) {
        if (auto fine = refuse_open("a host of stage " + stage.name, host, from.mode); !fine)
          return fail(fine.error());
      }
    }
  }
  door_security security{mode_of(from.mode), deployment.cluster, from.secret,
                         from.certificate,   from.key,           from.ca};
  if (from.is_secret_automatic()) {
    auto own = make_user_secret(deployment.cluster);
    if (!own) return fail(own.error());
    security.secret = std::move(*own);
  }
  return security;
}

result<actor_host_options> host_options_of(const config::deployment& deployment) {
  auto security = door_security_of(deployment);
  if (!security) return fail(security.error());
  actor_host_options options;
  options.network_heartbeat = deployment.supervisor.heartbeat_interval;
  // Later than the supervisor's own timeout: it knows whether the cluster was frozen, or the peer.
  options.connection_timeout = 2 * deployment.supervisor.heartbeat_timeout;
  options.security = std::move(*security);
  return options;
}

}  // namespace troupe::actors
