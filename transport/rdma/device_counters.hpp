#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace troupe::transport::rdma {

/// A device counter under its driver's name.
struct device_counter {
  std::string name;
  std::uint64_t value{0};
};

/// The port's counters, since its driver was loaded, of packets retransmitted, refused, lost or
/// late, and of times that it went down. Sorted by name; counters at 0 are left out. Empty if the
/// driver counts nothing. The names are the driver's own.
[[nodiscard]] std::vector<device_counter> trouble_of_port(
    const std::string& device, std::uint8_t port,
    const std::filesystem::path& sysfs = "/sys/class/infiniband");

/// How often a port has retransmitted requests since its driver was loaded: its peers did not
/// answer in time, missed something, or were not ready. Covers all queue pairs of all processes,
/// since no device counts retries per queue pair. Empty if the driver has none of the counters
/// known here.
[[nodiscard]] std::optional<std::uint64_t> retries_of_port(
    const std::string& device, std::uint8_t port,
    const std::filesystem::path& sysfs = "/sys/class/infiniband");

/// The increase of a counter since it read `before`. If the driver was reloaded in between, which
/// resets the counter to 0, the increase since the reload.
[[nodiscard]] std::optional<std::uint64_t> counted_since(std::optional<std::uint64_t> before,
                                                         std::optional<std::uint64_t> now);

}  // namespace troupe::transport::rdma
