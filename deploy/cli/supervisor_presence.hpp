#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>

namespace troupe::deploy::cli {

/// Local wall-clock time as in log lines: "2026-11-21T13:59:07.803".
[[nodiscard]] std::string time_text(std::uint64_t unix_ms);
[[nodiscard]] std::uint64_t unix_ms_now();

/// Reports on standard error, once each, that the supervisor does not answer and that it answers
/// again.
class supervisor_presence {
 public:
  /// `address` returns the supervisor's current address; the next supervisor may be elsewhere.
  supervisor_presence(std::string verb, std::function<std::string()> address)
      : verb_{std::move(verb)}, address_{std::move(address)} {}
  void away(const std::string& why);
  void here();
  void restarted(std::uint64_t incarnation, const std::string& what_follows) const;

 private:
  std::string verb_;
  std::function<std::string()> address_;
  bool away_{false};
};

}  // namespace troupe::deploy::cli
