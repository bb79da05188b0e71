#include "troupe/deploy/cli/backend_text.hpp"

#include "troupe/actors/link/backend_reports.hpp"

namespace troupe::deploy::cli {

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
