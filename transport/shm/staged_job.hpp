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
  job_piece by_hand{};  ///< otherwise, how we reach the remote region; `local` unused
};

/// A batch with GPU memory on at least one side. Its bytes are moved by the holder of
/// `staged_link::moving_`, the only thread to touch the members that are not marked as under the
/// link's lock.
struct staged_job final : mapped_job {
  void release_memory() override;
  /// Segments with at least one byte outside the chunks that have completed.
  [[nodiscard]] std::vector<std::uint32_t> unfinished() const override;
  [[nodiscard]] bool complete() const noexcept { return given == total && chunks == 0; }

  std::vector<staged_piece> pieces;
  job_cursor at;                     ///< first byte without a chunk
  std::uint64_t given{0};            ///< bytes that have, or had, a chunk
  std::uint32_t chunks{0};           ///< chunks working for this job
  std::uint32_t touching{0};         ///< those of them that touch this process's regions
  std::optional<troupe::error> why;  ///< why the job must fail
  bool over{false};                  ///< completed; under the lock
  /// The bytes that have arrived, by chunk, counted over all segments in order. Under the lock.
  struct byte_range {
    std::uint64_t begin{0};
    std::uint64_t end{0};
  };
  std::vector<byte_range> arrived;
};

/// The state of one of our chunks.
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
/// The chunk of a batch that ended meanwhile is freed once neither a GPU nor the peer uses it.
struct chunk_use {
  enum class step : std::uint8_t { free, filling, asked, emptying };

  step now{step::free};
  std::shared_ptr<staged_job> job;
  std::size_t piece{0};
  std::uint64_t bytes{0};
  std::uint64_t first{0};  ///< of these bytes, counted as `staged_job::arrived`
  std::vector<staging::memory_run> local;
  std::vector<staging::memory_run>
      remote;  ///< if asked: relative to address 0, the start of the region
  std::shared_ptr<staging::staged_copy> copy;  ///< null if the CPU has copied
  std::uint64_t number{0};                     ///< of the last request
};

/// Assigns the next bytes of the job that fit into one chunk, all of one piece, to `use`. The job
/// must have bytes left.
void cut_chunk(staged_job& job, chunk_use& use);

}  // namespace troupe::transport::shm
