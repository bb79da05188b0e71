#include "troupe/deploy/cli/cluster_address.hpp"

#include <charconv>
#include <filesystem>
#include <future>
#include <iostream>
#include <memory>
#include <system_error>
#include <utility>

#include <unistd.h>

#include "troupe/actors/base/phrases.hpp"
#include "troupe/actors/door/door.hpp"
#include "troupe/actors/host_options.hpp"
#include "troupe/actors/secrets/door_user_secret.hpp"
#include "troupe/actors/supervisor_begin.hpp"
#include "troupe/config/hosts.hpp"
#include "troupe/deploy/cli/deployment_file.hpp"

namespace troupe::deploy::cli {

namespace {

/// HOST:PORT or [HOST]:PORT.
std::optional<cluster_address> address_from(const std::string& text) {
  const auto colon = text.rfind(':');
  if (colon == std::string::npos || colon == 0) return std::nullopt;
  cluster_address at;
  at.host = text.substr(0, colon);
  if (at.host.size() > 2 && at.host.front() == '[' && at.host.back() == ']')
    at.host = at.host.substr(1, at.host.size() - 2);
  const char* end = text.data() + text.size();
  const auto read = std::from_chars(text.data() + colon + 1, end, at.port);
  if (read.ec != std::errc{} || read.ptr != end || at.port == 0) return std::nullopt;
  return config::is_host(at.host) ? std::optional{at} : std::nullopt;
}

/// Why the listener there refuses these credentials; empty if it accepts them.
std::optional<errc> refusal_of(const cluster_address& at, const actors::door_security& security) {
  actors::door_options options;
  options.security = security;
  auto door = actors::door::create(std::move(options));
  if (!door) return door.error().code;
  const auto told = std::make_shared<std::promise<std::optional<errc>>>();
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds{3};
  (*door)->connect(at.host, at.port, until, [told](result<actors::door_socket> how) {
    if (how) ::close(*how);
    told->set_value(how ? std::nullopt : std::optional{how.error().code});
  });
  return told->get_future().get();
}

/// An address does not name its cluster: it is the one that accepts one of this user's secrets, or
/// one that needs none.
void find_secret(cluster_address& at) {
  actors::door_security security;
  security.how = actors::door_security::mode::secret;
  for (auto& [cluster, secret] : actors::user_secrets()) {
    security.secret = std::move(secret);
    const auto refused = refusal_of(at, security);
    if (refused && (*refused == errc::unauthorized || *refused == errc::invalid_config)) {
      at.tried.push_back(std::move(cluster));
      continue;
    }
    at.security = std::move(security);  // also if nothing answers yet: a guess
    return;
  }
}

}  // namespace

std::string cluster_address::text() const {
  return actors::address_text(host, port);
}

actors::cluster_client_options cluster_address::client(std::chrono::milliseconds timeout) const {
  actors::cluster_client_options options;
  options.host = host;
  options.port = port;
  if (timeout.count() != 0) options.timeout = timeout;
  options.actors.security = security;
  options.find = find;
  return options;
}

error cluster_address::explained(error why) const {
  if (why.code != errc::unauthorized || !cluster.empty()) return why;
  std::string names;
  for (const auto& one : tried) names += (names.empty() ? "" : ", ") + one;
  if (!names.empty()) {
    why.message +=
        "; tried: no secret, and the secrets of the clusters that this user used last (" + names +
        ")";
  }
  why.message += "; give the deployment's file instead of HOST:PORT, as it names the credentials";
  return why;
}

std::optional<cluster_address> cluster_at(std::string_view verb, const std::string& where) {
  std::error_code ignored;
  if (!std::filesystem::exists(where, ignored)) {
    if (auto at = address_from(where)) {
      if (config::is_loopback(at->host)) {
        find_secret(*at);
        return at;
      }
      std::cerr << "troupe " << verb << ": " << where
                << " is on another machine, which has to prove itself with security.mode: tls; "
                   "give the deployment's file instead of HOST:PORT, as it names the credentials\n";
      return std::nullopt;
    }
    std::cerr << "troupe " << verb << ": " << where
              << " is neither a deployment file nor HOST:PORT\n";
    return std::nullopt;
  }
  const auto deployment = load_or_complain(where);
  if (!deployment) return std::nullopt;
  auto security = actors::door_security_of(*deployment);
  if (!security) {
    std::cerr << "troupe " << verb << ": " << to_string(security.error()) << "\n";
    return std::nullopt;
  }
  cluster_address at{deployment->supervisor.host, deployment->supervisor.port,
                     config::resolve(*deployment), deployment->cluster, std::move(*security)};
  for (const auto& stage : deployment->stages)
    if (stage.open) at.open_stages.push_back(stage.name);
  at.find = actors::look_for_supervisor(*deployment, actors::missing_supervisor::is_an_error);
  if (at.find) {
    // If there is none now, the later connection says so: it may be begun meanwhile.
    if (auto found = actors::find_supervisor(*deployment)) {
      at.host = std::move(found->host);
      at.port = found->port;
    }
  } else if (at.port == 0) {
    std::cerr << "troupe " << verb << ": supervisor.port is 0 in " << where
              << "; give the HOST:PORT at which the supervisor listens instead\n";
    return std::nullopt;
  }
  return at;
}

}  // namespace troupe::deploy::cli
