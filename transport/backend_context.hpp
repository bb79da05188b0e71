#pragma once

#include "troupe/transport/endpoint.hpp"
#include "troupe/transport/progress_engine.hpp"
#include "troupe/transport/region_table.hpp"
#include "troupe/transport/types.hpp"

namespace troupe::transport {

/// What an endpoint lends to its backends. Outlives every backend and link of the endpoint; a link
/// that is closed touches none of it any more, so that a `shared_ptr` to it may survive the
/// endpoint.
struct backend_context {
  const endpoint_options& options;
  const host_identity& identity;
  region_table& regions;
  progress_pool& progress;
};

}  // namespace troupe::transport
