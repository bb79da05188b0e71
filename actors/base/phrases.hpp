#pragma once

/// How counts, times and names are written in messages for people.

#include <array>
#include <chrono>
#include <cinttypes>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

namespace troupe::actors {

/// "1 transfer", "3 transfers".
[[nodiscard]] inline std::string count_of(std::uint64_t n, std::string_view what) {
  return std::to_string(n) + " " + std::string{what} + (n == 1 ? "" : "s");
}

/// "5 s", "1500 ms".
[[nodiscard]] inline std::string time_text(std::chrono::milliseconds time) {
  const auto ms = time.count();
  return ms % 1000 == 0 ? std::to_string(ms / 1000) + " s" : std::to_string(ms) + " ms";
}

/// "a, b", at most eight names; "none" if there are none.
template <class Names>
[[nodiscard]] std::string list_of(const Names& names) {
  constexpr std::size_t most = 8;
  std::string list;
  std::size_t count = 0;
  for (const auto& name : names) {
    if (count == most) return list + ", ...";
    list += (count++ == 0 ? "" : ", ") + name;
  }
  return list.empty() ? "none" : list;
}

/// A host as written before a port: "127.0.0.1", "[::1]".
[[nodiscard]] inline std::string host_text(const std::string& host) {
  return host.find(':') == std::string::npos ? host : '[' + host + ']';
}

/// "127.0.0.1:7400", "[::1]:7400"; for an unknown port (0), only the host.
[[nodiscard]] inline std::string address_text(const std::string& host, std::uint16_t port) {
  auto text = host_text(host);
  if (port != 0) text.append(1, ':').append(std::to_string(port));
  return text;
}

/// An incarnation: "00c0ffee00c0ffee".
[[nodiscard]] inline std::string life_text(std::uint64_t incarnation) {
  std::array<char, 17> digits{};
  std::snprintf(digits.data(), digits.size(), "%016" PRIx64, incarnation);
  return digits.data();
}

/// A stranger's string made safe for messages: printable, cut to `limit` characters.
[[nodiscard]] inline std::string printable(std::string_view text, std::size_t limit) {
  std::string out;
  for (char c : text.substr(0, limit)) out += (c >= ' ' && c <= '~' && c != '\'') ? c : '?';
  if (text.size() > limit) out += "...";
  return out;
}
/// Same, cut to 64 characters, in quotation marks.
[[nodiscard]] inline std::string in_quotes(std::string_view text) {
  return '\'' + printable(text, 64) + '\'';
}

/// Two digits per byte.
template <class Bytes>
[[nodiscard]] std::string hex_text(const Bytes& of) {
  constexpr std::string_view digits = "0123456789abcdef";
  std::string text;
  for (const auto byte : of) {
    const auto value = static_cast<std::uint8_t>(byte);
    text += digits[value >> 4U];
    text += digits[value & 15U];
  }
  return text;
}

}  // namespace troupe::actors
