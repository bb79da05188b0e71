#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <utility>

#include "troupe/transport/staging/staged_copies.hpp"

namespace troupe::transport::tcp {

struct outgoing;

/// What a lane sends of a job whose bytes lie in memory of GPUs: they come into chunks, and from there
/// go to the socket while the next ones come. Used by whoever flushes the lane, one thread at a time.
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

  /// Starts copies as far as there are chunks. Nothing happens once the job is withdrawn. False: it waits
  /// for a chunk, and whoever is sent behind it must take none before it.
  [[nodiscard]] bool fill(outgoing& job);
  /// Bytes that may be sent now, in one run of memory.
  [[nodiscard]] std::size_t ready() const noexcept;
  /// Why the next ones never will be; none: they may. Valid until the next `fill` or `take`.
  [[nodiscard]] const troupe::error* failure() const noexcept;
  /// The next ones, at most `ready` of them. Whoever sends them keeps the copy meanwhile.
  [[nodiscard]] std::pair<std::byte*, std::shared_ptr<staging::staged_copy>> take(
      std::size_t bytes);

 private:
  staging::staged_copies& copies_;
  const std::shared_ptr<staging::chunk_quota> quota_;
  staging::run_cursor cursor_;  ///< behind what was asked for
  std::uint64_t asked_{0};      ///< bytes
  std::size_t taken_{0};        ///< of the first copy
  std::deque<std::shared_ptr<staging::staged_copy>> copies_of_job_;
};

}  // namespace troupe::transport::tcp
