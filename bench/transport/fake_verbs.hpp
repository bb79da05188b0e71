#pragma once

/// A device that exists in this process only. Linked into a program in front of libibverbs, its
/// functions are what the rdma backend calls. It carries messages and notices between the queue pairs
/// of the process and completes everything at once, but moves no bytes of a write or a read: what it
/// is good for is to count the instructions around the calls, not to test what they do.

namespace troupe::bench {

/// Whether callgrind collects. Within a call of the device it does not: each costs the caller what
/// it takes to make the call.
void collect_instructions(bool on);

}  // namespace troupe::bench
