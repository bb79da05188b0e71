#include "troupe/deploy/cli/backend_text.hpp"

#include <nlohmann/json.hpp>

#include "troupe/actors/backend_reports.hpp"

namespace troupe::deploy::cli {

nlohmann::json to_json(const std::vector<actors::backend_report>& backends) {
  auto all = nlohmann::json::array();
  for (const auto& one : backends) {
    all.push_back({{"name", one.name}, {"usable", one.usable != 0}, {"reason", one.reason}});
  }
  return all;
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
