#pragma once

/// The rival of the tcp rows: two processes that hold the same scattered blocks and move them with
/// only writev and readv (256 blocks a call), one acknowledgement per batch and as many batches in
/// flight as ours.

#include <cstddef>
#include <cstdint>
#include <vector>

#include <sys/uio.h>

#include "troupe/transport/backend.hpp"

#include "processes.hpp"

namespace troupe::bench {

class bare_stream {
 public:
  /// Uses a connected socket, which the caller owns. Allocates memory of the size of a region.
  explicit bare_stream(int fd);

  /// GB/s of scattered blocks to or from the child.
  [[nodiscard]] double throughput(const control& child, transport::direction dir,
                                  std::size_t block);
  /// Half of a round trip of 4 KiB, microseconds, p50; the answer is polled for.
  [[nodiscard]] double latency(const control& child, int count) const;
  /// Runs the child until its parent is gone.
  [[noreturn]] void serve(const control& parent);

 private:
  void begin(std::size_t block);
  [[nodiscard]] std::vector<iovec> next_batch(std::size_t block);

  int fd_;
  std::byte* memory_;
  std::vector<std::uint64_t> order_;
  std::size_t next_{0};
};

}  // namespace troupe::bench
