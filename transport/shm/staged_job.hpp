#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "troupe/transport/shm/chunk_memory.hpp"
#include "troupe/transport/shm/copy_job.hpp"
#include "troupe/transport/shm/mapped_job.hpp"
#include "troupe/transport/staging/staged_copies.hpp"

namespace troupe::transport::shm {

/// One piece of a batch that goes through chunks.
struct staged_piece {
  region_use local;
  std::byte* base{nullptr};  ///< of the local region
  std::uint32_t gpu{staging::memory_run::on_host};
  std::uint64_t grant{0};
  bool asks{false};     ///< the peer's GPU moves the remote side
  job_piece by_hand{};  ///< else where the remote region lies for us; without its local region
};

/// A batch of which at least one side is memory of a GPU. Its bytes are moved by whoever holds
/// `staged_link::moving_`, who alone touches what is not said to be under the link's lock.
struct staged_job final : mapped_job {
  void release_memory() override;
  /// Those of which not every byte was in a chunk that is through.
  [[nodiscard]] std::vector<std::uint32_t> unfinished() const override;
  [[nodiscard]] bool complete() const noexcept { return given == total && chunks == 0; }

  std::vector<staged_piece> pieces;
  job_cursor at;              ///< behind what has a chunk
  std::uint64_t given{0};     ///< bytes that have, or had, one
  std::uint32_t chunks{0};    ///< that work for it
  std::uint32_t touching{0};  ///< of those, the ones that touch memory of this process's regions
  std::optional<troupe::error> why;  ///< it cannot succeed any more
  bool over{false};                  ///< completed; under the lock
  /// What has arrived, chunk by chunk: bytes, counted over all segments in order. Under the lock.
  struct byte_range {
    std::uint64_t begin{0};
    std::uint64_t end{0};
  };
  std::vector<byte_range> arrived;
};

/// What one chunk of ours is doing.
///
/// | chunk    | on                                             | becomes                      |
/// | -------- | ---------------------------------------------- | ---------------------------- |
/// | free     | a batch writes                                 | filling                      |
/// | free     | a batch reads what the peer must move          | asked                        |
/// | free     | a batch reads what is mapped here: it is copied | emptying                     |
/// | filling  | the copy has ended                             | asked, or free once by hand  |
/// | asked    | the peer answered a write, or refused          | free                         |
/// | asked    | the peer answered a read                       | emptying                     |
/// | emptying | the copy has ended                             | free                         |
///
/// A batch that ended meanwhile leaves its chunk as soon as neither a GPU nor the peer uses it.
struct chunk_use {
  enum class step : std::uint8_t { free, filling, asked, emptying };

  step now{step::free};
  std::shared_ptr<staged_job> job;
  std::size_t piece{0};
  std::uint64_t bytes{0};
  std::uint64_t first{0};  ///< of these bytes, counted as `staged_job::arrived`
  std::vector<staging::memory_run> local;
  std::vector<staging::memory_run>
      remote;  ///< of what is asked: from address 0, the region's begin
  std::shared_ptr<staging::staged_copy> copy;  ///< none: the processor has copied
  std::uint64_t number{0};                     ///< of the last request
};

/// Gives the next bytes of the job that fit into one chunk to `use`, all of one piece. There must be
/// some.
void cut_chunk(staged_job& job, chunk_use& use);

}  // namespace troupe::transport::shm
