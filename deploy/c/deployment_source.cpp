#include "troupe/deploy/c/deployment_source.hpp"

#include <utility>

#include "troupe/config/parse.hpp"
#include "troupe/deploy/c/arguments.hpp"

namespace troupe::c {

result<config::deployment> load_deployment(const deployment_source& from) {
  if (!from.file && !from.text)
    return bad_argument("neither `options.deployment_file` nor `options.deployment_text` is given");
  if (from.file && from.text)
    return bad_argument("`options.deployment_file` and `options.deployment_text` are both given");
  const auto port = port_of(from.port, "options.supervisor_port");
  if (!port) return fail(port.error());
  const auto what = from.file ? text(from.file, "options.deployment_file")
                              : text(from.text, "options.deployment_text");
  if (!what) return fail(what.error());
  auto parsed = from.file ? config::load(*what) : config::parse(*what, "deployment");
  if (!parsed.value) return fail(errc::invalid_config, config::to_string(parsed.issues));
  if (from.host) {
    auto host = text(from.host, "options.supervisor_host");
    if (!host) return fail(host.error());
    parsed.value->supervisor.host = std::move(*host);
  }
  if (*port != 0) parsed.value->supervisor.port = *port;
  // A caller that gives the supervisor's address has one and needs no other.
  if (from.host || *port != 0) parsed.value->supervisor.begin = false;
  return std::move(*parsed.value);
}

result<std::uint16_t> port_of(std::uint32_t given, const char* name) {
  if (auto fits = in_range(given, 0, 65'535, name); !fits) return fail(fits.error());
  return static_cast<std::uint16_t>(given);
}

}  // namespace troupe::c
