#include "troupe/actors/link/backend_reports.hpp"

#include <string>

namespace troupe::actors {

std::vector<backend_report> backend_reports(const transport::endpoint& endpoint) {
  std::vector<backend_report> all;
  for (auto& one : endpoint.backends()) {
    all.push_back({std::string{transport::to_string(one.kind)},
                   static_cast<std::uint8_t>(one.state.usable ? 1 : 0),
                   std::move(one.state.reason)});
  }
  return all;
}

std::string_view without_advice(std::string_view reason) noexcept {
  return reason.substr(0, reason.find(';'));
}

}  // namespace troupe::actors
