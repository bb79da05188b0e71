#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "troupe/transport/xgmi/gpu_runtime.hpp"

namespace troupe::transport::xgmi {

/// A word and the value that lets the stream go on that was told to wait at it last.
struct gate_word {
  gpu_word word;
  std::uint32_t value{0};

  /// Any thread, without a call to the driver.
  void open() const noexcept;
};

/// The words that no stream is held at, of all GPUs of the process. A word can be used again as soon
/// as its gate is open, with no event that says whether the stream has come there: the words only
/// rise, so a stream that looks late finds its value or more. One that has risen so far that
/// drivers might take it for negative is used no more. Thread-safe.
class gate_words {
 public:
  /// Of each GPU, in use at once.
  static constexpr std::size_t per_gpu = 16'384;
  static constexpr std::uint32_t last_value = 0x7FFF'FFFF;

  explicit gate_words(gpu_runtime& runtime) : runtime_{&runtime} {}

  /// Shut, and no stream waits at it yet. `overloaded` when too many are; the errors of
  /// `gpu_runtime::make_words`.
  [[nodiscard]] result<gate_word> take(std::uint32_t gpu);
  /// The gate is open.
  void give_back(const gate_word& open) noexcept;
  /// How many words there are, used or not.
  [[nodiscard]] std::size_t made() const;

 private:
  struct of_gpu {
    std::vector<gate_word> free;  ///< has room for all that were made: giving back cannot fail
    std::size_t made{0};
  };

  gpu_runtime* runtime_;
  mutable std::mutex mutex_;
  std::map<std::uint32_t, of_gpu> gpus_;
};

}  // namespace troupe::transport::xgmi
