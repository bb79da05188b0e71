#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "troupe/kvcache/ids.hpp"

namespace troupe::transport {

/// The pages to allocate host memory in.
enum class page_choice : std::uint8_t {
  ordinary,           ///< of the system's page size, mostly 4 KiB
  huge_if_available,  ///< huge pages where enough of them are free, else ordinary ones
};

/// How host memory is allocated. A value.
struct host_memory_options {
  page_choice pages{page_choice::huge_if_available};
  /// The NUMA node for every page, by the system's number. If empty, the system chooses.
  std::optional<std::uint32_t> numa_node{};

  friend bool operator==(const host_memory_options&, const host_memory_options&) = default;
};

/// Regions that were allocated together.
struct allocated_regions {
  std::vector<region_id> regions;  ///< in the order of the sizes that were asked for
  /// For people: "huge pages of 2 MiB, NUMA node 0". If huge pages were asked for but not
  /// available, it says why.
  std::string pages;
};

}  // namespace troupe::transport
