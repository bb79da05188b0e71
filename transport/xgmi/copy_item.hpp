#pragma once

#include <cstdint>

/// What the copy kernels read: the same words for the host that writes them and the GPU. No
/// dependency of ours, since device compilers read this file too.
namespace troupe::transport::xgmi {

/// Bytes that lie in one run on both sides, in 16 bytes: GPUs fetch items from memory of the host,
/// where each fetch costs, not each byte. Addresses are those of the copying GPU.
struct alignas(16) run_item {
  std::uint64_t from_and_low;  ///< bits 55..0: where from; 63..56: the low 8 bits of the length
  std::uint64_t to_and_high;   ///< bits 55..0: where to; 63..56: the high ones
};
static_assert(sizeof(run_item) == 16);

inline constexpr std::uint32_t item_address_bits = 56;
inline constexpr std::uint64_t item_address = (std::uint64_t{1} << item_address_bits) - 1;
/// What an item may hold.
inline constexpr std::uint64_t most_item_bytes = 0xffff;

[[nodiscard]] constexpr run_item make_run_item(std::uint64_t from, std::uint64_t to,
                                               std::uint64_t bytes) noexcept {
  return {from | bytes << item_address_bits, to | bytes >> 8 << item_address_bits};
}

/// Equal runs, each as far from the last as the strides say: a head slice of some tokens.
struct rows_item {
  std::uint64_t from;
  std::uint64_t to;
  std::uint64_t from_stride;
  std::uint64_t to_stride;
  std::uint32_t length;  ///< bytes of one run
  std::uint32_t rows;
};

/// How a kernel moves the items of its table.
enum class copy_way : std::uint8_t {
  bulk,    ///< `run_item`s, the GPU's bulk copies; addresses and lengths in multiples of 16
  vector,  ///< `run_item`s, threads, by 16 bytes; both addresses alike modulo 16
  unlike,  ///< `run_item`s, threads, by the widest word in which the addresses are alike
  rows,    ///< `rows_item`s, threads; any alignment
};

/// Items that travel in the launch itself instead of in a table.
inline constexpr std::uint32_t max_inline_items = 240;

/// One launch of a copy kernel.
struct copy_launch {
  copy_way way{copy_way::vector};
  std::uint32_t count{0};         ///< items
  std::uint32_t blocks{1};        ///< thread blocks of this launch
  std::uint32_t share_of_gpu{1};  ///< thread blocks of all launches at once: `copy_blocks`
  std::uint64_t table{0};         ///< device address of the items; 0: they are at `here`
  const void* here{nullptr};      ///< at most `max_inline_items` run items in host memory
};

}  // namespace troupe::transport::xgmi
