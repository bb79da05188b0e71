#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "troupe/kvcache/result.hpp"
#include "troupe/transport/owned_fd.hpp"
#include "troupe/transport/xgmi/gpu_runtime.hpp"

/// Memory (a sealed memfd, mapped by both ends) through which the initiator moves bytes from and to
/// GPUs of the target, which it cannot access itself: chunks of bytes, each with its request and
/// its answer. Each end creates one at the first such batch that it initiates.
///
/// | a chunk's | written by    | then told by        |
/// | --------- | ------------- | ------------------- |
/// | bytes     | initiator     | `asked` (a write)   |
/// | request   | initiator     | `asked`             |
/// | bytes     | target        | `answered` (a read) |
/// | answer    | target        | `answered`          |
///
/// `asked` and `answered` count the requests of the chunk. While they differ the chunk belongs to
/// the target, else to the initiator. An end that advances a count rings the other's doorbell if
/// that end sleeps.
///
/// The peer may write anything here at any time, also between two reads of the same number. So each
/// end reads every number of the other end once (`taken_request`, `taken_runs`, `taken_answer`),
/// and checks and uses its copy. Only then does the target have a GPU touch memory. A request that
/// no honest initiator makes ends the link; a request that its grant does not permit is refused.
namespace troupe::transport::shm {

inline constexpr std::size_t chunk_count = 8;
inline constexpr std::size_t chunk_size = std::size_t{1} << 20;
/// A segment of the granted region.
struct chunk_run {
  std::uint64_t offset{0};
  std::uint64_t length{0};
  std::uint64_t stride{0};
  std::uint32_t count{0};
  std::uint32_t unused{0};
};
inline constexpr std::size_t max_chunk_runs = 2048;

/// The bytes of the runs lie back to back from the start of the chunk.
struct chunk_request {
  std::uint64_t grant{0};
  std::uint64_t transfer{0};
  std::uint32_t dir{0};  ///< a `direction`; `write`: from the chunk into the region
  std::uint32_t runs{0};
};

struct chunk_answer {
  std::uint32_t status{0};           ///< 0: done; else an `errc`, and any bytes may have moved
  std::array<char, 188> sentence{};  ///< of a failure; zero-terminated
};

/// A fresh memfd reads as zeros: no request was made.
struct chunk_state {
  alignas(64) std::atomic<std::uint64_t> asked;
  chunk_request request;
  alignas(64) std::atomic<std::uint64_t> answered;
  chunk_answer answer;
  alignas(64) std::array<chunk_run, max_chunk_runs> runs;
};

struct chunk_memory {
  std::array<chunk_state, chunk_count> states;
  alignas(4096) std::array<std::array<std::byte, chunk_size>, chunk_count> bytes;
};
static_assert(sizeof(chunk_run) == 32 && sizeof(chunk_memory) % 4096 == 0);

// -- copies of what the peer wrote, each number read once

[[nodiscard]] chunk_request taken_request(chunk_state& from) noexcept;
/// The first `count` runs, at most `max_chunk_runs`, in `into`, whose memory is reused.
[[nodiscard]] std::vector<chunk_run> taken_runs(chunk_state& from, std::size_t count,
                                                std::vector<chunk_run> into);
[[nodiscard]] chunk_answer taken_answer(chunk_state& from) noexcept;

/// A mapping of a `chunk_memory`. Unmapped with its owner, and not inherited by forked children.
class chunk_area {
 public:
  chunk_area(const chunk_area&) = delete;
  chunk_area& operator=(const chunk_area&) = delete;
  ~chunk_area();

  /// `pool_exhausted`.
  [[nodiscard]] static result<std::shared_ptr<chunk_area>> create();
  /// Maps the memory that the peer created, after checking its size and seals. `unauthorized`,
  /// `pool_exhausted`.
  [[nodiscard]] static result<std::shared_ptr<chunk_area>> map(owned_fd fd, std::uint64_t size);

  /// Must be called before a GPU copies from or to the chunks; idempotent. Returns the driver's
  /// error.
  [[nodiscard]] result<void> pin(xgmi::gpu_runtime& by, std::uint32_t gpu);
  [[nodiscard]] chunk_state& state(std::size_t index) const noexcept {
    return memory_->states[index];
  }
  [[nodiscard]] std::byte* bytes(std::size_t index) const noexcept {
    return memory_->bytes[index].data();
  }
  /// The chunk as GPUs address it. Only after `pin`.
  [[nodiscard]] xgmi::pinned_memory pinned(std::size_t index) const noexcept;
  [[nodiscard]] int fd() const noexcept { return fd_.get(); }
  /// Identifies the memory at both ends.
  [[nodiscard]] std::uint64_t number() const noexcept { return number_; }

 private:
  chunk_area() = default;
  owned_fd fd_;
  std::uint64_t number_{0};
  chunk_memory* memory_{nullptr};
  std::mutex mutex_;
  xgmi::gpu_runtime* pinned_by_{nullptr};
  xgmi::pinned_memory pinned_{};
};

}  // namespace troupe::transport::shm
