#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <variant>

#include <unistd.h>

#include "troupe/transport/xgmi/gpu_error.hpp"
#include "troupe/transport/xgmi/gpu_runtime.hpp"
#include "troupe/transport/xgmi/hip_on_cuda.hpp"
#include "troupe/transport/xgmi/scatter_kernel.hpp"
#if defined(TROUPE_GPU_CUDA)
#include "troupe/transport/xgmi/cuda_driver.hpp"
#include "troupe/transport/xgmi/nvml_library.hpp"
#else
#include "troupe/transport/xgmi/hip_library.hpp"
#endif

// The runtime on a real driver, written with HIP's names.

namespace troupe::transport::xgmi {

namespace {

gpu_fault fault_of(hipError_t error) noexcept {
  switch (error) {
    case hipErrorNoDevice:
    case hipErrorInvalidDevice:
    case hipErrorInsufficientDriver: return gpu_fault::no_device;
    case hipErrorOutOfMemory: return gpu_fault::no_memory;
    case hipErrorPeerAccessUnsupported:
    case hipErrorNotSupported: return gpu_fault::not_permitted;
    case hipErrorMapFailed: return gpu_fault::bad_handle;
    case hipErrorInvalidValue: return gpu_fault::invalid;
    case hipErrorIllegalAddress:
    case hipErrorLaunchFailure:
    case hipErrorLaunchTimeOut:
    case hipErrorAssert:
    case hipErrorECCNotCorrectable:
    case hipErrorContextIsDestroyed: return gpu_fault::lost;
    default: return gpu_fault::other;
  }
}

#if defined(TROUPE_GPU_CUDA)
using on_device = cuda_context_scope;
#else
/// Makes a device current in the calling thread until the end of the scope.
class on_device {
 public:
  explicit on_device(std::uint32_t device) noexcept {
    const int wanted = static_cast<int>(device);
    if (hipGetDevice(&before_) != hipSuccess) before_ = wanted;
    if (before_ != wanted) error_ = hipSetDevice(wanted);
    moved_ = before_ != wanted;
  }
  on_device(const on_device&) = delete;
  on_device& operator=(const on_device&) = delete;
  ~on_device() {
    if (moved_) static_cast<void>(hipSetDevice(before_));
  }
  [[nodiscard]] hipError_t error() const noexcept { return error_; }

 private:
  int before_{0};
  bool moved_{false};
  hipError_t error_{hipSuccess};
};
#endif

/// The argument of the host function of `ring_after`: the bell to ring.
struct ring_call {
  std::shared_ptr<bell> what;
};

void ring_it(void* call) {
  const std::unique_ptr<ring_call> mine{static_cast<ring_call*>(call)};
  mine->what->ring();
}

/// Makes the driver call `ring_it` behind the stream's work.
hipError_t call_after(hipStream_t stream, ring_call* call) {
#if defined(TROUPE_GPU_CUDA)
  return cudaLaunchHostFunc(stream, ring_it, call);
#else
  // Older releases declare hipLaunchHostFunc but lack it. This callback is also made after an
  // error.
  const auto ring_if_well = [](hipStream_t, hipError_t status, void* mine) {
    if (status == hipSuccess) {
      ring_it(mine);
    } else {
      const std::unique_ptr<ring_call> unrung{static_cast<ring_call*>(mine)};
    }
  };
  return hipStreamAddCallback(stream, ring_if_well, call, 0);
#endif
}

/// Whole pages as a dma-buf, or the driver's reason.
std::variant<exported_memory, std::string> dmabuf_of(std::uint32_t device, const std::byte* begin,
                                                     std::uint64_t bytes) {
#if defined(TROUPE_GPU_CUDA)
  auto made = cuda_dmabuf(device, begin, bytes);
  if (auto* why = std::get_if<std::string>(&made)) return std::move(*why);
  return exported_memory{.dmabuf = std::get<int>(made)};
#else
  // A function of the runtime below HIP, which is loaded with it; missing before ROCm 5.5.
  static_cast<void>(device);
  using export_call = int(const void*, std::size_t, int*, std::uint64_t*);
  static auto* const call =
      reinterpret_cast<export_call*>(hip_function("hsa_amd_portable_export_dmabuf"));
  if (call == nullptr) return "this release of ROCm exports none";
  exported_memory made;
  const int status = call(begin, bytes, &made.dmabuf, &made.offset);
  if (status != 0) return "status " + std::to_string(status);
  return made;
#endif
}

/// Makes words for streams of the current device.
hipError_t add_words(std::uint32_t device, std::vector<gpu_word>& words) {
  constexpr std::size_t page = 4096;
#if defined(TROUPE_GPU_CUDA)
  void* host = nullptr;
  void* seen = nullptr;
  auto error = hipHostMalloc(&host, page, hipHostMallocMapped | hipHostMallocPortable);
  if (error == hipSuccess) error = hipHostGetDevicePointer(&seen, host, 0);
  if (error != hipSuccess) return error;
  std::memset(host, 0, page);
  auto* const first = static_cast<std::uint32_t*>(host);
  for (std::size_t at = 0; at < page; at += sizeof *first) {
    words.push_back(
        {device, first + at / sizeof *first, reinterpret_cast<std::uintptr_t>(seen) + at});
  }
  return hipSuccess;
#else
  int can = 0;
  const auto asked = hipDeviceGetAttribute(&can, hipDeviceAttributeCanUseStreamWaitValue,
                                           static_cast<int>(device));
  if (asked != hipSuccess || can == 0) return hipErrorNotSupported;
  // Streams can wait only at signals, each of which is an allocation of its own.
  for (std::size_t made = 0; made < page; made += 128) {
    void* signal = nullptr;
    const auto error = hipExtMallocWithFlags(&signal, 8, hipMallocSignalMemory);
    if (error != hipSuccess) return words.empty() ? error : hipSuccess;
    std::memset(signal, 0, 8);
    words.push_back(
        {device, static_cast<std::uint32_t*>(signal), reinterpret_cast<std::uintptr_t>(signal)});
  }
  return hipSuccess;
#endif
}

hipError_t wait_at_word(hipStream_t stream, const gpu_word& word, std::uint32_t value) {
#if defined(TROUPE_GPU_CUDA)
  return cuda_wait_at(word.device, stream, word.device_address, value);
#else
  return hipStreamWaitValue32(stream, reinterpret_cast<void*>(word.device_address), value,
                              hipStreamWaitValueGte, 0xFFFFFFFF);
#endif
}

std::uint32_t queues_of_process() {
#if defined(TROUPE_GPU_CUDA)
  const char* const told = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  constexpr int otherwise = 8;
#else
  const char* const told = std::getenv("GPU_MAX_HW_QUEUES");
  constexpr int otherwise = 4;
#endif
  const int queues = told != nullptr ? std::atoi(told) : 0;
  return static_cast<std::uint32_t>(queues < 1 ? otherwise : std::min(queues, 32));
}

std::string bus_id_of(int device) {
  char text[32] = {};
  if (hipDeviceGetPCIBusId(text, sizeof text, device) != hipSuccess) return {};
  std::string id{text};
  std::ranges::transform(id, id.begin(), [](unsigned char c) { return std::tolower(c); });
  return id;
}

class hip_runtime final : public gpu_runtime {
 public:
  hip_runtime() {
    int count = 0;
    if (const auto error = hipGetDeviceCount(&count); error != hipSuccess || count == 0) {
      static_cast<void>(hipGetLastError());
      why_not_ = std::string{"no GPU: "} +
                 (error != hipSuccess ? hipGetErrorString(error) : "the driver shows none");
      return;
    }
    for (int i = 0; i < count; ++i) {
      // A device whose properties cannot be read keeps its index, as the driver counts it.
      hipDeviceProp_t properties{};
      const bool known = hipGetDeviceProperties(&properties, i) == hipSuccess;
      if (!known) static_cast<void>(hipGetLastError());
      devices_.push_back({.bus_id = bus_id_of(i),
                          .name = known ? properties.name : "unknown",
                          .processors = static_cast<std::uint32_t>(properties.multiProcessorCount),
                          .bulk_copies = false,
                          .queues = queues_of_process()});
#if defined(TROUPE_GPU_CUDA)
      devices_.back().bulk_copies = known && properties.major >= 9;
#endif
    }
    prepared_ = std::make_unique<std::once_flag[]>(devices_.size());
  }

  [[nodiscard]] const char* kind() const noexcept override {
    return gpu_kind;
  }

  [[nodiscard]] usability state() const override {
    const std::lock_guard lock{mutex_};
    if (!why_not_.empty()) return {false, why_not_};
    return {true, std::to_string(devices_.size()) + " GPUs by " + gpu_kind};
  }

  [[nodiscard]] const std::vector<gpu_device>& devices() const override {
    return devices_;
  }

  [[nodiscard]] std::optional<gpu_allocation> find(const void* at) const override;
  [[nodiscard]] result<std::byte*> allocate(std::uint32_t device, std::uint64_t size) override;
  void release(std::uint32_t device, std::byte* base) noexcept override;
  [[nodiscard]] result<void> copy_now(std::byte* to, const std::byte* from,
                                      std::uint64_t bytes) override;
  [[nodiscard]] result<memory_handle> export_memory(const gpu_allocation& of) override;
  [[nodiscard]] result<exported_memory> export_dmabuf(const gpu_allocation& of,
                                                      std::span<const std::byte> memory) override;
  [[nodiscard]] result<std::byte*> open_memory(std::uint32_t device,
                                               const memory_handle& handle) override;
  void close_memory(std::uint32_t device, std::byte* base) noexcept override;
  [[nodiscard]] result<pinned_memory> allocate_pinned(std::uint32_t device,
                                                      std::size_t size) override;
  void release_pinned(const pinned_memory& memory) noexcept override;
  [[nodiscard]] result<pinned_memory> pin(std::uint32_t device,
                                          std::span<std::byte> memory) override;
  void unpin(const pinned_memory& memory) noexcept override;
  [[nodiscard]] bool reaches(std::uint32_t device, std::uint32_t peer) const override;
  [[nodiscard]] usability reaches_unseen(std::uint32_t device,
                                         const std::string& bus_id) const override;
  [[nodiscard]] result<void> enable(std::uint32_t device, std::uint32_t peer) override;
  [[nodiscard]] result<gpu_stream> make_stream(std::uint32_t device) override;
  void release_stream(gpu_stream stream) noexcept override;
  [[nodiscard]] result<gpu_event> make_event(std::uint32_t device) override;
  [[nodiscard]] result<gpu_event> open_event(std::uint32_t device,
                                             const event_handle& handle) override;
  void release_event(gpu_event event) noexcept override;
  [[nodiscard]] result<void> copy(gpu_stream on, std::uint64_t to, std::uint64_t from,
                                  std::uint64_t bytes) override;
  [[nodiscard]] result<void> launch(gpu_stream on, const copy_launch& what) override;
  [[nodiscard]] result<void> record(gpu_event event, gpu_stream on) override;
  [[nodiscard]] result<bool> happened(gpu_event event) override;
  [[nodiscard]] result<void> wait_for(gpu_stream on, void* event) override;
  [[nodiscard]] result<std::vector<gpu_word>> make_words(std::uint32_t device) override;
  [[nodiscard]] result<void> wait_at(gpu_stream on, const gpu_word& word,
                                     std::uint32_t value) override;
  [[nodiscard]] result<void> ring_after(gpu_stream on, std::shared_ptr<bell> what) override;

 private:
  [[nodiscard]] std::string name(std::uint32_t device) const {
    return device < devices_.size() ? devices_[device].bus_id : std::string{};
  }
  [[nodiscard]] static unexpected not_seen(std::uint32_t device) {
    return fail(errc::no_device,
                "GPU " + std::to_string(device) + " is not one that this process sees");
  }
  /// Makes the error of a failed call, and records a lost GPU.
  [[nodiscard]] unexpected refused(std::uint32_t device, const char* call, hipError_t error) const {
    static_cast<void>(hipGetLastError());  // otherwise the next launch would report this error
    const auto fault = fault_of(error);
    auto said = gpu_error(fault, name(device), call, hipGetErrorString(error));
    if (fault == gpu_fault::lost) {
      const std::lock_guard lock{mutex_};
      if (why_not_.empty()) why_not_ = said.message;
    }
    return fail(std::move(said));
  }
  /// Runs `call` with `device` current.
  template <class Call>
  [[nodiscard]] result<void> at(std::uint32_t device, const char* what, Call call) const {
    if (device >= devices_.size()) return not_seen(device);
    const on_device here{device};
    if (here.error() != hipSuccess) return refused(device, "the use of the GPU", here.error());
    if (const hipError_t error = call(); error != hipSuccess) return refused(device, what, error);
    return {};
  }

  /// Prepares the current device once: before our first stream is made, and before an engine's
  /// stream is held.
  void prepare(std::uint32_t device) {
    std::call_once(prepared_[device], [&] {
      static_cast<void>(load_copies());
      if (devices_[device].bulk_copies && !prepare_bulk_copies()) {
        devices_[device].bulk_copies = false;
      }
    });
  }

  std::vector<gpu_device> devices_;
  mutable std::mutex mutex_;
  mutable std::string why_not_;
  std::set<std::pair<std::uint32_t, std::uint32_t>> enabled_;
  std::unique_ptr<std::once_flag[]> prepared_;  ///< by device
};

// -- memory

std::optional<gpu_allocation> hip_runtime::find(const void* at) const {
  if (devices_.empty()) return std::nullopt;
#if defined(TROUPE_GPU_CUDA)
  return cuda_allocation(at);
#else
  hipPointerAttribute_t about{};
  const bool known = hipPointerGetAttributes(&about, at) == hipSuccess;
  const bool of_device = known && about.memoryType == hipMemoryTypeDevice;
  const bool of_host = known && about.memoryType == hipMemoryTypeHost;
  hipDeviceptr_t base = nullptr;
  std::size_t size = 0;
  const bool found = (of_device || of_host) && about.isManaged == 0 &&
                     hipMemGetAddressRange(&base, &size, const_cast<void*>(at)) == hipSuccess;
  static_cast<void>(hipGetLastError());
  if (!found) return std::nullopt;
  return gpu_allocation{.device = static_cast<std::uint32_t>(std::max(about.device, 0)),
                        .base = static_cast<std::byte*>(base),
                        .size = size,
                        .id = 0,
                        .on_host = of_host};
#endif
}

result<std::byte*> hip_runtime::allocate(std::uint32_t device, std::uint64_t size) {
  void* made = nullptr;
  if (auto ok = at(device, "hipMalloc", [&] { return hipMalloc(&made, size); }); !ok) {
    return fail(ok.error().code, ok.error().message + " (" + std::to_string(size) + " bytes)");
  }
  return static_cast<std::byte*>(made);
}

void hip_runtime::release(std::uint32_t device, std::byte* base) noexcept {
  const on_device here{device};
  static_cast<void>(hipFree(base));
}

result<void> hip_runtime::copy_now(std::byte* to, const std::byte* from, std::uint64_t bytes) {
  auto where = find(from);
  if (!where) where = find(to);
  const auto device = where ? where->device : 0;
  return at(device, "hipMemcpy", [&] {
    const auto error = hipMemcpy(to, from, bytes, hipMemcpyDefault);
    return error != hipSuccess ? error : hipStreamSynchronize(nullptr);
  });
}

result<memory_handle> hip_runtime::export_memory(const gpu_allocation& of) {
  hipIpcMemHandle_t made;
  if (auto ok =
          at(of.device, "hipIpcGetMemHandle", [&] { return hipIpcGetMemHandle(&made, of.base); });
      !ok) {
    return fail(errc::backend_unavailable,
                ok.error().message +
                    "; memory of another kind than hipMalloc's or cudaMalloc's (PyTorch: "
                    "expandable segments, managed or pinned memory) cannot be lent to a process");
  }
  memory_handle bytes{};
  static_assert(sizeof made == sizeof bytes);
  std::memcpy(bytes.data(), &made, sizeof made);
  return bytes;
}

result<exported_memory> hip_runtime::export_dmabuf(const gpu_allocation& of,
                                                   std::span<const std::byte> memory) {
  if (of.device >= devices_.size()) return not_seen(of.device);
  // Drivers export whole pages of the host's page size.
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<std::uintptr_t>(memory.data()) / page * page;
  const auto end =
      (reinterpret_cast<std::uintptr_t>(memory.data()) + memory.size() + page - 1) / page * page;
  const auto made = dmabuf_of(of.device, reinterpret_cast<const std::byte*>(begin), end - begin);
  if (const auto* why = std::get_if<std::string>(&made)) {
    return fail(gpu_error(gpu_fault::not_permitted, name(of.device), "export as a dma-buf", *why));
  }
  auto exported = std::get<exported_memory>(made);
  exported.offset += reinterpret_cast<std::uintptr_t>(memory.data()) - begin;
  return exported;
}

result<std::byte*> hip_runtime::open_memory(std::uint32_t device, const memory_handle& handle) {
  hipIpcMemHandle_t wanted;
  std::memcpy(&wanted, handle.data(), sizeof wanted);
  void* opened = nullptr;
  if (auto ok =
          at(device, "hipIpcOpenMemHandle",
             [&] { return hipIpcOpenMemHandle(&opened, wanted, hipIpcMemLazyEnablePeerAccess); });
      !ok) {
    return fail(std::move(ok).error());
  }
  return static_cast<std::byte*>(opened);
}

void hip_runtime::close_memory(std::uint32_t device, std::byte* base) noexcept {
  const on_device here{device};
  static_cast<void>(hipIpcCloseMemHandle(base));
  static_cast<void>(hipGetLastError());
}

result<pinned_memory> hip_runtime::allocate_pinned(std::uint32_t device, std::size_t size) {
  void* host = nullptr;
  void* seen = nullptr;
  auto ok = at(device, "hipHostMalloc", [&] {
    const auto error = hipHostMalloc(&host, size, hipHostMallocMapped | hipHostMallocPortable);
    return error != hipSuccess ? error : hipHostGetDevicePointer(&seen, host, 0);
  });
  if (!ok) return fail(std::move(ok).error());
  return pinned_memory{static_cast<std::byte*>(host), reinterpret_cast<std::uintptr_t>(seen), size};
}

void hip_runtime::release_pinned(const pinned_memory& memory) noexcept {
  static_cast<void>(hipHostFree(memory.host));
}

result<pinned_memory> hip_runtime::pin(std::uint32_t device, std::span<std::byte> memory) {
  void* seen = nullptr;
  auto ok = at(device, "hipHostRegister", [&] {
    const auto error = hipHostRegister(memory.data(), memory.size(),
                                       hipHostRegisterMapped | hipHostRegisterPortable);
    if (error != hipSuccess) return error;
    const auto found = hipHostGetDevicePointer(&seen, memory.data(), 0);
    if (found != hipSuccess) static_cast<void>(hipHostUnregister(memory.data()));
    return found;
  });
  if (!ok) return fail(std::move(ok).error());
  return pinned_memory{memory.data(), reinterpret_cast<std::uintptr_t>(seen), memory.size()};
}

void hip_runtime::unpin(const pinned_memory& memory) noexcept {
  static_cast<void>(hipHostUnregister(memory.host));
}

// -- peers

bool hip_runtime::reaches(std::uint32_t device, std::uint32_t peer) const {
  if (device >= devices_.size() || peer >= devices_.size()) return false;
  if (device == peer) return true;
  int can = 0;
  const auto error = hipDeviceCanAccessPeer(&can, static_cast<int>(device), static_cast<int>(peer));
  if (error != hipSuccess) static_cast<void>(hipGetLastError());
  return error == hipSuccess && can != 0;
}

usability hip_runtime::reaches_unseen(std::uint32_t device, const std::string& bus_id) const {
#if defined(TROUPE_GPU_CUDA)
  return nvml_reaches(name(device), bus_id);
#else
  static_cast<void>(device);
  static_cast<void>(bus_id);
  return {false,
          "HIP opens memory only of GPUs that it sees; let it see both (HIP_VISIBLE_DEVICES)"};
#endif
}

result<void> hip_runtime::enable(std::uint32_t device, std::uint32_t peer) {
  if (device == peer) return {};
  {
    const std::lock_guard lock{mutex_};
    if (enabled_.contains({device, peer})) return {};
  }
  if (!reaches(device, peer)) {
    return fail(errc::backend_unavailable, "GPU " + name(device) +
                                               " does not reach the memory of GPU " + name(peer) +
                                               ": no link between them, or the driver forbids it");
  }
  auto ok = at(device, "hipDeviceEnablePeerAccess", [&] {
    const auto error = hipDeviceEnablePeerAccess(static_cast<int>(peer), 0);
    if (error != hipErrorPeerAccessAlreadyEnabled) return error;
    static_cast<void>(hipGetLastError());
    return hipSuccess;
  });
  if (!ok) return ok;
  const std::lock_guard lock{mutex_};
  enabled_.insert({device, peer});
  return {};
}

// -- work

result<gpu_stream> hip_runtime::make_stream(std::uint32_t device) {
  hipStream_t made = nullptr;
  auto ok = at(device, "hipStreamCreate", [&] {
    prepare(device);
    // A transfer takes a small share of the GPU and should get it at once.
    int least = 0;
    int greatest = 0;
    static_cast<void>(hipDeviceGetStreamPriorityRange(&least, &greatest));
    return hipStreamCreateWithPriority(&made, hipStreamNonBlocking, greatest);
  });
  if (!ok) return fail(std::move(ok).error());
  return gpu_stream{device, made};
}

void hip_runtime::release_stream(gpu_stream stream) noexcept {
  const on_device here{stream.device};
  static_cast<void>(hipStreamDestroy(static_cast<hipStream_t>(stream.handle)));
}

result<gpu_event> hip_runtime::make_event(std::uint32_t device) {
  hipEvent_t made = nullptr;
  auto ok = at(device, "hipEventCreate",
               [&] { return hipEventCreateWithFlags(&made, hipEventDisableTiming); });
  if (!ok) return fail(std::move(ok).error());
  return gpu_event{device, made};
}

result<gpu_event> hip_runtime::open_event(std::uint32_t device, const event_handle& handle) {
  hipIpcEventHandle_t wanted;
  static_assert(sizeof wanted == sizeof handle);
  std::memcpy(&wanted, handle.data(), sizeof wanted);
  hipEvent_t opened = nullptr;
  auto ok =
      at(device, "hipIpcOpenEventHandle", [&] { return hipIpcOpenEventHandle(&opened, wanted); });
  if (ok) return gpu_event{device, opened};
  const auto code = ok.error().code;
  if (code == errc::no_device || code == errc::backend_unavailable) {
    return fail(std::move(ok).error());
  }
  return fail(errc::invalid_config, ok.error().message + std::string{foreign_event});
}

void hip_runtime::release_event(gpu_event event) noexcept {
  const on_device here{event.device};
  static_cast<void>(hipEventDestroy(static_cast<hipEvent_t>(event.handle)));
}

result<void> hip_runtime::copy(gpu_stream on, std::uint64_t to, std::uint64_t from,
                               std::uint64_t bytes) {
  return at(on.device, "hipMemcpyAsync", [&] {
    return hipMemcpyAsync(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes,
                          hipMemcpyDefault, static_cast<hipStream_t>(on.handle));
  });
}

result<void> hip_runtime::launch(gpu_stream on, const copy_launch& what) {
  return at(on.device, "the launch of a copy",
            [&] { return static_cast<hipError_t>(launch_copy(on.handle, what)); });
}

result<void> hip_runtime::record(gpu_event event, gpu_stream on) {
  return at(on.device, "hipEventRecord", [&] {
    return hipEventRecord(static_cast<hipEvent_t>(event.handle),
                          static_cast<hipStream_t>(on.handle));
  });
}

result<bool> hip_runtime::happened(gpu_event event) {
  const on_device here{event.device};  // otherwise the driver makes a context on the first GPU
  const auto error = hipEventQuery(static_cast<hipEvent_t>(event.handle));
  if (error == hipSuccess) return true;
  if (error == hipErrorNotReady) {
    static_cast<void>(hipGetLastError());
    return false;
  }
  return refused(event.device, "a copy", error);
}

result<void> hip_runtime::wait_for(gpu_stream on, void* event) {
  return at(on.device, "hipStreamWaitEvent", [&] {
    return hipStreamWaitEvent(static_cast<hipStream_t>(on.handle), static_cast<hipEvent_t>(event),
                              0);
  });
}

result<std::vector<gpu_word>> hip_runtime::make_words(std::uint32_t device) {
  std::vector<gpu_word> made;
  auto ok = at(device, "words that streams wait at", [&] {
    prepare(device);
    return add_words(device, made);
  });
  if (!ok) return fail(std::move(ok).error());
  return made;
}

result<void> hip_runtime::wait_at(gpu_stream on, const gpu_word& word, std::uint32_t value) {
  const auto stream = static_cast<hipStream_t>(on.handle);
  bool captured = false;
  auto ok = at(on.device, "the wait of a stream", [&] {
    hipStreamCaptureStatus capture{};
    const auto error = hipStreamIsCapturing(stream, &capture);
    captured = error == hipSuccess && capture != hipStreamCaptureStatusNone;
    if (error != hipSuccess || captured) return error;
    return wait_at_word(stream, word, value);
  });
  if (ok && !captured) return {};
  const auto code = captured ? errc::invalid_config : ok.error().code;
  if (code == errc::no_device || code == errc::backend_unavailable) return ok;
  return fail(errc::invalid_config,
              (captured ? std::string{"the stream's work is being captured"} : ok.error().message) +
                  "; name a stream of GPU " + name(on.device) +
                  " whose work is not being captured for a graph");
}

result<void> hip_runtime::ring_after(gpu_stream on, std::shared_ptr<bell> what) {
  auto call = std::make_unique<ring_call>(std::move(what));
  auto ok = at(on.device, "a call behind a copy",
               [&] { return call_after(static_cast<hipStream_t>(on.handle), call.get()); });
  if (ok) static_cast<void>(call.release());  // `ring_it` owns it now
  return ok;
}

}  // namespace

std::unique_ptr<gpu_runtime> make_gpu_runtime() {
  return std::make_unique<hip_runtime>();
}

}  // namespace troupe::transport::xgmi
