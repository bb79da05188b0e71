#include "troupe/deploy/cli/backends_here.hpp"

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

}  // namespace troupe::deploy::cli
