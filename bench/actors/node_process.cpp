#include "node_process.hpp"

#include <cstdlib>
#include <utility>

#include "troupe/actors/logging.hpp"
#include "troupe/config/parse.hpp"

#include "processes.hpp"

namespace troupe::bench {

config::deployment parsed(const std::string& text) {
  auto outcome = config::parse(text, "bench.yaml");
  if (!outcome.value) {
    std::string why;
    for (const auto& issue : outcome.issues) why += config::to_string(issue) + "; ";
    die(why);
  }
  return std::move(*outcome.value);
}

void init_log(const std::string& name, const char* level) {
  const char* named = std::getenv("TROUPE_BENCH_LOG");
  need(actors::init_logging({named != nullptr ? named : level, name, {}, 64u << 20, 3}), "log");
}

}  // namespace troupe::bench
