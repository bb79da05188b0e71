#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <vector>

#include "troupe/transport/xgmi/gpu_runtime.hpp"

namespace troupe::transport::xgmi {

/// A word and the value that lets the stream go on that was told to wait at it last.
struct gate_word {
  gpu_word word;
  std::uint32_t value{0};
  const void* stream{nullptr};

  /// Any thread, without a call to the driver.
  void open() const noexcept;
};

/// The words that streams are held at and those that none is, of all GPUs of the process. A word can
/// be used again as soon as its gate is open, with no event that says whether the stream has come
/// there: the words only rise, so a stream that looks late finds its value or more. One that has
/// risen so far that drivers might take it for negative is used no more. Thread-safe.
///
/// Streams share the queues of a GPU, and one that waits keeps the queue that it stands in. Half of
/// them are left to the copies that it waits for. (Measured on an H200: with 8 queues 6 streams that
/// wait do not slow copies on others, 7 hold some of them up and 8 all; with 32 queues 16 do not.)
class gate_words {
 public:
  /// Of each GPU, in use at once.
  static constexpr std::size_t per_gpu = 16'384;
  static constexpr std::uint32_t last_value = 0x7FFF'FFFF;
  /// Of a GPU, for one of its streams to be held.
  static constexpr std::uint32_t least_queues = 4;

  explicit gate_words(gpu_runtime& runtime) : runtime_{&runtime} {}

  /// Shut, and the stream does not wait at it yet. `overloaded` when too many are, or too many
  /// streams are held; `backend_unavailable` where copies would be held up too; the errors of `gpu_runtime::make_words`. The GPU is there.
  [[nodiscard]] result<gate_word> take(std::uint32_t gpu, const void* stream);
  /// The gate is open.
  void give_back(const gate_word& open) noexcept;
  /// Does what waits for the whole GPU, unless a stream of it is held or about to be: false. None is
  /// meanwhile; streams of other GPUs are.
  [[nodiscard]] bool unless_held(std::uint32_t gpu, const std::function<void()>& what);
  /// How many words there are, used or not.
  [[nodiscard]] std::size_t made() const;

 private:
  struct of_gpu {
    std::mutex taking;            ///< before the other; nobody who opens a gate waits for it
    std::vector<gate_word> free;  ///< has room for all that were made: giving back cannot fail
    std::size_t made{0};
    std::map<const void*, std::size_t> held;  ///< streams, and at how many gates
  };

  [[nodiscard]] of_gpu& of(std::uint32_t gpu);

  gpu_runtime* runtime_;
  mutable std::mutex mutex_;
  std::map<std::uint32_t, of_gpu> gpus_;
};

}  // namespace troupe::transport::xgmi
