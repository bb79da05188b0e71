#pragma once

#include <cstdint>

/// The items that the copy kernels read, laid out alike for the host, which writes them, and the
/// GPU. The file has no dependencies of ours, since device compilers read it too.
namespace troupe::transport::xgmi {

/// A run that is contiguous on both sides, packed into 16 bytes: GPUs fetch items from host memory,
/// where the number of fetches counts, not the bytes. Addresses are as seen by the copying GPU.
struct alignas(16) run_item {
  std::uint64_t from_and_low;  ///< bits 55..0: source address; 63..56: low 8 bits of the length
  std::uint64_t to_and_high;   ///< bits 55..0: target address; 63..56: high 8 bits
};
static_assert(sizeof(run_item) == 16);

inline constexpr std::uint32_t item_address_bits = 56;
inline constexpr std::uint64_t item_address = (std::uint64_t{1} << item_address_bits) - 1;
/// The most bytes in an item.
inline constexpr std::uint64_t most_item_bytes = 0xffff;

[[nodiscard]] constexpr run_item make_run_item(std::uint64_t from, std::uint64_t to,
                                               std::uint64_t bytes) noexcept {
  return {from | bytes << item_address_bits, to | bytes >> 8 << item_address_bits};
}

/// Runs of equal length at constant strides, such as a head slice of several tokens.
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
  bulk,    ///< `run_item`s by the GPU's bulk copies; addresses and lengths are multiples of 16
  vector,  ///< `run_item`s by threads, 16 bytes each; both addresses equal modulo 16
  unlike,  ///< `run_item`s by threads, in the widest word to which both addresses align alike
  rows,    ///< `rows_item`s by threads; any alignment
};

/// The most items that travel in the launch itself instead of in a table.
inline constexpr std::uint32_t max_inline_items = 240;

/// One launch of a copy kernel.
struct copy_launch {
  copy_way way{copy_way::vector};
  std::uint32_t count{0};         ///< items
  std::uint32_t blocks{1};        ///< thread blocks of this launch
  std::uint32_t share_of_gpu{1};  ///< thread blocks of all launches at once: `copy_blocks`
  std::uint64_t table{0};         ///< device address of the items; 0 if they are at `here`
  const void* here{nullptr};      ///< at most `max_inline_items` run items in host memory
};

}  // namespace troupe::transport::xgmi
