#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "troupe/kvcache/result.hpp"
#include "troupe/transport/backend.hpp"
#include "troupe/transport/xgmi/copy_item.hpp"

/// The operations that Troupe needs from GPUs. `gpu_runtime_hip.cpp` implements them with HIP on
/// AMD and, through `hip_on_cuda.hpp`, with CUDA; `gpu_runtime_none.cpp` reports that neither was
/// built in. Tests have a double.
namespace troupe::transport::xgmi {

/// A GPU as this process sees it. Its number is its index in `gpu_runtime::devices`; another
/// process may number the same GPUs differently, so processes name GPUs by bus id.
struct gpu_device {
  std::string bus_id;  ///< PCI, "0000:1b:00.0", in lower case
  std::string name;
  std::uint32_t processors{0};  ///< streaming multiprocessors, compute units
  bool bulk_copies{false};      ///< `copy_way::bulk` works here
  /// Queues through which the work of all streams of a process reaches it. A waiting stream blocks
  /// one.
  std::uint32_t queues{8};
};

/// An allocation known to the driver.
struct gpu_allocation {
  std::uint32_t device{0};  ///< index
  std::byte* base{nullptr};
  std::uint64_t size{0};
  std::uint64_t id{0};  ///< never reused in its process, if the driver has such a number
  bool on_host{false};  ///< pinned host memory that the device reaches
};

/// The handle with which another process opens an allocation.
using memory_handle = std::array<std::byte, 64>;

struct gpu_stream {
  std::uint32_t device{0};
  void* handle{nullptr};
};
struct gpu_event {
  std::uint32_t device{0};
  void* handle{nullptr};
};

/// Host memory that kernels read while the host writes it.
struct pinned_memory {
  std::byte* host{nullptr};
  std::uint64_t device_address{0};
  std::size_t size{0};
};

/// A word of host memory at which streams of one GPU can wait, initially 0. Only its low 31 bits
/// are used: drivers differ in whether they compare signed.
struct gpu_word {
  std::uint32_t device{0};
  std::uint32_t* host{nullptr};
  std::uint64_t device_address{0};
};

/// Rung by the driver. Destroyed with its last owner.
class bell {
 public:
  virtual ~bell() = default;
  virtual void ring() noexcept = 0;
};

/// Thread-safe. No call changes the current device of the calling thread. After a call has failed
/// with `backend_unavailable` because a GPU is lost, `state` reports that from then on.
class gpu_runtime {
 public:
  gpu_runtime() = default;
  gpu_runtime(const gpu_runtime&) = delete;
  gpu_runtime& operator=(const gpu_runtime&) = delete;
  virtual ~gpu_runtime() = default;

  /// "cuda", "hip", "none"
  [[nodiscard]] virtual const char* kind() const noexcept = 0;
  /// Whether there is a usable GPU, or why not. Permanently unusable once a GPU is lost.
  [[nodiscard]] virtual usability state() const = 0;
  [[nodiscard]] virtual const std::vector<gpu_device>& devices() const = 0;

  // -- memory

  /// The allocation that holds `at`. Empty if `at` is not memory of a known GPU.
  [[nodiscard]] virtual std::optional<gpu_allocation> find(const void* at) const = 0;
  [[nodiscard]] virtual result<std::byte*> allocate(std::uint32_t device, std::uint64_t size) = 0;
  virtual void release(std::uint32_t device, std::byte* base) noexcept = 0;
  /// Copies and waits for completion. Either side may be host memory.
  [[nodiscard]] virtual result<void> copy_now(std::byte* to, const std::byte* from,
                                              std::uint64_t bytes) = 0;
  /// Exports a whole allocation. `backend_unavailable`: memory of this kind cannot be exported.
  [[nodiscard]] virtual result<memory_handle> export_memory(const gpu_allocation& of) = 0;
  /// Exports memory within one allocation as a dma-buf, for devices of other drivers such as NICs.
  /// The caller closes the descriptor. `backend_unavailable`: the driver or the kernel does not
  /// support it.
  [[nodiscard]] virtual result<exported_memory> export_dmabuf(
      const gpu_allocation& of, std::span<const std::byte> memory) = 0;
  /// Opens memory exported by another process, for copies by `device`.
  [[nodiscard]] virtual result<std::byte*> open_memory(std::uint32_t device,
                                                       const memory_handle& handle) = 0;
  virtual void close_memory(std::uint32_t device, std::byte* base) noexcept = 0;
  [[nodiscard]] virtual result<pinned_memory> allocate_pinned(std::uint32_t device,
                                                              std::size_t size) = 0;
  virtual void release_pinned(const pinned_memory& memory) noexcept = 0;
  /// Pins whole pages of mapped host memory, possibly shared with another process, for every GPU of
  /// this process. The pages must stay mapped until `unpin`.
  [[nodiscard]] virtual result<pinned_memory> pin(std::uint32_t device,
                                                  std::span<std::byte> memory) = 0;
  virtual void unpin(const pinned_memory& memory) noexcept = 0;

  // -- peers

  /// Whether kernels of `device` can access memory of `peer`.
  [[nodiscard]] virtual bool reaches(std::uint32_t device, std::uint32_t peer) const = 0;
  /// Whether kernels of `device` can access memory of a GPU of this host that the process does not
  /// see (CUDA_VISIBLE_DEVICES), after `open_memory`. The reason against it is a clause about that
  /// GPU, and what to do.
  [[nodiscard]] virtual usability reaches_unseen(std::uint32_t device,
                                                 const std::string& bus_id) const = 0;
  /// Enables access to a visible peer; idempotent. `backend_unavailable`.
  [[nodiscard]] virtual result<void> enable(std::uint32_t device, std::uint32_t peer) = 0;

  // -- work

  [[nodiscard]] virtual result<gpu_stream> make_stream(std::uint32_t device) = 0;
  virtual void release_stream(gpu_stream stream) noexcept = 0;
  [[nodiscard]] virtual result<gpu_event> make_event(std::uint32_t device) = 0;
  /// Opens an event exported by another process; `release_event` closes it. `invalid_config`: the
  /// driver rejects the handle; the sentence says what it requires.
  [[nodiscard]] virtual result<gpu_event> open_event(std::uint32_t device,
                                                     const event_handle& handle) = 0;
  virtual void release_event(gpu_event event) noexcept = 0;
  /// Copies one run with the copy engine.
  [[nodiscard]] virtual result<void> copy(gpu_stream on, std::uint64_t to, std::uint64_t from,
                                          std::uint64_t bytes) = 0;
  [[nodiscard]] virtual result<void> launch(gpu_stream on, const copy_launch& what) = 0;
  /// Records the event: it happens when all work given to the stream so far has ended.
  [[nodiscard]] virtual result<void> record(gpu_event event, gpu_stream on) = 0;
  /// Whether the event has happened. Errors of the work before it are reported here.
  [[nodiscard]] virtual result<bool> happened(gpu_event event) = 0;
  /// Makes all later work of the stream wait for `event`, a driver's event that its owner has
  /// recorded. The owner may record it again or release it after this call.
  [[nodiscard]] virtual result<void> wait_for(gpu_stream on, void* event) = 0;
  /// Makes more words. They live as long as the runtime and cannot be released: a stream may still
  /// have to look at one.
  [[nodiscard]] virtual result<std::vector<gpu_word>> make_words(std::uint32_t device) = 0;
  /// Makes all later work of `on`, an engine's stream, wait until the host has written `value` or
  /// more to the word. `backend_unavailable`: the GPU or its driver does not support it;
  /// `invalid_config`: the stream does not belong to this GPU, or is being captured.
  [[nodiscard]] virtual result<void> wait_at(gpu_stream on, const gpu_word& word,
                                             std::uint32_t value) = 0;
  /// Rings `what` once when all work given to the stream so far has ended well.
  [[nodiscard]] virtual result<void> ring_after(gpu_stream on, std::shared_ptr<bell> what) = 0;
};

/// Creates the runtime that was built in. Looks for GPUs, which may take a second.
[[nodiscard]] std::unique_ptr<gpu_runtime> make_gpu_runtime();

}  // namespace troupe::transport::xgmi
