// Kernels of the xgmi benchmark. Read by hipcc as it is and by nvcc as CUDA.

#include <cstdio>
#include <cstdlib>

#include "troupe/transport/xgmi/hip_on_cuda.hpp"

#include "pattern_word.hpp"
#include "xgmi_pattern.hpp"
#if defined(TROUPE_GPU_CUDA)
#include <cuda_runtime.h>
#define hipDeviceSynchronize cudaDeviceSynchronize
#define hipMemset cudaMemset
#endif

namespace troupe::bench {

namespace {

using u64 = std::uint64_t;
using u8 = unsigned char;
constexpr int threads = 256;

void must(hipError_t error, const char* doing) {
  if (error == hipSuccess) return;
  std::fprintf(stderr, "a kernel of the benchmark: %s: %s\n", doing, hipGetErrorString(error));
  std::_Exit(1);
}

__global__ void fill_kernel(u8* memory, u64 bytes, u64 first, u64 seed) {
  const u64 all = static_cast<u64>(gridDim.x) * blockDim.x;
  for (u64 i = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; i < bytes; i += all) {
    memory[i] = pattern(first + i, seed);
  }
}

__global__ void check_kernel(u8* target, const moved_range* moved, u64 count, u64 seed, u64* wrong) {
  u64 found = 0;
  for (u64 r = blockIdx.x; r < count; r += gridDim.x) {
    const moved_range range = moved[r];
    for (u64 i = threadIdx.x; i < range.length; i += blockDim.x) {
      found += target[range.to + i] != pattern(range.from + i, seed);
      target[range.to + i] = poison;
    }
  }
  if (found != 0) atomicAdd(reinterpret_cast<unsigned long long*>(wrong), found);
}

__global__ void touched_kernel(const u8* memory, u64 bytes, u64* result) {
  const u64 all = static_cast<u64>(gridDim.x) * blockDim.x;
  u64 found = 0;
  u64 first = ~0ULL;
  for (u64 i = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; i < bytes; i += all) {
    if (memory[i] == poison) continue;
    ++found;
    if (i < first) first = i;
  }
  if (found == 0) return;
  atomicAdd(reinterpret_cast<unsigned long long*>(result), found);
  atomicMin(reinterpret_cast<unsigned long long*>(result + 1), first);
}

}  // namespace

void use_gpu(std::uint32_t index) {
  must(hipSetDevice(static_cast<int>(index)), "the choice of a GPU");
}

void fill_pattern(void* memory, u64 bytes, u64 first, u64 seed) {
  fill_kernel<<<1024, threads>>>(static_cast<u8*>(memory), bytes, first, seed);
  must(hipGetLastError(), "filling");
  must(hipDeviceSynchronize(), "filling");
}

void fill_poison(void* memory, u64 bytes) {
  must(hipMemset(memory, poison, bytes), "poisoning");
  must(hipDeviceSynchronize(), "poisoning");
}

u64 wrong_bytes(void* target, const moved_range* moved, u64 count, u64 seed) {
  if (count == 0) return 0;
  void* list = nullptr;
  void* wrong = nullptr;
  u64 found = 0;
  must(hipMalloc(&list, count * sizeof(moved_range)), "memory");
  must(hipMalloc(&wrong, sizeof found), "memory");
  must(hipMemcpy(list, moved, count * sizeof(moved_range), hipMemcpyDefault), "copying");
  must(hipMemcpy(wrong, &found, sizeof found, hipMemcpyDefault), "copying");
  check_kernel<<<1024, threads>>>(static_cast<u8*>(target), static_cast<const moved_range*>(list),
                                  count, seed, static_cast<u64*>(wrong));
  must(hipGetLastError(), "checking");
  must(hipMemcpy(&found, wrong, sizeof found, hipMemcpyDefault), "checking");
  must(hipFree(list), "memory");
  must(hipFree(wrong), "memory");
  return found;
}

u64 touched_bytes(const void* memory, u64 bytes, u64* first) {
  u64 result[2] = {0, ~0ULL};
  void* there = nullptr;
  must(hipMalloc(&there, sizeof result), "memory");
  must(hipMemcpy(there, result, sizeof result, hipMemcpyDefault), "copying");
  touched_kernel<<<1024, threads>>>(static_cast<const u8*>(memory), bytes, static_cast<u64*>(there));
  must(hipGetLastError(), "looking");
  must(hipMemcpy(result, there, sizeof result, hipMemcpyDefault), "looking");
  must(hipFree(there), "memory");
  *first = result[1];
  return result[0];
}

}  // namespace troupe::bench
