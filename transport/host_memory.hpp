#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "troupe/kvcache/ids.hpp"

namespace troupe::transport {

/// Which pages memory of the host is made of.
enum class page_choice : std::uint8_t {
  ordinary,           ///< of the system's size, mostly 4 KiB
  huge_if_available,  ///< huge ones where enough of them are free, else ordinary ones
};

/// How memory of the host is allocated. A value.
struct host_memory_options {
  page_choice pages{page_choice::huge_if_available};
  /// The NUMA node that every page is on, by the system's number. Empty: where the system puts them.
  std::optional<std::uint32_t> numa_node{};

  friend bool operator==(const host_memory_options&, const host_memory_options&) = default;
};

/// Regions that were allocated together.
struct allocated_regions {
  std::vector<region_id> regions;  ///< in the order of the sizes that were asked for
  /// For people: "huge pages of 2 MiB, NUMA node 0"; where there are none though they were asked for,
  /// why.
  std::string pages;
};

}  // namespace troupe::transport
