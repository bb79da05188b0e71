#include "troupe/transport/endpoint.hpp"

// The data plane alone, as on a machine without CAF.
int main() {
  troupe::transport::endpoint_options options;
  options.self = troupe::incarnation{1};
  return troupe::transport::endpoint::create(options) ? 0 : 1;
}
