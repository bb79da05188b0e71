#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <variant>

#include <cuda_runtime_api.h>

#include "troupe/transport/xgmi/gpu_runtime.hpp"

/// Functions of the CUDA driver that the CUDA runtime lacks. They are looked up through the
/// runtime, so a program built for GPUs also starts where no driver is installed.
namespace troupe::transport::xgmi {

/// The allocation that holds `at`, on a GPU or in pinned host memory. Empty if the driver knows
/// none, or for managed memory, which moves around. Makes no context.
[[nodiscard]] std::optional<gpu_allocation> cuda_allocation(const void* at) noexcept;

/// Exports the whole pages [`begin`, `begin` + `bytes`) as a dma-buf. Returns a descriptor that the
/// caller must close, or the driver's reason for refusing. Needs a driver of CUDA 11.7 or newer.
[[nodiscard]] std::variant<int, std::string> cuda_dmabuf(std::uint32_t device,
                                                         const std::byte* begin,
                                                         std::uint64_t bytes);

/// Makes all later work of the stream wait until the word at `address` is at least `value`.
/// `cudaErrorNotSupported` with drivers before CUDA 11.7.
[[nodiscard]] cudaError_t cuda_wait_at(std::uint32_t device, void* stream, std::uint64_t address,
                                       std::uint32_t value);

/// Makes a GPU's primary context current in the calling thread until the end of the scope. Unlike
/// two calls of cudaSetDevice it makes no context on a GPU that the thread never used.
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
