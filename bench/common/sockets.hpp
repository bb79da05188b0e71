#pragma once

/// The rival of rows over TCP: a bare socket pair.

#include <utility>

namespace troupe::bench {

/// Two ends of one TCP connection over loopback, both with TCP_NODELAY. The caller closes them. A
/// failure ends the benchmark.
[[nodiscard]] std::pair<int, int> connected_sockets();

}  // namespace troupe::bench
