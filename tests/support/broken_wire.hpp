#pragma once

/// Breaks the transport under the links of this process while all processes live on.

#include <set>
#include <string>

namespace troupe::testing {

/// Breaks all connections of this process and returns how many: shuts down its TCP connections,
/// except those with a port of the cluster's own network layer at either end, and its named local
/// sockets; moves its RDMA queue pairs to the error state.
int cut_connections(const std::set<int>& spared_ports);

/// From now on the RDMA devices of this process report that the kernel took them away. (Simulated:
/// Soft-RoCE never does.) Returns whether they could be made to raise an event.
bool lose_rdma_devices();

/// In the virtual machine: runs `tests/verbs/wire` with these arguments. Returns whether it
/// succeeded.
bool wire(const std::string& arguments);

}  // namespace troupe::testing
