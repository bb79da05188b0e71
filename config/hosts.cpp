#include "troupe/config/hosts.hpp"

#include <algorithm>
#include <array>
#include <cctype>
#include <memory>

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

namespace troupe::config {
namespace {

bool parse_v4(std::string_view text, in_addr& address) {
  return inet_pton(AF_INET, std::string{text}.c_str(), &address) == 1;
}

bool parse_v6(std::string_view text, in6_addr& address) {
  return inet_pton(AF_INET6, std::string{text}.c_str(), &address) == 1;
}

std::string format_v6(const in6_addr& address) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  return inet_ntop(AF_INET6, &address, text.data(), text.size()) != nullptr ? text.data() : "";
}

bool is_label(std::string_view label) {
  return !label.empty() && label.size() <= 63 && label.front() != '-' && label.back() != '-' &&
         std::all_of(label.begin(), label.end(),
                     [](unsigned char c) { return c < 128 && (std::isalnum(c) != 0 || c == '-'); });
}

bool is_host_name(std::string_view text) {
  if (text.empty() || text.size() > 253) return false;
  while (true) {
    const auto dot = text.find('.');
    const auto label = text.substr(0, dot);
    if (!is_label(label)) return false;
    if (dot == std::string_view::npos) {
      // A last label of digits is a mistyped address, such as 127.0.0.256.
      return !std::all_of(label.begin(), label.end(), [](char c) { return c >= '0' && c <= '9'; });
    }
    text.remove_prefix(dot + 1);
  }
}

std::string lower(std::string_view text) {
  std::string result{text};
  for (char& c : result) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return result;
}

}  // namespace

bool is_host(std::string_view text) {
  in_addr v4{};
  in6_addr v6{};
  return parse_v4(text, v4) || parse_v6(text, v6) || is_host_name(text);
}

bool is_loopback(std::string_view host) {
  in_addr v4{};
  if (parse_v4(host, v4)) return (ntohl(v4.s_addr) >> 24U) == 127;
  in6_addr v6{};
  if (parse_v6(host, v6)) return format_v6(v6) == "::1";
  return lower(host) == "localhost";
}

bool is_wildcard(std::string_view host) {
  in_addr v4{};
  if (parse_v4(host, v4)) return v4.s_addr == 0;
  in6_addr v6{};
  return parse_v6(host, v6) && format_v6(v6) == "::";
}

std::string canonical_host(std::string_view host) {
  in6_addr v6{};
  if (parse_v6(host, v6)) return format_v6(v6);
  const std::string name = lower(host);
  return name == "localhost" ? "127.0.0.1" : name;
}

std::set<std::string> this_host() {
  std::set<std::string> found;
  std::array<char, 256> name{};
  if (gethostname(name.data(), name.size() - 1) == 0) found.insert(canonical_host(name.data()));

  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return found;
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner{list, &freeifaddrs};
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr) continue;
    std::array<char, INET6_ADDRSTRLEN> text{};
    const void* address = nullptr;
    if (entry->ifa_addr->sa_family == AF_INET) {
      address = &reinterpret_cast<const sockaddr_in*>(entry->ifa_addr)->sin_addr;
    } else if (entry->ifa_addr->sa_family == AF_INET6) {
      address = &reinterpret_cast<const sockaddr_in6*>(entry->ifa_addr)->sin6_addr;
    } else {
      continue;
    }
    if (inet_ntop(entry->ifa_addr->sa_family, address, text.data(), text.size()) != nullptr) {
      found.insert(canonical_host(text.data()));
    }
  }
  return found;
}

}  // namespace troupe::config
