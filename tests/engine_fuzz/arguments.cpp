#include "arguments.hpp"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <limits>
#include <optional>
#include <string_view>

#include "troupe/actors/link/backend_reports.hpp"
#include "troupe/actors/runtime/system.hpp"
#include "troupe/transport/endpoint.hpp"
#include "troupe/transport/xgmi/gpu_site.hpp"

#include "gpu_double.hpp"
#include "memory_reach.hpp"

namespace troupe::engine_fuzz {

namespace {

std::optional<std::uint64_t> number_in(std::string_view text) {
  std::uint64_t number = 0;
  const auto* end = text.data() + text.size();
  const auto read = std::from_chars(text.data(), end, number);
  if (text.empty() || read.ec != std::errc{} || read.ptr != end) return std::nullopt;
  return number;
}

std::optional<seed_range> range_in(std::string_view text) {
  const auto dots = text.find("..");
  const auto first = number_in(text.substr(0, dots));
  const auto last = dots == std::string_view::npos ? first : number_in(text.substr(dots + 2));
  if (!first || !last || *first > *last) return std::nullopt;
  return seed_range{*first, *last};
}

result<std::vector<seed_range>> seeds_in(std::string_view text) {
  std::vector<seed_range> all;
  for (;;) {
    const auto comma = text.find(',');
    const auto range = range_in(text.substr(0, comma));
    if (!range) {
      return fail(errc::invalid_config,
                  "--seeds takes numbers and ranges, such as 1,5,9..12, not `" +
                      std::string{text.substr(0, comma)} + "`");
    }
    all.push_back(*range);
    if (comma == std::string_view::npos) return all;
    text.remove_prefix(comma + 1);
  }
}

/// Every backend by name, with the reason why this machine does not have it; empty if it does.
result<std::vector<std::pair<std::string, std::string>>> backends_here() {
  transport::endpoint_options options;
  options.self = incarnation{actors::draw_incarnation()};
  options.num_workers = 0;
  options.xgmi.site = transport::xgmi::double_site();
  const auto endpoint = transport::endpoint::create(options);
  if (!endpoint) return fail(endpoint.error());
  std::vector<std::pair<std::string, std::string>> all;
  for (const auto& one : actors::backend_reports(**endpoint))
    all.emplace_back(one.name, one.usable != 0 ? "" : one.reason);
  // With these alone, the engine's own memory moves only where processes reach each other's memory.
  const auto why = testing::why_memory_is_out_of_reach();
  for (auto& [name, reason] : all)
    if ((name == "shm" || name == "xgmi") && reason.empty()) reason = why.value_or("");
  return all;
}

/// The backends to draw from: the named one, or all that this machine has.
result<std::vector<std::string>> backends_of(const std::string& named) {
  if (named == "auto") return std::vector<std::string>{named};
  const auto here = backends_here();
  if (!here) return fail(here.error());
  std::vector<std::string> usable{"auto"};
  for (const auto& [name, reason] : *here) {
    if (reason.empty()) usable.push_back(name);
    if (name != named) continue;
    if (reason.empty()) return std::vector<std::string>{named};
    return fail(errc::backend_unavailable, "--backend " + named + ": " + reason);
  }
  if (named.empty()) return usable;
  return fail(errc::invalid_config,
              "--backend is one of auto, shm, tcp, rdma, xgmi, not `" + named + "`");
}

}  // namespace

result<arguments> read_arguments(const std::vector<std::string>& words) {
  arguments a;
  std::string backend;
  std::optional<std::uint64_t> from;
  for (std::size_t i = 0; i < words.size(); ++i) {
    const auto& word = words[i];
    if (word == "--draw") {
      a.draws_only = a.tells = true;
      continue;
    }
    if (i + 1 == words.size()) return fail(errc::invalid_config, word + " needs a value");
    const auto& value = words[++i];
    const auto number = number_in(value);
    if (word == "--seed" && number) {
      a.seeds = {{*number, *number}};
      a.tells = true;
    } else if (word == "--seeds") {
      auto seeds = seeds_in(value);
      if (!seeds) return fail(seeds.error());
      a.seeds = std::move(*seeds);
    } else if (word == "--minutes" && std::atof(value.c_str()) > 0) {
      a.budget = std::chrono::seconds{static_cast<long>(std::atof(value.c_str()) * 60)};
    } else if (word == "--from" && number) {
      from = number;
    } else if (word == "--backend") {
      backend = value;
    } else {
      return fail(errc::invalid_config, word + " " + value + " is not understood");
    }
  }
  if (a.seeds.empty() && a.budget.count() == 0)
    return fail(errc::invalid_config, "name seeds, or minutes");
  if (a.seeds.empty()) a.seeds = {{from.value_or(1), std::numeric_limits<std::uint64_t>::max()}};
  auto backends = backends_of(backend);
  if (!backends) return fail(backends.error());
  a.backends = std::move(*backends);
  return a;
}

}  // namespace troupe::engine_fuzz
