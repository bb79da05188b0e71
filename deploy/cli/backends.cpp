#include "troupe/deploy/cli/backends.hpp"

#include "troupe/actors/link/backend_reports.hpp"
#include "troupe/actors/runtime/system.hpp"
#include "troupe/transport/endpoint.hpp"

namespace troupe::deploy::cli {

result<std::vector<actors::backend_report>> backends_here() {
  transport::endpoint_options options;
  options.self = incarnation{actors::draw_incarnation()};
  options.num_workers = 0;
  const auto endpoint = transport::endpoint::create(options);
  if (!endpoint) return fail(endpoint.error());
  return actors::backend_reports(**endpoint);
}

std::string verdict_text(const actors::backend_report& backend) {
  std::string text = backend.usable != 0 ? "usable" : "not usable";
  if (!backend.reason.empty()) text += ": " + backend.reason;
  return text;
}

std::string usable_text(const std::vector<actors::backend_report>& backends) {
  std::string text;
  for (const auto& one : backends) {
    if (one.usable != 0) text += (text.empty() ? "" : ", ") + one.name;
  }
  return text.empty() ? "none" : text;
}

std::string unusable_text(const std::vector<actors::backend_report>& backends) {
  std::string text;
  for (const auto& one : backends) {
    if (one.usable != 0) continue;
    text += (text.empty() ? "" : "; ") + one.name + ": ";
    text += actors::without_advice(one.reason);
  }
  return text;
}

}  // namespace troupe::deploy::cli
