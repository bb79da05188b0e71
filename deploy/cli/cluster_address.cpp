#include "troupe/deploy/cli/cluster_address.hpp"

#include <charconv>
#include <filesystem>
#include <iostream>
#include <system_error>

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

std::optional<cluster_address> cluster_at(std::string_view verb, const std::string& where) {
  std::error_code ignored;
  if (!std::filesystem::exists(where, ignored)) {
    if (auto at = address_from(where)) return at;
    std::cerr << "troupe " << verb << ": " << where
              << " is neither a deployment file nor HOST:PORT\n";
    return std::nullopt;
  }
  const auto deployment = load_or_complain(where);
  if (!deployment) return std::nullopt;
  cluster_address at{deployment->supervisor.host, deployment->supervisor.port,
                     config::resolve(*deployment), deployment->cluster};
  if (at.port == 0) {
    std::cerr << "troupe " << verb << ": supervisor.port is 0 in " << where
              << "; give the HOST:PORT that it listens at instead\n";
    return std::nullopt;
  }
  return at;
}

}  // namespace troupe::deploy::cli
