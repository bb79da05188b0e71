#include "troupe/deploy/cli/supervisor_presence.hpp"

#include <chrono>
#include <ctime>
#include <iostream>

#include <spdlog/fmt/fmt.h>

#include "troupe/deploy/cli/text_table.hpp"

namespace troupe::deploy::cli {

std::string time_text(std::uint64_t unix_ms) {
  // A value from the network may not be a valid time.
  constexpr std::uint64_t last = 253'402'300'799'999;  // of the year 9999
  const auto seconds = static_cast<std::time_t>(unix_ms / 1000);
  std::tm parts{};
  if (unix_ms > last || ::localtime_r(&seconds, &parts) == nullptr) return "-";
  return fmt::format("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}.{:03}", parts.tm_year + 1900,
                     parts.tm_mon + 1, parts.tm_mday, parts.tm_hour, parts.tm_min, parts.tm_sec,
                     unix_ms % 1000);
}

std::uint64_t unix_ms_now() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::milliseconds>(now).count());
}

void supervisor_presence::away(const std::string& why) {
  if (away_) return;
  away_ = true;
  std::cerr << "troupe " << verb_ << ": the supervisor at " << address_()
            << " does not answer; retrying, Ctrl-C ends: " << printable(why) << std::endl;
}

void supervisor_presence::here() {
  if (!away_) return;
  away_ = false;
  std::cerr << "troupe " << verb_ << ": the supervisor at " << address_() << " answers again"
            << std::endl;
}

void supervisor_presence::restarted(std::uint64_t incarnation,
                                    const std::string& what_follows) const {
  std::cerr << "troupe " << verb_ << ": "
            << fmt::format("the supervisor at {} was restarted (incarnation {:016x}){}", address_(),
                           incarnation, what_follows)
            << std::endl;
}

}  // namespace troupe::deploy::cli
