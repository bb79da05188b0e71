#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <vector>

#include "troupe/transport/xgmi/gpu_runtime.hpp"

namespace troupe::transport::xgmi {

/// A word, and the value that releases the stream that waits at it.
struct gate_word {
  gpu_word word;
  std::uint32_t value{0};
  const void* stream{nullptr};

  /// Opens the gate. Callable on any thread; does not call the driver.
  void open() const noexcept;
};

/// The words at which streams wait, in use or free, of all GPUs of the process. A word can be
/// reused as soon as its gate is open, even if the stream has not reached it yet: words only rise,
/// so a stream that looks late finds its value or a higher one. A word is retired before drivers
/// could take its value for negative. Thread-safe.
///
/// Streams share the queues of a GPU, and a waiting stream blocks its queue. Half of the queues are
/// left to the copies that the streams wait for. (Measured on an H200: with 8 queues, 6 waiting
/// streams do not slow copies on others, 7 hold up some of them and 8 all; with 32 queues, 16 do
/// not.)
class gate_words {
 public:
  /// The most words in use on one GPU.
  static constexpr std::size_t per_gpu = 16'384;
  static constexpr std::uint32_t last_value = 0x7FFF'FFFF;
  /// Queues that a GPU must have before one of its streams may be held.
  static constexpr std::uint32_t least_queues = 4;

  explicit gate_words(gpu_runtime& runtime) : runtime_{&runtime} {}

  /// Takes a word whose gate is shut; the stream does not wait at it yet. `gpu` must exist.
  /// `overloaded`: too many gates are shut or too many streams are held; `backend_unavailable`:
  /// copies would be held up too; the errors of `gpu_runtime::make_words`.
  [[nodiscard]] result<gate_word> take(std::uint32_t gpu, const void* stream);
  /// Returns a word whose gate has been opened.
  void give_back(const gate_word& open) noexcept;
  /// Calls `what`, which may wait for the whole GPU, and returns true; returns false without
  /// calling it if a stream of the GPU is held or about to be. No stream of this GPU is held during
  /// the call; streams of other GPUs may be.
  [[nodiscard]] bool unless_held(std::uint32_t gpu, const std::function<void()>& what);
  /// The number of words, used or free.
  [[nodiscard]] std::size_t made() const;

 private:
  struct of_gpu {
    std::mutex taking;            ///< locked before `mutex_`; never locked to open a gate
    std::vector<gate_word> free;  ///< has capacity for all words, so returning one cannot fail
    std::size_t made{0};
    std::map<const void*, std::size_t> held;  ///< gates that hold each stream
  };

  [[nodiscard]] of_gpu& of(std::uint32_t gpu);

  gpu_runtime* runtime_;
  mutable std::mutex mutex_;
  std::map<std::uint32_t, of_gpu> gpus_;
};

}  // namespace troupe::transport::xgmi
