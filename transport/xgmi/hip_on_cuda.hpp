#pragma once

/// The few HIP calls that Troupe makes: unchanged for AMD, mapped to their CUDA names for NVIDIA.
/// (The header that does this for all of HIP does not compile against CUDA 13.)

#if defined(TROUPE_GPU_HIP)

#include <hip/hip_runtime.h>

namespace troupe::transport::xgmi {
inline constexpr const char* gpu_kind = "hip";
}

#elif defined(TROUPE_GPU_CUDA)

#include <cuda_runtime_api.h>

namespace troupe::transport::xgmi {
inline constexpr const char* gpu_kind = "cuda";
}

// NOLINTBEGIN(cppcoreguidelines-macro-usage): names of functions and of constants alike
#define hipError_t cudaError_t
#define hipSuccess cudaSuccess
#define hipErrorNotReady cudaErrorNotReady
#define hipErrorNoDevice cudaErrorNoDevice
#define hipErrorOutOfMemory cudaErrorMemoryAllocation
#define hipErrorPeerAccessAlreadyEnabled cudaErrorPeerAccessAlreadyEnabled
#define hipErrorPeerAccessUnsupported cudaErrorPeerAccessUnsupported
#define hipErrorInvalidDevice cudaErrorInvalidDevice
#define hipErrorInvalidValue cudaErrorInvalidValue
#define hipErrorNotSupported cudaErrorNotSupported
#define hipErrorMapFailed cudaErrorMapBufferObjectFailed
#define hipErrorIllegalAddress cudaErrorIllegalAddress
#define hipErrorLaunchFailure cudaErrorLaunchFailure
#define hipErrorLaunchTimeOut cudaErrorLaunchTimeout
#define hipErrorAssert cudaErrorAssert
#define hipErrorECCNotCorrectable cudaErrorECCUncorrectable
#define hipErrorContextIsDestroyed cudaErrorContextIsDestroyed
#define hipErrorInsufficientDriver cudaErrorInsufficientDriver
#define hipErrorUnknown cudaErrorUnknown
#define hipGetErrorString cudaGetErrorString
#define hipGetLastError cudaGetLastError
#define hipGetDeviceCount cudaGetDeviceCount
#define hipDeviceProp_t cudaDeviceProp
#define hipGetDeviceProperties cudaGetDeviceProperties
#define hipDeviceGetPCIBusId cudaDeviceGetPCIBusId
#define hipDeviceCanAccessPeer cudaDeviceCanAccessPeer
#define hipDeviceEnablePeerAccess cudaDeviceEnablePeerAccess
#define hipGetDevice cudaGetDevice
#define hipSetDevice cudaSetDevice
#define hipMalloc cudaMalloc
#define hipFree cudaFree
#define hipMemcpyAsync cudaMemcpyAsync
#define hipMemcpy cudaMemcpy
#define hipMemcpyDefault cudaMemcpyDefault
#define hipHostMalloc cudaHostAlloc
#define hipHostMallocMapped cudaHostAllocMapped
#define hipHostMallocPortable cudaHostAllocPortable
#define hipHostFree cudaFreeHost
#define hipHostGetDevicePointer cudaHostGetDevicePointer
#define hipHostRegister cudaHostRegister
#define hipHostRegisterMapped cudaHostRegisterMapped
#define hipHostRegisterPortable cudaHostRegisterPortable
#define hipHostUnregister cudaHostUnregister
#define hipIpcMemHandle_t cudaIpcMemHandle_t
#define hipIpcGetMemHandle cudaIpcGetMemHandle
#define hipIpcOpenMemHandle cudaIpcOpenMemHandle
#define hipIpcCloseMemHandle cudaIpcCloseMemHandle
#define hipIpcMemLazyEnablePeerAccess cudaIpcMemLazyEnablePeerAccess
#define hipStream_t cudaStream_t
#define hipStreamNonBlocking cudaStreamNonBlocking
#define hipStreamCreateWithPriority cudaStreamCreateWithPriority
#define hipDeviceGetStreamPriorityRange cudaDeviceGetStreamPriorityRange
#define hipStreamDestroy cudaStreamDestroy
#define hipStreamSynchronize cudaStreamSynchronize
#define hipStreamWaitEvent cudaStreamWaitEvent
#define hipEvent_t cudaEvent_t
#define hipEventCreateWithFlags cudaEventCreateWithFlags
#define hipEventDisableTiming cudaEventDisableTiming
#define hipEventRecord cudaEventRecord
#define hipEventQuery cudaEventQuery
#define hipEventDestroy cudaEventDestroy
#define hipIpcEventHandle_t cudaIpcEventHandle_t
#define hipIpcOpenEventHandle cudaIpcOpenEventHandle
#define hipStreamCaptureStatus cudaStreamCaptureStatus
#define hipStreamCaptureStatusNone cudaStreamCaptureStatusNone
#define hipStreamIsCapturing cudaStreamIsCapturing
#define hipFuncAttributes cudaFuncAttributes
#define hipFuncGetAttributes cudaFuncGetAttributes
// NOLINTEND(cppcoreguidelines-macro-usage)

#else
#error "neither TROUPE_GPU_HIP nor TROUPE_GPU_CUDA: this file is for GPU builds"
#endif
