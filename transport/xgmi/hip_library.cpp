#include "troupe/transport/xgmi/hip_library.hpp"

#include <cstddef>
#include <cstdint>
#include <string>

#include <dlfcn.h>
#include <hip/hip_runtime_api.h>
#include <hip/hip_version.h>

// NOLINTBEGIN(cppcoreguidelines-macro-usage): a function's name, its parameters and their names, once each
#define TROUPE_QUOTED(text) #text
#define TROUPE_TEXT(text) TROUPE_QUOTED(text)
/// Hides a symbol from other libraries of the process, so that PyTorch's references to the runtime
/// do not resolve to ours. Done in the assembler, since the headers declare default visibility to
/// the compiler.
#define TROUPE_HIDDEN(name) __asm__(".hidden " TROUPE_TEXT(name))
/// Defines a function of the runtime. The headers rename some functions with macros.
#define TROUPE_HAND_ON(name, parameters, arguments)                                     \
  TROUPE_HIDDEN(name);                                                                  \
  hipError_t name parameters {                                                          \
    using call = hipError_t parameters;                                                 \
    static auto* const real = reinterpret_cast<call*>(hip_function(TROUPE_TEXT(name))); \
    return real != nullptr ? real arguments : absent();                                 \
  }
// NOLINTEND(cppcoreguidelines-macro-usage)

namespace troupe::transport::xgmi {

namespace {

/// The release of the headers compiled against; other releases may have different structs.
constexpr const char* file = "libamdhip64.so." TROUPE_TEXT(HIP_VERSION_MAJOR);
/// Where AMD's packages install it; the loader may not search there.
constexpr const char* own_place = "/opt/rocm/lib/libamdhip64.so." TROUPE_TEXT(HIP_VERSION_MAJOR);

struct opened_library {
  void* handle{::dlopen(file, RTLD_NOW | RTLD_LOCAL)};
  std::string trouble;

  opened_library() {
    if (handle != nullptr) return;
    const char* why = ::dlerror();
    trouble = why != nullptr ? why : std::string{file} + " cannot be opened";
    handle = ::dlopen(own_place, RTLD_NOW | RTLD_LOCAL);
  }
};

/// Never closed: the library has threads of its own.
const opened_library& library() {
  static const opened_library opened;
  return opened;
}

/// The result of a call that the library does not have, or that needs a library this host lacks.
hipError_t absent() {
  return library().handle == nullptr ? hipErrorNoDevice : hipErrorNotSupported;
}

}  // namespace

void* hip_function(const char* name) {
  return library().handle == nullptr ? nullptr : ::dlsym(library().handle, name);
}

}  // namespace troupe::transport::xgmi

using troupe::transport::xgmi::absent;
using troupe::transport::xgmi::hip_function;
using troupe::transport::xgmi::library;

extern "C" {

// -- errors

TROUPE_HIDDEN(hipGetErrorString);
const char* hipGetErrorString(hipError_t error) {
  using call = const char*(hipError_t);
  static auto* const real = reinterpret_cast<call*>(hip_function("hipGetErrorString"));
  return real != nullptr ? real(error) : library().trouble.c_str();
}
TROUPE_HAND_ON(hipGetLastError, (), ())

// -- devices

TROUPE_HAND_ON(hipGetDeviceCount, (int* count), (count))
TROUPE_HAND_ON(hipGetDevice, (int* device), (device))
TROUPE_HAND_ON(hipSetDevice, (int device), (device))
TROUPE_HAND_ON(hipGetDeviceProperties, (hipDeviceProp_t * properties, int device),
               (properties, device))
TROUPE_HAND_ON(hipDeviceGetAttribute, (int* value, hipDeviceAttribute_t what, int device),
               (value, what, device))
TROUPE_HAND_ON(hipDeviceGetPCIBusId, (char* id, int size, int device), (id, size, device))
TROUPE_HAND_ON(hipDeviceCanAccessPeer, (int* can, int device, int peer), (can, device, peer))
TROUPE_HAND_ON(hipDeviceEnablePeerAccess, (int peer, unsigned flags), (peer, flags))
TROUPE_HAND_ON(hipDeviceGetStreamPriorityRange, (int* least, int* greatest), (least, greatest))

// -- memory

TROUPE_HAND_ON(hipMalloc, (void** memory, std::size_t size), (memory, size))
TROUPE_HAND_ON(hipExtMallocWithFlags, (void** memory, std::size_t size, unsigned flags),
               (memory, size, flags))
TROUPE_HAND_ON(hipFree, (void* memory), (memory))
TROUPE_HAND_ON(hipHostMalloc, (void** memory, std::size_t size, unsigned flags),
               (memory, size, flags))
TROUPE_HAND_ON(hipHostFree, (void* memory), (memory))
TROUPE_HAND_ON(hipHostRegister, (void* memory, std::size_t size, unsigned flags),
               (memory, size, flags))
TROUPE_HAND_ON(hipHostUnregister, (void* memory), (memory))
TROUPE_HAND_ON(hipHostGetDevicePointer, (void** seen, void* memory, unsigned flags),
               (seen, memory, flags))
TROUPE_HAND_ON(hipPointerGetAttributes, (hipPointerAttribute_t * about, const void* memory),
               (about, memory))
TROUPE_HAND_ON(hipMemGetAddressRange,
               (hipDeviceptr_t * base, std::size_t* size, hipDeviceptr_t memory),
               (base, size, memory))
TROUPE_HAND_ON(hipMemcpy, (void* to, const void* from, std::size_t size, hipMemcpyKind kind),
               (to, from, size, kind))
TROUPE_HAND_ON(hipMemcpyAsync,
               (void* to, const void* from, std::size_t size, hipMemcpyKind kind,
                hipStream_t stream),
               (to, from, size, kind, stream))
TROUPE_HAND_ON(hipIpcGetMemHandle, (hipIpcMemHandle_t * handle, void* memory), (handle, memory))
TROUPE_HAND_ON(hipIpcOpenMemHandle, (void** memory, hipIpcMemHandle_t handle, unsigned flags),
               (memory, handle, flags))
TROUPE_HAND_ON(hipIpcCloseMemHandle, (void* memory), (memory))

// -- streams and events

TROUPE_HAND_ON(hipStreamCreateWithPriority, (hipStream_t * stream, unsigned flags, int priority),
               (stream, flags, priority))
TROUPE_HAND_ON(hipStreamDestroy, (hipStream_t stream), (stream))
TROUPE_HAND_ON(hipStreamSynchronize, (hipStream_t stream), (stream))
TROUPE_HAND_ON(hipStreamWaitEvent, (hipStream_t stream, hipEvent_t event, unsigned flags),
               (stream, event, flags))
TROUPE_HAND_ON(hipStreamWaitValue32,
               (hipStream_t stream, void* word, std::uint32_t value, unsigned flags,
                std::uint32_t mask),
               (stream, word, value, flags, mask))
TROUPE_HAND_ON(hipStreamIsCapturing, (hipStream_t stream, hipStreamCaptureStatus* status),
               (stream, status))
TROUPE_HAND_ON(hipStreamAddCallback,
               (hipStream_t stream, hipStreamCallback_t then, void* of, unsigned flags),
               (stream, then, of, flags))
TROUPE_HAND_ON(hipEventCreateWithFlags, (hipEvent_t * event, unsigned flags), (event, flags))
TROUPE_HAND_ON(hipEventDestroy, (hipEvent_t event), (event))
TROUPE_HAND_ON(hipEventRecord, (hipEvent_t event, hipStream_t stream), (event, stream))
TROUPE_HAND_ON(hipEventQuery, (hipEvent_t event), (event))
TROUPE_HAND_ON(hipIpcOpenEventHandle, (hipEvent_t * event, hipIpcEventHandle_t handle),
               (event, handle))

// -- kernels

TROUPE_HAND_ON(hipFuncGetAttributes, (hipFuncAttributes * about, const void* kernel),
               (about, kernel))
TROUPE_HAND_ON(hipLaunchKernel,
               (const void* kernel, dim3 blocks, dim3 threads, void** arguments, std::size_t shared,
                hipStream_t stream),
               (kernel, blocks, threads, arguments, shared, stream))

// Functions that the compiler calls: at each launch, and at the start and end of a program.

TROUPE_HAND_ON(__hipPushCallConfiguration,
               (dim3 blocks, dim3 threads, std::size_t shared, hipStream_t stream),
               (blocks, threads, shared, stream))
TROUPE_HAND_ON(__hipPopCallConfiguration,
               (dim3 * blocks, dim3* threads, std::size_t* shared, hipStream_t* stream),
               (blocks, threads, shared, stream))

// Reserved names, chosen by the compiler.
// NOLINTBEGIN(bugprone-reserved-identifier)
TROUPE_HIDDEN(__hipRegisterFatBinary);
void** __hipRegisterFatBinary(const void* kernels) {
  using call = void**(const void*);
  static auto* const real = reinterpret_cast<call*>(hip_function("__hipRegisterFatBinary"));
  return real != nullptr ? real(kernels) : nullptr;
}

TROUPE_HIDDEN(__hipRegisterFunction);
void __hipRegisterFunction(void** binary, const void* here, char* there, const char* name,
                           unsigned limit, void* thread, void* block, void* threads, void* blocks,
                           int* warp) {
  using call =
      void(void**, const void*, char*, const char*, unsigned, void*, void*, void*, void*, int*);
  static auto* const real = reinterpret_cast<call*>(hip_function("__hipRegisterFunction"));
  if (real != nullptr) real(binary, here, there, name, limit, thread, block, threads, blocks, warp);
}

TROUPE_HIDDEN(__hipUnregisterFatBinary);
void __hipUnregisterFatBinary(void** binary) {
  using call = void(void**);
  static auto* const real = reinterpret_cast<call*>(hip_function("__hipUnregisterFatBinary"));
  if (real != nullptr && binary != nullptr) real(binary);
}
// NOLINTEND(bugprone-reserved-identifier)

}  // extern "C"

#undef TROUPE_HAND_ON
#undef TROUPE_HIDDEN
#undef TROUPE_TEXT
#undef TROUPE_QUOTED
