#include "troupe/transport/xgmi/cuda_driver.hpp"

#include <array>
#include <atomic>
#include <mutex>

#include <cuda.h>

namespace troupe::transport::xgmi {

namespace {

/// The driver's functions; null where there is no driver.
struct driver {
  CUresult (*device_get)(CUdevice*, int){nullptr};
  CUresult (*retain)(CUcontext*, CUdevice){nullptr};
  CUresult (*get_current)(CUcontext*){nullptr};
  CUresult (*set_current)(CUcontext){nullptr};
  CUresult (*address_range)(CUdeviceptr*, std::size_t*, CUdeviceptr){nullptr};
  CUresult (*pointer_attribute)(void*, CUpointer_attribute, CUdeviceptr){nullptr};
  CUresult (*error_name)(CUresult, const char**){nullptr};
  // Newer functions; null with an older driver.
  CUresult (*range_handle)(void*, CUdeviceptr, std::size_t, CUmemRangeHandleType,
                           unsigned long long){nullptr};
  CUresult (*device_attribute)(int*, CUdevice_attribute, CUdevice){nullptr};
  CUresult (*wait_value)(CUstream, CUdeviceptr, cuuint32_t, unsigned){nullptr};

  driver() noexcept {
    find(device_get, "cuDeviceGet", 2000);
    find(retain, "cuDevicePrimaryCtxRetain", 7000);
    find(get_current, "cuCtxGetCurrent", 4000);
    find(set_current, "cuCtxSetCurrent", 4000);
    find(address_range, "cuMemGetAddressRange", 3020);
    find(pointer_attribute, "cuPointerGetAttribute", 4000);
    find(error_name, "cuGetErrorName", 6000);
    find(range_handle, "cuMemGetHandleForAddressRange", 11070);
    find(device_attribute, "cuDeviceGetAttribute", 2000);
    // Since this version it needs no option of the kernel module.
    find(wait_value, "cuStreamWaitValue32", 11070);
  }
  [[nodiscard]] bool complete() const noexcept {
    return device_get && retain && get_current && set_current && address_range &&
           pointer_attribute && error_name;
  }

 private:
  template <class Call>
  static void find(Call& call, const char* name, unsigned version) noexcept {
    void* found = nullptr;
    auto state = cudaDriverEntryPointSymbolNotFound;
    if (cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &state) ==
            cudaSuccess &&
        state == cudaDriverEntryPointSuccess) {
      call = reinterpret_cast<Call>(found);
    } else {
      static_cast<void>(cudaGetLastError());
    }
  }
};

const driver& calls() noexcept {
  static const driver found;
  return found;
}

constexpr std::size_t max_devices = 64;

/// Retained for the life of the process, as the runtime does it.
CUcontext primary_context(std::uint32_t device) noexcept {
  static std::mutex mutex;
  static std::array<std::atomic<CUcontext>, max_devices> known{};
  if (device >= max_devices || !calls().complete()) return nullptr;
  if (auto* found = known[device].load(std::memory_order_acquire); found != nullptr) return found;
  const std::lock_guard lock{mutex};
  CUdevice number = 0;
  CUcontext made = nullptr;
  if (calls().device_get(&number, static_cast<int>(device)) != CUDA_SUCCESS ||
      calls().retain(&made, number) != CUDA_SUCCESS) {
    return nullptr;
  }
  known[device].store(made, std::memory_order_release);
  return made;
}

}  // namespace

std::optional<gpu_allocation> cuda_allocation(const void* at) noexcept {
  const auto& driver = calls();
  if (!driver.complete()) return std::nullopt;
  const auto address = reinterpret_cast<CUdeviceptr>(at);
  const auto ask = [&](auto& value, CUpointer_attribute what) {
    return driver.pointer_attribute(&value, what, address) == CUDA_SUCCESS;
  };
  CUmemorytype type{};
  int device = 0;
  if (!ask(type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE) ||
      !ask(device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) || device < 0) {
    return std::nullopt;
  }
  unsigned managed = 0;
  if (ask(managed, CU_POINTER_ATTRIBUTE_IS_MANAGED) && managed != 0) return std::nullopt;
  gpu_allocation found;
  found.device = static_cast<std::uint32_t>(device);
  found.on_host = type == CU_MEMORYTYPE_HOST;
  CUdeviceptr begin = 0;
  std::size_t bytes = 0;
  const cuda_context_scope here{found.device};
  if ((found.on_host || driver.address_range(&begin, &bytes, address) != CUDA_SUCCESS) &&
      !(ask(begin, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR) &&
        ask(bytes, CU_POINTER_ATTRIBUTE_RANGE_SIZE))) {
    return std::nullopt;
  }
  unsigned long long number = 0;
  if (ask(number, CU_POINTER_ATTRIBUTE_BUFFER_ID)) found.id = number;
  found.base = reinterpret_cast<std::byte*>(begin);
  found.size = bytes;
  return found;
}

std::variant<int, std::string> cuda_dmabuf(std::uint32_t device, const std::byte* begin,
                                           std::uint64_t bytes) {
  const auto& driver = calls();
  if (!driver.complete() || driver.range_handle == nullptr) {
    return "the driver is older than CUDA 11.7";
  }
  const cuda_context_scope here{device};
  int fd = -1;
  const auto made = driver.range_handle(&fd, reinterpret_cast<CUdeviceptr>(begin), bytes,
                                        CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0);
  if (made == CUDA_SUCCESS) return fd;
  const char* name = nullptr;
  return driver.error_name(made, &name) == CUDA_SUCCESS ? name : "error " + std::to_string(made);
}

cudaError_t cuda_wait_at(std::uint32_t device, void* stream, std::uint64_t address,
                         std::uint32_t value) {
  const auto& driver = calls();
  if (driver.wait_value == nullptr) return cudaErrorNotSupported;
  const cuda_context_scope here{device};
  if (here.error() != cudaSuccess) return here.error();
  // Work behind the wait must see what NICs wrote before the host opened the gate.
  CUdevice number = 0;
  int flushes = 0;
  const bool can_flush =
      driver.device_attribute != nullptr &&
      driver.device_get(&number, static_cast<int>(device)) == CUDA_SUCCESS &&
      driver.device_attribute(&flushes, CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES, number) ==
          CUDA_SUCCESS &&
      flushes != 0;
  unsigned how = CU_STREAM_WAIT_VALUE_GEQ;
  if (can_flush) how |= CU_STREAM_WAIT_VALUE_FLUSH;
  // Runtime and driver use the same error numbers.
  return static_cast<cudaError_t>(
      driver.wait_value(static_cast<CUstream>(stream), address, value, how));
}

cuda_context_scope::cuda_context_scope(std::uint32_t device) noexcept {
  auto* const wanted = primary_context(device);
  if (wanted == nullptr) {
    error_ = cudaErrorInvalidDevice;
    return;
  }
  CUcontext current = nullptr;
  if (calls().get_current(&current) != CUDA_SUCCESS || current == wanted) return;
  if (calls().set_current(wanted) != CUDA_SUCCESS) {
    error_ = cudaErrorInvalidDevice;
    return;
  }
  before_ = current;
  moved_ = true;
}

cuda_context_scope::~cuda_context_scope() {
  if (moved_) calls().set_current(static_cast<CUcontext>(before_));
}

}  // namespace troupe::transport::xgmi
