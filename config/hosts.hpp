#pragma once

#include <set>
#include <string>
#include <string_view>

/// Host names and addresses in the deployment file. Nothing here resolves a name.
namespace troupe::config {

/// Whether it is an IPv4 or IPv6 address (without brackets) or a host name.
[[nodiscard]] bool is_host(std::string_view text);
/// 127.0.0.0/8, ::1 or `localhost`.
[[nodiscard]] bool is_loopback(std::string_view host);
/// 0.0.0.0 or ::, to which nobody can connect.
[[nodiscard]] bool is_wildcard(std::string_view host);
/// One spelling per address: lower case, shortest IPv6 form, 127.0.0.1 for `localhost`.
[[nodiscard]] std::string canonical_host(std::string_view host);

/// The addresses of this machine's interfaces and its host name, in canonical form. Entries that
/// the system does not report are left out.
[[nodiscard]] std::set<std::string> this_host();

}  // namespace troupe::config
