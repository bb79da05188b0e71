// Kernels that stand for an engine's. Read by hipcc as it is and by nvcc as CUDA.

#include <cstdio>
#include <cstdlib>

#include "troupe/transport/xgmi/hip_on_cuda.hpp"

#include "layer_kernels.hpp"
#include "pattern_word.hpp"
#if defined(TROUPE_GPU_CUDA)
#include <cuda_runtime.h>
#define hipEventCreate cudaEventCreate
#define hipEventSynchronize cudaEventSynchronize
#define hipEventElapsedTime cudaEventElapsedTime
#endif

namespace troupe::bench {

namespace {

using u32 = std::uint32_t;
using u64 = std::uint64_t;
constexpr int threads = 256;
/// A kernel fills the threads of each processor so many times over: another kernel gets a place when
/// a block ends.
constexpr u32 at_once = 8;
constexpr u32 waves = 8;
/// A run is written in so many parts, so that the blocks of all waves have something to write.
constexpr u32 parts_of_run = 8;

void must(hipError_t error, const char* doing) {
  if (error == hipSuccess) return;
  std::fprintf(stderr, "a kernel of the benchmark: %s: %s\n", doing, hipGetErrorString(error));
  std::_Exit(1);
}

void use(u32 gpu) {
  must(hipSetDevice(static_cast<int>(gpu)), "the choice of a GPU");
}

u32 processors_of(u32 gpu) {
  static u32 known[64] = {};
  if (gpu < 64 && known[gpu] != 0) return known[gpu];
  hipDeviceProp_t properties;
  must(hipGetDeviceProperties(&properties, static_cast<int>(gpu)), "the size of a GPU");
  const u32 found = static_cast<u32>(properties.multiProcessorCount);
  if (gpu < 64) known[gpu] = found;
  return found;
}

__global__ void __launch_bounds__(threads) layer_kernel(layer_work what) {
  // Four chains, so that the arithmetic units have no pause.
  float a = static_cast<float>(threadIdx.x), b = a + 1, c = a + 2, d = a + 3;
  for (u32 i = 0; i < what.steps; ++i) {
    a = a * 0.999f + 0.5f;
    b = b * 0.999f + 0.5f;
    c = c * 0.999f + 0.5f;
    d = d * 0.999f + 0.5f;
  }
  // Never so; the compiler does not know.
  const u64 seed = what.seed + (a + b + c + d < 0 ? 1 : 0);
  const u64 words = what.length / 8;
  const u64 share = (words + parts_of_run - 1) / parts_of_run;
  for (u32 part = blockIdx.x; part < what.count * parts_of_run; part += gridDim.x) {
    const u64 at = what.places[part / parts_of_run];
    u64* const to = reinterpret_cast<u64*>(static_cast<unsigned char*>(what.cache) + at);
    const u64 begin = part % parts_of_run * share;
    const u64 end = begin + share < words ? begin + share : words;
    for (u64 i = begin + threadIdx.x; i < end; i += threads) to[i] = pattern_word(at / 8 + i, seed);
  }
}

}  // namespace

bool prepare_gpus() {
  return false;
}

void* make_compute_stream(u32 gpu) {
  use(gpu);
  int least = 0;
  int greatest = 0;
  must(hipDeviceGetStreamPriorityRange(&least, &greatest), "priorities");
  hipStream_t made = nullptr;
  must(hipStreamCreateWithPriority(&made, hipStreamNonBlocking, least), "a stream");
  return made;
}

const u64* on_gpu(u32 gpu, const u64* list, u64 count) {
  use(gpu);
  void* there = nullptr;
  must(hipMalloc(&there, count * sizeof(u64)), "memory");
  must(hipMemcpy(there, list, count * sizeof(u64), hipMemcpyDefault), "copying");
  return static_cast<const u64*>(there);
}

void compute_layer(u32 gpu, void* stream, const layer_work& what) {
  use(gpu);
  layer_kernel<<<processors_of(gpu) * at_once * waves, threads, 0,
                 static_cast<hipStream_t>(stream)>>>(what);
  must(hipGetLastError(), "computing");
}

void* make_moment(u32 gpu) {
  use(gpu);
  hipEvent_t made = nullptr;
  must(hipEventCreate(&made), "an event");
  return made;
}

void note_moment(u32 gpu, void* moment, void* stream) {
  use(gpu);
  must(hipEventRecord(static_cast<hipEvent_t>(moment), static_cast<hipStream_t>(stream)),
       "an event");
}

double microseconds_between(u32 gpu, void* from, void* to) {
  use(gpu);
  must(hipEventSynchronize(static_cast<hipEvent_t>(from)), "computing");
  must(hipEventSynchronize(static_cast<hipEvent_t>(to)), "computing");
  float milliseconds = 0;
  must(hipEventElapsedTime(&milliseconds, static_cast<hipEvent_t>(from),
                           static_cast<hipEvent_t>(to)),
       "the clock of the GPU");
  return static_cast<double>(milliseconds) * 1000;
}

}  // namespace troupe::bench
