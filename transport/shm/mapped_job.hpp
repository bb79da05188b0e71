#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "troupe/kvcache/result.hpp"
#include "troupe/kvcache/segment.hpp"
#include "troupe/transport/backend.hpp"

namespace troupe::transport::shm {

/// A batch in flight on a `mapped_link`. The leaf that moves its bytes derives its own kind of job.
struct mapped_job {
  mapped_job() = default;
  mapped_job(const mapped_job&) = delete;
  mapped_job& operator=(const mapped_job&) = delete;
  virtual ~mapped_job() = default;

  /// Ends the use of the local regions.
  virtual void release_memory() = 0;
  /// Indices, over all pieces in order, of the segments that are not certain to have arrived.
  [[nodiscard]] virtual std::vector<std::uint32_t> unfinished() const = 0;

  batch work;
  std::uint64_t total{0};
  std::uint64_t moved{0};
  std::optional<troupe::error> failure;
  bool running{false};  ///< bytes may be moving; under the link's lock
  std::atomic<bool> cancelled{false};
};

/// Makes a job for the batch, with the result of `prepare_piece(work, index)` for each piece. If a
/// piece fails, the batch still belongs to the caller.
template <class Job, class PreparePiece>
[[nodiscard]] result<std::shared_ptr<Job>> make_job(batch& work, PreparePiece prepare_piece) {
  auto job = std::make_shared<Job>();
  job->pieces.reserve(work.pieces.size());
  for (std::size_t i = 0; i < work.pieces.size(); ++i) {
    auto piece = prepare_piece(work, i);
    if (!piece) return fail(std::move(piece).error());
    job->pieces.push_back(std::move(*piece));
    job->total += total_bytes(work.pieces[i].segments);
  }
  job->work = std::move(work);
  return job;
}

}  // namespace troupe::transport::shm
