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

/// Memory (a sealed memfd, mapped by both ends) by which the initiator moves bytes from and to GPUs of
/// the target, which it cannot touch: chunks of bytes, each with what is asked and answered of it. Each
/// end has its own, for what it initiates, from the first such batch on.
///
/// | a chunk's | written by    | then told by        |
/// | --------- | ------------- | ------------------- |
/// | bytes     | initiator     | `asked` (a write)   |
/// | request   | initiator     | `asked`             |
/// | bytes     | target        | `answered` (a read) |
/// | answer    | target        | `answered`          |
///
/// `asked` and `answered` count the requests of the chunk. While they differ the chunk is the target's,
/// else the initiator's. Whoever tells rings the other's doorbell if that sleeps.
///
/// The peer may write anything here at any time, also between two looks at the same number. So each
/// end reads whatever the other wrote once, number by number (`taken_request`, `taken_runs`,
/// `taken_answer`), and checks and uses what it has read. Only then has the target a GPU touch anything.
/// What no honest initiator asks ends the link; what its grant does not permit is refused.
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

/// The bytes of the runs lie one behind the other at the chunk's begin.
struct chunk_request {
  std::uint64_t grant{0};
  std::uint64_t transfer{0};
  std::uint32_t dir{0};  ///< a `direction`; `write`: from the chunk into the region
  std::uint32_t runs{0};
};

struct chunk_answer {
  std::uint32_t status{0};           ///< 0: done; else an `errc`, and nothing is certain
  std::array<char, 188> sentence{};  ///< of a failure; ended by 0
};

/// A fresh memfd reads as zeros: nothing was asked.
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

// -- what the peer wrote, as it was at one moment: number by number

[[nodiscard]] chunk_request taken_request(chunk_state& from) noexcept;
/// The first `count` runs, at most `max_chunk_runs`, into `into`, whose memory is used again.
[[nodiscard]] std::vector<chunk_run> taken_runs(chunk_state& from, std::size_t count,
                                                std::vector<chunk_run> into);
[[nodiscard]] chunk_answer taken_answer(chunk_state& from) noexcept;

/// A mapping of it. Unmapped with its owner, and not inherited by forked children.
class chunk_area {
 public:
  chunk_area(const chunk_area&) = delete;
  chunk_area& operator=(const chunk_area&) = delete;
  ~chunk_area();

  /// `pool_exhausted`.
  [[nodiscard]] static result<std::shared_ptr<chunk_area>> create();
  /// What the peer made, after checking its size and seals. `unauthorized`, `pool_exhausted`.
  [[nodiscard]] static result<std::shared_ptr<chunk_area>> map(owned_fd fd, std::uint64_t size);

  /// Before a GPU copies from or to the chunks; idempotent. What the driver says against it.
  [[nodiscard]] result<void> pin(xgmi::gpu_runtime& by, std::uint32_t gpu);
  [[nodiscard]] chunk_state& state(std::size_t index) const noexcept {
    return memory_->states[index];
  }
  [[nodiscard]] std::byte* bytes(std::size_t index) const noexcept {
    return memory_->bytes[index].data();
  }
  /// As GPUs reach it; once it is pinned.
  [[nodiscard]] xgmi::pinned_memory pinned(std::size_t index) const noexcept;
  [[nodiscard]] int fd() const noexcept { return fd_.get(); }
  /// What names it at both ends.
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
