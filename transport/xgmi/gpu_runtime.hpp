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

/// What Troupe asks of GPUs, and nothing else. `gpu_runtime_hip.cpp` carries it out by HIP on AMD
/// and, through `hip_on_cuda.hpp`, by CUDA; `gpu_runtime_none.cpp` says that neither was built in.
/// Tests have a double.
namespace troupe::transport::xgmi {

/// A GPU as this process sees it. Its place in `gpu_runtime::devices` is its number here; another
/// process may number the same GPUs otherwise, so the name between processes is the bus id.
struct gpu_device {
  std::string bus_id;  ///< PCI, "0000:1b:00.0", in small letters
  std::string name;
  std::uint32_t processors{0};  ///< streaming multiprocessors, compute units
  bool bulk_copies{false};      ///< `copy_way::bulk` works here
  /// Through so many queues the work of all streams of a process comes to it. A stream that waits
  /// keeps one of them to itself.
  std::uint32_t queues{8};
};

/// One allocation that a driver knows.
struct gpu_allocation {
  std::uint32_t device{0};  ///< index
  std::byte* base{nullptr};
  std::uint64_t size{0};
  std::uint64_t id{0};  ///< unique in its process for ever, where the driver has such a number
  bool on_host{false};  ///< pinned memory of the host that its device reaches
};

/// What another process opens an allocation with.
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

/// A word of the host's memory that streams of one GPU can be told to wait at, 0 at first. Its low 31
/// bits count: drivers differ in whether they compare with a sign.
struct gpu_word {
  std::uint32_t device{0};
  std::uint32_t* host{nullptr};
  std::uint64_t device_address{0};
};

/// Rung by the driver. Closed with its last owner.
class bell {
 public:
  virtual ~bell() = default;
  virtual void ring() noexcept = 0;
};

/// Thread-safe. No call changes what the calling thread's driver calls refer to afterwards. Where a
/// call fails with `backend_unavailable` because a GPU is lost, `state` says so from then on.
class gpu_runtime {
 public:
  gpu_runtime() = default;
  gpu_runtime(const gpu_runtime&) = delete;
  gpu_runtime& operator=(const gpu_runtime&) = delete;
  virtual ~gpu_runtime() = default;

  /// "cuda", "hip", "none"
  [[nodiscard]] virtual const char* kind() const noexcept = 0;
  /// Whether there is a GPU to work with, and why not. Once a GPU is lost it stays so.
  [[nodiscard]] virtual usability state() const = 0;
  [[nodiscard]] virtual const std::vector<gpu_device>& devices() const = 0;

  // -- memory

  /// The allocation that holds `at`. Empty: `at` is no memory of a GPU that we know.
  [[nodiscard]] virtual std::optional<gpu_allocation> find(const void* at) const = 0;
  [[nodiscard]] virtual result<std::byte*> allocate(std::uint32_t device, std::uint64_t size) = 0;
  virtual void release(std::uint32_t device, std::byte* base) noexcept = 0;
  /// Waits until the bytes are there. Either side may be host memory.
  [[nodiscard]] virtual result<void> copy_now(std::byte* to, const std::byte* from,
                                              std::uint64_t bytes) = 0;
  /// Of an allocation's base. `backend_unavailable`: memory of a kind that cannot be exported.
  [[nodiscard]] virtual result<memory_handle> export_memory(const gpu_allocation& of) = 0;
  /// Memory within one allocation, as devices of other drivers take it: NICs. The descriptor is the
  /// caller's to close. `backend_unavailable`: this driver, or the kernel, exports none.
  [[nodiscard]] virtual result<exported_memory> export_dmabuf(
      const gpu_allocation& of, std::span<const std::byte> memory) = 0;
  /// Opens what another process exported, for copies by `device`.
  [[nodiscard]] virtual result<std::byte*> open_memory(std::uint32_t device,
                                                       const memory_handle& handle) = 0;
  virtual void close_memory(std::uint32_t device, std::byte* base) noexcept = 0;
  [[nodiscard]] virtual result<pinned_memory> allocate_pinned(std::uint32_t device,
                                                              std::size_t size) = 0;
  virtual void release_pinned(const pinned_memory& memory) noexcept = 0;
  /// Whole pages of the host that are mapped here already, shared with another process perhaps, for
  /// every GPU of this one. They stay mapped until `unpin`.
  [[nodiscard]] virtual result<pinned_memory> pin(std::uint32_t device,
                                                  std::span<std::byte> memory) = 0;
  virtual void unpin(const pinned_memory& memory) noexcept = 0;

  // -- peers

  /// Whether kernels of `device` may touch memory of `peer`.
  [[nodiscard]] virtual bool reaches(std::uint32_t device, std::uint32_t peer) const = 0;
  /// Whether they may touch memory of a GPU of this host that the process does not see
  /// (CUDA_VISIBLE_DEVICES), once `open_memory` has opened it; why not, as a clause about that GPU, and what to do.
  [[nodiscard]] virtual usability reaches_unseen(std::uint32_t device,
                                                 const std::string& bus_id) const = 0;
  /// Of one that is seen: makes it so; idempotent. `backend_unavailable`.
  [[nodiscard]] virtual result<void> enable(std::uint32_t device, std::uint32_t peer) = 0;

  // -- work

  [[nodiscard]] virtual result<gpu_stream> make_stream(std::uint32_t device) = 0;
  virtual void release_stream(gpu_stream stream) noexcept = 0;
  [[nodiscard]] virtual result<gpu_event> make_event(std::uint32_t device) = 0;
  /// What another process exports an event with. `release_event` closes it. `invalid_config`: the
  /// driver does not know it as such; the sentence says what it wants.
  [[nodiscard]] virtual result<gpu_event> open_event(std::uint32_t device,
                                                     const event_handle& handle) = 0;
  virtual void release_event(gpu_event event) noexcept = 0;
  /// One run by the copy engine.
  [[nodiscard]] virtual result<void> copy(gpu_stream on, std::uint64_t to, std::uint64_t from,
                                          std::uint64_t bytes) = 0;
  [[nodiscard]] virtual result<void> launch(gpu_stream on, const copy_launch& what) = 0;
  /// The event happens when the work that the stream was given so far has ended.
  [[nodiscard]] virtual result<void> record(gpu_event event, gpu_stream on) = 0;
  /// Whether the event has happened; an error of the work before it comes out here.
  [[nodiscard]] virtual result<bool> happened(gpu_event event) = 0;
  /// What the stream is given from here on waits until `event`, one of the driver's own that its
  /// owner has recorded, has happened. The owner may record it again or release it afterwards.
  [[nodiscard]] virtual result<void> wait_for(gpu_stream on, void* event) = 0;
  /// Some more words. There is no call that gives one back: they are kept as long as the runtime, so
  /// that none is ever taken from under a stream that has yet to look at it.
  [[nodiscard]] virtual result<std::vector<gpu_word>> make_words(std::uint32_t device) = 0;
  /// What the stream, an engine's own, is given from here on waits until the host has written `value`
  /// or more to the word. `backend_unavailable`: the GPU or its driver cannot; `invalid_config`: the
  /// stream is none of this GPU, or its work is being captured for later.
  [[nodiscard]] virtual result<void> wait_at(gpu_stream on, const gpu_word& word,
                                             std::uint32_t value) = 0;
  /// Rings once when the work that the stream was given so far has ended well.
  [[nodiscard]] virtual result<void> ring_after(gpu_stream on, std::shared_ptr<bell> what) = 0;
};

/// The runtime that was built in. Looks for GPUs, which may take the driver a second.
[[nodiscard]] std::unique_ptr<gpu_runtime> make_gpu_runtime();

}  // namespace troupe::transport::xgmi
