#pragma once

/// Breaks the transport under the links of this process while everybody lives on.

#include <set>
#include <string>

namespace troupe::testing {

/// Shuts the connections of this process down: all of TCP but those with a port of the cluster's own
/// network layer at either end, and those of named local sockets; moves its RDMA queue pairs to the
/// error state. How many.
int cut_connections(const std::set<int>& spared_ports);

/// The RDMA devices of this process say from now on that the kernel took them away. (Soft-RoCE never
/// does: it is played.) Whether they were made to say something.
bool lose_rdma_devices();

/// In the virtual machine: `tests/verbs/wire` with these arguments. Whether it did it.
bool wire(const std::string& arguments);

}  // namespace troupe::testing
