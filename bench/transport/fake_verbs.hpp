#pragma once

/// A device that exists in this process only. Linked into a program in front of libibverbs, its
/// functions are what the rdma backend calls. It carries messages and notices between the queue
/// pairs of the process and completes everything at once, but moves no bytes of a write or a read:
/// it serves to count the instructions around the calls, not to test their effect.

namespace troupe::bench {

/// Whether callgrind collects. It does not within a call of the device, so each call costs the
/// caller only the instructions to make it.
void collect_instructions(bool on);

}  // namespace troupe::bench
