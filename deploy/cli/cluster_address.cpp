#include "troupe/deploy/cli/cluster_address.hpp"

#include <charconv>
#include <filesystem>
#include <iostream>
#include <system_error>
#include <utility>

#include "troupe/actors/host_options.hpp"
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

}  // namespace

std::string cluster_address::text() const {
  const bool v6 = host.find(':') != std::string::npos;
  return (v6 ? "[" + host + "]" : host) + ":" + std::to_string(port);
}

actors::cluster_client_options cluster_address::client(std::chrono::milliseconds timeout) const {
  actors::cluster_client_options options;
  options.host = host;
  options.port = port;
  if (timeout.count() != 0) options.timeout = timeout;
  options.actors.security = security;
  return options;
}

error cluster_address::explained(error why) const {
  if (why.code != errc::unauthorized || !cluster.empty()) return why;
  why.message += "; give the deployment's file instead of HOST:PORT, it names the credentials";
  return why;
}

std::optional<cluster_address> cluster_at(std::string_view verb, const std::string& where) {
  std::error_code ignored;
  if (!std::filesystem::exists(where, ignored)) {
    if (auto at = address_from(where)) {
      if (config::is_loopback(at->host)) return at;
      std::cerr << "troupe " << verb << ": " << where
                << " is on another machine, which proves itself with security.mode: tls; give the "
                   "deployment's file instead of HOST:PORT, it names the credentials\n";
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
  if (at.port == 0) {
    std::cerr << "troupe " << verb << ": supervisor.port is 0 in " << where
              << "; give the HOST:PORT that it listens at instead\n";
    return std::nullopt;
  }
  return at;
}

}  // namespace troupe::deploy::cli
