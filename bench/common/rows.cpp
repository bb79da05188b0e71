#include "rows.hpp"

#include <cstddef>
#include <cstdio>

namespace troupe::bench {

std::string to_json(const row& r) {
  char text[512];
  std::snprintf(text, sizeof text,
                "{\"name\": \"%s\", \"ours\": %.3f, \"rival\": %.3f, \"ratio\": %.3f, \"unit\": "
                "\"%s\", \"wanted\": %s, \"better\": \"%s\"}",
                r.name.c_str(), r.ours, r.rival, r.ours / r.rival, r.unit,
                r.wanted ? std::to_string(*r.wanted).c_str() : "null",
                r.lower_is_better ? "lower" : "higher");
  return text;
}

void print(const std::vector<row>& rows) {
  std::vector<std::string> texts;
  for (const auto& r : rows) texts.push_back(to_json(r));
  print(texts);
}

void print(const std::vector<std::string>& rows) {
  std::printf("[\n");
  for (std::size_t i = 0; i < rows.size(); ++i) {
    std::printf("  %s%s\n", rows[i].c_str(), i + 1 < rows.size() ? "," : "");
  }
  std::printf("]\n");
}

}  // namespace troupe::bench
