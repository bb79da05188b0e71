#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <utility>

#include "troupe/transport/staging/staged_copies.hpp"

namespace troupe::transport::tcp {

struct outgoing;

/// Chunks through which a lane sends a job from GPU memory: a GPU copies bytes into chunks, and
/// they go to the socket while the next ones are copied. Used by one flushing thread at a time.
///
/// | a chunk  | on                       | becomes  |
/// | -------- | ------------------------ | -------- |
/// | -        | `fill`, one is to be had | copying  |
/// | copying  | the GPU is done          | ready    |
/// | copying  | the GPU fails            | failed: the job is withdrawn |
/// | ready    | `take` of its last byte  | the burst's, until it is sent |
class outgoing_stage {
 public:
  outgoing_stage(staging::staged_copies& copies, std::shared_ptr<staging::chunk_quota> quota)
      : copies_{copies}, quota_{std::move(quota)} {}

  /// Starts copies as far as there are chunks; does nothing once the job is withdrawn. Returns
  /// false if the job waits for a chunk: jobs sent after it must not take one first.
  [[nodiscard]] bool fill(outgoing& job);
  /// Bytes that can be sent now, contiguous in memory.
  [[nodiscard]] std::size_t ready() const noexcept;
  /// Why the next bytes will never be ready; null if they may be. Valid until the next `fill` or
  /// `take`.
  [[nodiscard]] const troupe::error* failure() const noexcept;
  /// Takes the next bytes, at most `ready()`. The caller keeps the copy until they are sent.
  [[nodiscard]] std::pair<std::byte*, std::shared_ptr<staging::staged_copy>> take(
      std::size_t bytes);

 private:
  staging::staged_copies& copies_;
  const std::shared_ptr<staging::chunk_quota> quota_;
  staging::run_cursor cursor_;  ///< behind the bytes asked for
  std::uint64_t asked_{0};      ///< bytes
  std::size_t taken_{0};        ///< bytes taken of the first copy
  std::deque<std::shared_ptr<staging::staged_copy>> copies_of_job_;
};

}  // namespace troupe::transport::tcp
