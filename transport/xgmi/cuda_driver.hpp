#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <variant>

#include <cuda_runtime_api.h>

#include "troupe/transport/xgmi/gpu_runtime.hpp"

/// What CUDA's runtime does not say and its driver does. The driver's calls are found through the
/// runtime, so that a program with GPUs built in also starts where no driver is installed.
namespace troupe::transport::xgmi {

/// The allocation that holds `at`: on a GPU, or pinned memory of the host. Empty: none that the
/// driver knows, or managed memory, which moves around. Makes no context.
[[nodiscard]] std::optional<gpu_allocation> cuda_allocation(const void* at) noexcept;

/// A dma-buf of whole pages, [`begin`, `begin` + `bytes`). The descriptor, the caller's to close, or the
/// driver's reason. A driver before CUDA 11.7 has no such call.
[[nodiscard]] std::variant<int, std::string> cuda_dmabuf(std::uint32_t device,
                                                         const std::byte* begin,
                                                         std::uint64_t bytes);

/// What the stream is given from here on waits until the word at `address` has come to `value`. A
/// driver before CUDA 11.7 has no such call: `cudaErrorNotSupported`.
[[nodiscard]] cudaError_t cuda_wait_at(std::uint32_t device, void* stream, std::uint64_t address,
                                       std::uint32_t value);

/// Makes a GPU's primary context current in the calling thread until the end of the scope. Unlike
/// cudaSetDevice back and forth it makes no context on a GPU that the thread never used.
class cuda_context_scope {
 public:
  explicit cuda_context_scope(std::uint32_t device) noexcept;
  cuda_context_scope(const cuda_context_scope&) = delete;
  cuda_context_scope& operator=(const cuda_context_scope&) = delete;
  ~cuda_context_scope();
  [[nodiscard]] cudaError_t error() const noexcept { return error_; }

 private:
  void* before_{nullptr};
  bool moved_{false};
  cudaError_t error_{cudaSuccess};
};

}  // namespace troupe::transport::xgmi
