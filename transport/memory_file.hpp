#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "troupe/kvcache/result.hpp"
#include "troupe/transport/host_memory.hpp"

namespace troupe::transport {

/// Zeroed memory in a memfd, mapped shared, all of its pages reserved. Sealed, so that neither we nor a
/// peer that maps it can shrink it under the other, which would turn an access into SIGBUS. Immutable.
class memory_file {
 public:
  /// `size` bytes (not 0). `name` appears in errors and in /proc. `pool_exhausted`: the OS refuses,
  /// the sentence says how much is free; `invalid_config`, `backend_unavailable`: about the NUMA
  /// node.
  [[nodiscard]] static result<std::shared_ptr<const memory_file>> create(
      const std::string& name, std::uint64_t size, const host_memory_options& how);
  memory_file(const memory_file&) = delete;
  memory_file& operator=(const memory_file&) = delete;
  ~memory_file();

  [[nodiscard]] int fd() const noexcept { return fd_; }
  /// The requested number of bytes, from a page boundary.
  [[nodiscard]] std::span<std::byte> bytes() const noexcept { return {at_, size_}; }
  /// Size of the file and of its mapping, rounded up to whole pages if they are huge.
  [[nodiscard]] std::uint64_t mapped_size() const noexcept { return mapped_size_; }
  [[nodiscard]] bool huge() const noexcept { return huge_; }
  /// Why the pages are ordinary ones, if huge ones were asked for.
  [[nodiscard]] const std::string& why_not_huge() const noexcept { return why_not_huge_; }

 private:
  memory_file() = default;
  [[nodiscard]] static result<std::shared_ptr<memory_file>> make(const std::string& name,
                                                                 std::uint64_t size,
                                                                 std::uint64_t mapped_size,
                                                                 unsigned flags,
                                                                 const host_memory_options& how);

  int fd_{-1};
  std::byte* at_{nullptr};
  std::uint64_t size_{0}, mapped_size_{0};
  bool huge_{false};
  std::string why_not_huge_;
};

/// Huge pages of the system's default size, on one NUMA node or anywhere.
struct huge_pages {
  std::uint64_t size{0};  ///< bytes of one page; 0 if the kernel has no huge pages
  std::uint64_t free{0};  ///< pages neither used nor reserved
};
[[nodiscard]] huge_pages huge_pages_now(std::optional<std::uint32_t> node = {});

/// "2 MiB"
[[nodiscard]] std::string page_text(std::uint64_t bytes);

/// `pool_exhausted` if so many bytes in so many regions are not available. Called before the first
/// region is allocated.
[[nodiscard]] result<void> check_room_for(std::uint64_t bytes, std::size_t regions,
                                          const host_memory_options& how);

/// Describes the pages in a line for people: "huge pages of 2 MiB, NUMA node 0".
[[nodiscard]] std::string describe_pages(std::span<const std::shared_ptr<const memory_file>> files,
                                         const host_memory_options& how);

}  // namespace troupe::transport
