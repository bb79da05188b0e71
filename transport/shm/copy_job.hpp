#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "troupe/kvcache/result.hpp"
#include "troupe/transport/backend.hpp"
#include "troupe/transport/region_table.hpp"
#include "troupe/transport/shm/copy.hpp"
#include "troupe/transport/shm/grant_slots.hpp"
#include "troupe/transport/shm/mapped_job.hpp"
#include "troupe/transport/shm/peer_process.hpp"
#include "troupe/transport/shm/peer_regions.hpp"

namespace troupe::transport::shm {

/// The content of `remote_grant::key` for this backend.
struct grant_key {
  /// `asked`: memory of a GPU of the owner, which moves the bytes on request; it has no slot.
  enum class memory : std::uint8_t { mapped = 1, process = 2, asked = 3 };

  std::uint32_t slot{0};
  memory how{memory::mapped};
  std::uint64_t address{0};  ///< of the region in its owner's process; used when `how` is `process`

  [[nodiscard]] std::vector<std::byte> encode() const;
  /// `unauthorized`: not a key of this backend.
  [[nodiscard]] static result<grant_key> decode(std::span<const std::byte> key);
};

/// One piece of a batch with everything needed to copy it.
struct job_piece {
  region_use local;
  std::shared_ptr<const mapped_region> mapped;  ///< null: by process_vm_*
  std::uint64_t remote_address{0};              ///< of the region, in this process or in the peer's
  grant_slot* slot{nullptr};
  std::uint64_t grant{0};
};

/// Position of the next byte: piece, segment in it, repetition of the segment, byte in the
/// repetition.
struct job_cursor {
  std::size_t piece{0};
  std::size_t segment{0};
  std::uint32_t repetition{0};
  std::uint64_t offset{0};
};

/// A batch that the CPU copies. One thread at a time works on it (`running`).
struct copy_job final : mapped_job {
  void release_memory() override;
  [[nodiscard]] std::vector<std::uint32_t> unfinished() const override;

  std::vector<job_piece> pieces;
  job_cursor at;
};

/// Copies chunks of jobs. Has no state besides its knowledge of the machine and the peer.
class job_runner {
 public:
  /// Bytes in one visit of a slot: bounds how long an honest peer's fence waits for us.
  static constexpr std::uint64_t chunk_bytes = std::uint64_t{1} << 20;
  static constexpr std::size_t chunk_runs = 256;

  enum class progress : std::uint8_t {
    more,  ///< call again
    done,  ///< everything was moved, or `failure` is set
  };
  struct outcome {
    progress state{progress::more};
    bool owner_waits{false};  ///< the grant was revoked meanwhile: ring the peer
  };

  /// `peer` must outlive every `step`.
  job_runner(const peer_process& peer, std::int32_t batch_size) noexcept;
  /// Copies at most one chunk of one piece.
  [[nodiscard]] outcome step(copy_job& job) const;
  /// Copies runs, at most `chunk_runs`, between our memory and the piece's remote region, inside a
  /// visit of its slot.
  [[nodiscard]] result<void> carry(const job_piece& piece, direction dir,
                                   std::span<const copy_run> runs) const;

 private:
  // The runs are filled before they are read.
  struct chunk {  // NOLINT(cppcoreguidelines-pro-type-member-init)
    std::array<copy_run, chunk_runs> runs;
    std::size_t count{0};
    std::uint64_t bytes{0};
    job_cursor end;
  };

  static void fill(const copy_job& job, chunk& out, std::size_t max_runs);
  [[nodiscard]] result<void> copy_through_kernel(direction dir,
                                                 std::span<const copy_run> runs) const;

  copier copier_;
  const peer_process* peer_;
  std::size_t runs_per_call_;
};

/// The error of a batch whose grant was revoked.
[[nodiscard]] troupe::error revoked_by_peer(std::size_t piece);

}  // namespace troupe::transport::shm
