#pragma once

/// The rivals of the actors: a bare TCP socket, and a link of the transport that only the benchmark
/// uses.

#include <cstddef>
#include <memory>
#include <vector>

#include "troupe/transport/endpoint.hpp"

#include "processes.hpp"

namespace troupe::bench {

/// Two processes and one TCP connection over loopback, TCP_NODELAY.
class bare_socket {
 public:
  /// Forks the other side, which answers each `size` bytes with one byte. Polling: both sides spin
  /// on a non-blocking socket; else both block.
  explicit bare_socket(bool polling);
  /// Microseconds of `size` bytes there and one byte back: the median of `count`.
  [[nodiscard]] double exchange(std::size_t size, int count);

 private:
  int fd_{-1};
  bool polling_;
  control peer_;
  std::vector<char> buffer_;
};

/// Two processes with one link of the transport; the other side only makes progress.
class bare_link {
 public:
  bare_link(transport::backend_kind kind, bool polling);
  ~bare_link();
  bare_link(const bare_link&) = delete;
  bare_link& operator=(const bare_link&) = delete;
  /// Microseconds from posting one batch of `segments` times `bytes`, with a notice of 40 bytes, to
  /// its completion: the median of `count`. Sleeps until the completion, or polls.
  [[nodiscard]] double post(std::size_t segments, std::size_t bytes, int count);
  /// Microseconds per batch of `batches` posted at once.
  [[nodiscard]] double post_many(std::size_t segments, std::size_t bytes, int batches);

 private:
  struct side;
  [[nodiscard]] double timed(std::size_t segments, std::size_t bytes, int batches);
  control peer_;
  std::unique_ptr<side> side_;
};

}  // namespace troupe::bench
