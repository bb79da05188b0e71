// The copy kernels. Read by hipcc as it is and by nvcc as CUDA.
//
// A warp takes `share` consecutive items of the table at a time: its lanes fetch them together (the
// table is in host memory: few, wide reads), the next ones while these are copied, and pass them
// around by shuffles. So no thread waits for another warp.

#include "troupe/transport/xgmi/hip_on_cuda.hpp"
#include "troupe/transport/xgmi/scatter_kernel.hpp"

#if defined(TROUPE_GPU_CUDA)
#include <cuda_runtime.h>
#endif

namespace troupe::transport::xgmi {

namespace {

using u32 = std::uint32_t;
using u64 = std::uint64_t;

#if defined(TROUPE_GPU_HIP)
constexpr u32 warp_size = 64;  // of the GPUs that have xGMI
#define TROUPE_CONSTANT_PARAMETER
#else
constexpr u32 warp_size = 32;
#define TROUPE_CONSTANT_PARAMETER const __grid_constant__
#endif
constexpr u32 vector_threads = 1024;
/// Loads under way in each thread: of 16 bytes each in runs that lie alike on both sides, and in
/// what is less common.
constexpr u32 full_depth = 8;
constexpr u32 least_depth = 4;

struct inline_table {
  run_item items[max_inline_items];
  /// Neighbours go to different blocks, so that a short table uses many.
  __device__ u32 first_of(u32 warp, u32 /*warps*/) const { return warp * gridDim.x + blockIdx.x; }
};
struct far_table {
  const run_item* items;
  /// Neighbours stay in one block: what one warp fetches brings its neighbours' items along.
  __device__ u32 first_of(u32 warp, u32 warps) const { return blockIdx.x * warps + warp; }
};

__device__ inline u64 from_lane(u64 value, u32 lane) {
#if defined(TROUPE_GPU_HIP)
  return static_cast<u64>(__shfl(static_cast<unsigned long long>(value), static_cast<int>(lane)));
#else
  return __shfl_sync(0xffffffffU, static_cast<unsigned long long>(value), static_cast<int>(lane));
#endif
}

/// What is copied is used once: it should not push the engine's data out of the caches.
template <class Word>
__device__ inline Word load(const Word* at) {
#if defined(TROUPE_GPU_HIP)
  return __builtin_nontemporal_load(at);
#else
  return __ldcs(at);
#endif
}
template <class Word>
__device__ inline void store(Word* at, Word value) {
#if defined(TROUPE_GPU_HIP)
  __builtin_nontemporal_store(value, at);
#else
  __stcs(at, value);
#endif
}

#if defined(TROUPE_GPU_HIP)
typedef unsigned int word16 __attribute__((ext_vector_type(4)));
typedef unsigned long long word8;
#else
using word16 = uint4;
using word8 = unsigned long long;
#endif

/// A warp copies `count` words; addresses are multiples of the word.
template <class Word, u32 depth>
__device__ inline void copy_words(u64 to, u64 from, u64 count, u32 lane) {
  const Word* const source = reinterpret_cast<const Word*>(from);
  Word* const target = reinterpret_cast<Word*>(to);
  u64 at = lane;
#pragma unroll 1
  for (; at + (depth - 1) * warp_size < count; at += depth * warp_size) {
    Word words[depth];
#pragma unroll
    for (u32 i = 0; i < depth; ++i) words[i] = load(source + at + i * warp_size);
#pragma unroll
    for (u32 i = 0; i < depth; ++i) store(target + at + i * warp_size, words[i]);
  }
  // The rest, half as deep.
#pragma unroll 1
  for (; at < count; at += depth / 2 * warp_size) {
    Word words[depth / 2];
#pragma unroll
    for (u32 i = 0; i < depth / 2; ++i) {
      if (at + i * warp_size < count) words[i] = load(source + at + i * warp_size);
    }
#pragma unroll
    for (u32 i = 0; i < depth / 2; ++i) {
      if (at + i * warp_size < count) store(target + at + i * warp_size, words[i]);
    }
  }
}

/// A warp copies one run whose sides lie alike modulo a word: by words, the ends by bytes.
template <class Word, u32 depth>
__device__ inline void copy_alike(u64 to, u64 from, u64 bytes, u32 lane) {
  constexpr u64 in_word = sizeof(Word) - 1;
  const u64 before = (sizeof(Word) - (from & in_word)) & in_word;
  const u64 head = before < bytes ? before : bytes;
  const u64 body = (bytes - head) & ~in_word;
  const u64 tail = bytes - head - body;
  if (lane < head) {
    *reinterpret_cast<unsigned char*>(to + lane) =
        *reinterpret_cast<const unsigned char*>(from + lane);
  }
  if (lane < tail) {
    const u64 at = head + body + lane;
    *reinterpret_cast<unsigned char*>(to + at) = *reinterpret_cast<const unsigned char*>(from + at);
  }
  copy_words<Word, depth>(to + head, from + head, body / sizeof(Word), lane);
}

/// The same where they are not alike modulo 16: by the widest word in which they are.
__device__ inline void copy_unlike(u64 to, u64 from, u64 bytes, u32 lane) {
  const u64 apart = to ^ from;
  if ((apart & 7) == 0) {
    copy_alike<word8, least_depth>(to, from, bytes, lane);
  } else if ((apart & 3) == 0) {
    copy_alike<unsigned int, least_depth>(to, from, bytes, lane);
  } else if ((apart & 1) == 0) {
    copy_alike<unsigned short, least_depth>(to, from, bytes, lane);
  } else {
    copy_words<unsigned char, least_depth>(to, from, bytes, lane);
  }
}

/// The part of a warp in going through a table of runs: calls `copy(to, from, bytes)` for each item
/// of its own, on all lanes.
template <class Table, class Copy>
__device__ void for_my_runs(const Table& table, u32 count, u32 share, u32 warps_per_block,
                            u32 warp_in_block, u32 lane, Copy copy) {
  const u32 warps = gridDim.x * warps_per_block;
  u32 first = table.first_of(warp_in_block, warps_per_block) * share;
  run_item mine{0, 0};
  if (lane < share && first + lane < count) mine = table.items[first + lane];
  while (first < count) {
    const u32 next = first + warps * share;
    run_item ahead{0, 0};
    if (lane < share && next + lane < count && next > first) ahead = table.items[next + lane];
    const u32 here = count - first < share ? count - first : share;
    for (u32 i = 0; i < here; ++i) {
      const u64 from = from_lane(mine.from_and_low, i);
      const u64 to = from_lane(mine.to_and_high, i);
      copy(to & item_address, from & item_address,
           from >> item_address_bits | to >> item_address_bits << 8);
    }
    if (next < first) break;  // the number of the next item wrapped
    mine = ahead;
    first = next;
  }
}

/// Items that a warp takes at a time: many, so that few reads of the table fetch them, but in eight
/// rounds at least, so that all warps end at about the same time.
u32 share_of(const copy_launch& what, u32 warps_per_block) {
  const u32 rounds = what.count / (what.blocks * warps_per_block * 8);
  return rounds < 1 ? 1 : rounds > 32 ? 32 : rounds;
}

template <class Table>
__global__ void __launch_bounds__(vector_threads)
    copy_by_threads(TROUPE_CONSTANT_PARAMETER Table table, u32 count, u32 share) {
  const u32 lane = threadIdx.x % warp_size;
  for_my_runs(table, count, share, blockDim.x / warp_size, threadIdx.x / warp_size, lane,
              [&](u64 to, u64 from, u64 bytes) {
                copy_alike<word16, full_depth>(to, from, bytes, lane);
              });
}

/// A kernel of its own: what it needs of registers would cost the common one some of its loads.
template <class Table>
__global__ void __launch_bounds__(vector_threads)
    copy_unlike_by_threads(TROUPE_CONSTANT_PARAMETER Table table, u32 count, u32 share) {
  const u32 lane = threadIdx.x % warp_size;
  for_my_runs(table, count, share, blockDim.x / warp_size, threadIdx.x / warp_size, lane,
              [&](u64 to, u64 from, u64 bytes) { copy_unlike(to, from, bytes, lane); });
}

/// Words of rows: unit `u` is word `u % per_row` of row `u / per_row`.
template <class Word>
__device__ inline void copy_rows(const rows_item& item, u32 lane) {
  constexpr u32 depth = least_depth;
  const u32 per_row = item.length / sizeof(Word);
  const u32 units = per_row * item.rows;  // an item is at most some tens of KiB
  const auto source = [&](u32 unit) {
    const u32 row = unit / per_row;
    return reinterpret_cast<const Word*>(item.from + row * item.from_stride) + (unit - row * per_row);
  };
  const auto target = [&](u32 unit) {
    const u32 row = unit / per_row;
    return reinterpret_cast<Word*>(item.to + row * item.to_stride) + (unit - row * per_row);
  };
  for (u32 at = lane; at < units; at += depth * warp_size) {
    Word words[depth];
#pragma unroll
    for (u32 i = 0; i < depth; ++i) {
      if (at + i * warp_size < units) words[i] = load(source(at + i * warp_size));
    }
#pragma unroll
    for (u32 i = 0; i < depth; ++i) {
      if (at + i * warp_size < units) store(target(at + i * warp_size), words[i]);
    }
  }
}

__global__ void __launch_bounds__(vector_threads)
    copy_rows_by_threads(const rows_item* items, u32 count) {
  const u32 lane = threadIdx.x % warp_size;
  const u32 warps_per_block = blockDim.x / warp_size;
  const u32 warps = gridDim.x * warps_per_block;
  for (u64 at = threadIdx.x / warp_size * gridDim.x + blockIdx.x; at < count; at += warps) {
    const rows_item item = items[at];
    const u64 all = item.from | item.to | item.length | item.from_stride | item.to_stride;
    if ((all & 15) == 0) {
      copy_rows<word16>(item, lane);
    } else if ((all & 7) == 0) {
      copy_rows<word8>(item, lane);
    } else if ((all & 3) == 0) {
      copy_rows<unsigned int>(item, lane);
    } else {
      copy_rows<unsigned char>(item, lane);
    }
  }
}

#if defined(TROUPE_GPU_CUDA)

// Bulk copies (sm_90 on): the first lane of each warp drives a ring of stages in shared memory, a
// load into a stage, then a store out of it, without a register or a thread in between. Their
// packets on the link are larger than those of threads' stores.
struct stage_note {
  u64 to;
  u64 bytes;
};

/// How the rings are cut: warps of a block, stages of a ring, bytes of a stage, and how many loads
/// are made before the first store.
template <u32 Warps, u32 Stages, u32 Bytes, u32 Ahead>
struct ring_cut {
  static constexpr u32 warps = Warps;
  static constexpr u32 stages = Stages;
  static constexpr u32 stage_bytes = Bytes;
  static constexpr u32 loads_ahead = Ahead;
  static constexpr u32 ring_bytes = Stages * Bytes;
  static constexpr u32 shared_bytes =
      Warps * (ring_bytes + Stages * static_cast<u32>(sizeof(stage_note)) + Stages * 8) + 128;
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

__device__ inline u32 shared_address(const void* at) {
  return static_cast<u32>(__cvta_generic_to_shared(at));
}
__device__ inline void barrier_init(u32 barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}
__device__ inline void bulk_load(u32 stage, u64 from, u32 bytes, u32 barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          stage),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
__device__ inline void barrier_wait(u32 barrier, u32 parity) {
  u32 done = 0;
  do {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (done == 0);
}
__device__ inline void bulk_store(u64 to, u32 stage, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(stage),
               "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/// Launches of one stream take turns without a gap, 1.3 to 5 us each where the link is idle: when all
/// blocks of one have begun their last stores, the next one may begin. What it copies does not depend
/// on the one before; but its end, behind which events are recorded, must mean the end of both.
/// (CUDA programming guide, "Programmatic Dependent Launch".)
__device__ inline void launch_next() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ inline void end_after_last() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

/// One warp's ring, driven by one lane.
template <class Cut>
struct bulk_ring {
  u32 memory;         // shared addresses
  u32 barriers;
  stage_note* notes;
  u32 loaded{0};
  u32 stored{0};

  __device__ void load(u64 to, u64 from, u32 bytes) {
    const u32 stage = loaded % Cut::stages;
    // Of the stores made so far all but the last ones have left their stages.
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Cut::stages - Cut::loads_ahead - 1)
                 : "memory");
    notes[stage] = {to, bytes};
    bulk_load(memory + stage * Cut::stage_bytes, from, bytes, barriers + stage * 8);
    ++loaded;
    if (loaded > Cut::loads_ahead) store();
  }
  __device__ void store() {
    const u32 stage = stored % Cut::stages;
    barrier_wait(barriers + stage * 8, (stored / Cut::stages) & 1);
    bulk_store(notes[stage].to, memory + stage * Cut::stage_bytes,
               static_cast<u32>(notes[stage].bytes));
    ++stored;
  }
  __device__ void drain() {
    while (stored != loaded) store();
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
};

#endif

template <class Cut, class Table>
__global__ void __launch_bounds__(Cut::warps* warp_size)
    copy_in_bulk(TROUPE_CONSTANT_PARAMETER Table table, u32 count, u32 share) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char shared[];
  const u32 lane = threadIdx.x % warp_size;
  const u32 warp = threadIdx.x / warp_size;
  unsigned char* const notes = shared + Cut::warps * Cut::ring_bytes;
  unsigned char* const barriers = notes + Cut::warps * Cut::stages * sizeof(stage_note);
  bulk_ring<Cut> ring{shared_address(shared) + warp * Cut::ring_bytes,
                      shared_address(barriers) + warp * Cut::stages * 8,
                      reinterpret_cast<stage_note*>(notes) + warp * Cut::stages};
  if (lane == 0) {
    for (u32 i = 0; i < Cut::stages; ++i) barrier_init(ring.barriers + i * 8);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncwarp();
  for_my_runs(table, count, share, Cut::warps, warp, lane, [&](u64 to, u64 from, u64 bytes) {
    if (lane != 0) return;
    for (u64 at = 0; at < bytes; at += Cut::stage_bytes) {
      const u64 left = bytes - at;
      ring.load(to + at, from + at,
                static_cast<u32>(left < Cut::stage_bytes ? left : Cut::stage_bytes));
    }
  });
  launch_next();
  if (lane == 0) ring.drain();
  end_after_last();
#else  // never launched
  static_cast<void>(table);
  static_cast<void>(count + share + Cut::stages + Cut::stage_bytes + Cut::loads_ahead);
#endif
}

template <class Cut>
int launch_rings(cudaStream_t stream, const copy_launch& what, const inline_table* here) {
  const u32 share = share_of(what, Cut::warps);
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t how{};
  how.gridDim = dim3{what.blocks};
  how.blockDim = dim3{Cut::warps * warp_size};
  how.dynamicSmemBytes = Cut::shared_bytes;
  how.stream = stream;
  how.attrs = &early;
  how.numAttrs = 1;
  if (here != nullptr) {
    cudaLaunchKernelEx(&how, copy_in_bulk<Cut, inline_table>, *here, what.count, share);
  } else {
    const far_table table{reinterpret_cast<const run_item*>(what.table)};
    cudaLaunchKernelEx(&how, copy_in_bulk<Cut, far_table>, table, what.count, share);
  }
  return static_cast<int>(cudaGetLastError());
}

template <class Cut>
bool prepare_rings() {
  cudaFuncAttributes found{};
  if (cudaFuncGetAttributes(&found, copy_in_bulk<Cut, inline_table>) != cudaSuccess ||
      cudaFuncGetAttributes(&found, copy_in_bulk<Cut, far_table>) != cudaSuccess ||
      found.binaryVersion < 90) {
    return false;
  }
  const auto bytes = static_cast<int>(Cut::shared_bytes);
  constexpr auto most = cudaFuncAttributeMaxDynamicSharedMemorySize;
  return cudaFuncSetAttribute(copy_in_bulk<Cut, far_table>, most, bytes) == cudaSuccess &&
         cudaFuncSetAttribute(copy_in_bulk<Cut, inline_table>, most, bytes) == cudaSuccess;
}

// Rings of 16 KiB, of which some 200 to 300 on the whole GPU keep a link full; more of them are in
// each other's way when they read. So the fewer blocks there are, the more warps each has.
using light_block = ring_cut<4, 8, 2048, 5>;
using half_block = ring_cut<8, 8, 2048, 5>;
using full_block = ring_cut<12, 8, 2048, 5>;

int launch_bulk(cudaStream_t stream, const copy_launch& what, const inline_table* here) {
  if (what.share_of_gpu >= 48) return launch_rings<light_block>(stream, what, here);
  if (what.share_of_gpu >= 28) return launch_rings<half_block>(stream, what, here);
  return launch_rings<full_block>(stream, what, here);
}

bool prepare_bulk() {
  return prepare_rings<light_block>() && prepare_rings<half_block>() &&
         prepare_rings<full_block>();
}

#endif  // TROUPE_GPU_CUDA

}  // namespace

bool load_copies() {
  const void* const kernels[] = {
      reinterpret_cast<const void*>(copy_by_threads<inline_table>),
      reinterpret_cast<const void*>(copy_by_threads<far_table>),
      reinterpret_cast<const void*>(copy_unlike_by_threads<inline_table>),
      reinterpret_cast<const void*>(copy_unlike_by_threads<far_table>),
      reinterpret_cast<const void*>(copy_rows_by_threads),
  };
  bool loaded = true;
  for (const void* kernel : kernels) {
    hipFuncAttributes found{};
    loaded = hipFuncGetAttributes(&found, kernel) == hipSuccess && loaded;
  }
  static_cast<void>(hipGetLastError());
  return loaded;
}

bool prepare_bulk_copies() {
#if defined(TROUPE_GPU_CUDA)
  int device = 0;
  int major = 0;
  const bool ready =
      cudaGetDevice(&device) == cudaSuccess &&
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
      major >= 9 && prepare_bulk();
  static_cast<void>(cudaGetLastError());
  return ready;
#else
  return false;
#endif
}

int launch_copy(void* stream, const copy_launch& what) {
  const auto on = static_cast<hipStream_t>(stream);
  const dim3 blocks{what.blocks};
  const dim3 threads{vector_threads};
  const u32 share = share_of(what, vector_threads / warp_size);
  inline_table here;
  if (what.table == 0) {
    const auto* items = static_cast<const run_item*>(what.here);
    for (u32 i = 0; i < what.count; ++i) here.items[i] = items[i];
  }
  const inline_table* const near_items = what.table == 0 ? &here : nullptr;
  switch (what.way) {
    case copy_way::bulk:
#if defined(TROUPE_GPU_CUDA)
      return launch_bulk(on, what, near_items);
#else
      return static_cast<int>(hipErrorNotSupported);
#endif
    case copy_way::vector:
      if (near_items != nullptr) {
        copy_by_threads<<<blocks, threads, 0, on>>>(here, what.count,
                                                             share);
      } else {
        copy_by_threads<<<blocks, threads, 0, on>>>(
            far_table{reinterpret_cast<const run_item*>(what.table)}, what.count,
                                                             share);
      }
      break;
    case copy_way::unlike:
      if (near_items != nullptr) {
        copy_unlike_by_threads<<<blocks, threads, 0, on>>>(here, what.count,
                                                             share);
      } else {
        copy_unlike_by_threads<<<blocks, threads, 0, on>>>(
            far_table{reinterpret_cast<const run_item*>(what.table)}, what.count,
                                                             share);
      }
      break;
    case copy_way::rows:
      copy_rows_by_threads<<<blocks, threads, 0, on>>>(
          reinterpret_cast<const rows_item*>(what.table), what.count);
      break;
  }
  return static_cast<int>(hipGetLastError());
}

}  // namespace troupe::transport::xgmi
