#pragma once

/// The rival of whatever goes over TCP: a socket pair with nothing around it.

#include <utility>

namespace troupe::bench {

/// Two ends of one TCP connection over loopback, both with TCP_NODELAY. The caller closes them. A
/// failure ends the benchmark.
[[nodiscard]] std::pair<int, int> connected_sockets();

}  // namespace troupe::bench
