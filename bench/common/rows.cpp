#include "rows.hpp"

#include <cstddef>
#include <cstdio>

namespace troupe::bench {

void print(const std::vector<row>& rows) {
  std::printf("[\n");
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto& r = rows[i];
    std::printf(
        "  {\"name\": \"%s\", \"ours\": %.3f, \"rival\": %.3f, \"ratio\": %.3f, \"unit\": \"%s\", "
        "\"wanted\": %s, \"better\": \"%s\"}%s\n",
        r.name.c_str(), r.ours, r.rival, r.ours / r.rival, r.unit,
        r.wanted ? std::to_string(*r.wanted).c_str() : "null",
        r.lower_is_better ? "lower" : "higher", i + 1 < rows.size() ? "," : "");
  }
  std::printf("]\n");
}

}  // namespace troupe::bench
