#pragma once

#include "troupe/transport/endpoint.hpp"
#include "troupe/transport/progress_engine.hpp"
#include "troupe/transport/region_table.hpp"
#include "troupe/transport/types.hpp"

namespace troupe::transport {

/// The parts of an endpoint that its backends use. Outlives every backend and link of the endpoint.
/// A closed link no longer touches the context, so a `shared_ptr` to such a link may outlive the
/// endpoint.
struct backend_context {
  const endpoint_options& options;
  const host_identity& identity;
  region_table& regions;
  progress_pool& progress;
};

}  // namespace troupe::transport
