#include "troupe/transport/rdma/device_distance.hpp"

#include <algorithm>
#include <cctype>
#include <fstream>
#include <sstream>
#include <string_view>
#include <system_error>

#include <sched.h>

#include "troupe/transport/folder.hpp"
#include "troupe/transport/numa.hpp"

namespace troupe::transport::rdma {

namespace {

/// "0000:17:00.0"
bool is_pci_address(std::string_view name) {
  const auto dot = name.rfind('.');
  return dot != std::string_view::npos && std::ranges::count(name.substr(0, dot), ':') == 2 &&
         std::ranges::all_of(name, [](char c) {
           return c == ':' || c == '.' || (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
         });
}

/// Drivers also print "0000:3B:00.0" and "00000000:3b:00.0".
std::string as_sysfs_has_it(std::string address) {
  std::ranges::transform(address, address.begin(),
                         [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  const auto domain = address.find(':');
  if (domain != std::string::npos && domain > 4 && address.find_first_not_of('0') >= domain - 4) {
    address.erase(0, domain - 4);
  }
  return address;
}

machine_place place_of(const std::filesystem::path& device) {
  machine_place place;
  std::ifstream{device / "numa_node"} >> place.numa_node;
  std::error_code none;
  for (const auto& part : std::filesystem::canonical(device, none)) {
    const auto name = part.string();
    const bool root = name.starts_with("pci") && name.find(':') != std::string::npos;
    if (root) place.pci_path.clear();
    if (root || is_pci_address(name)) place.pci_path.push_back(name);
  }
  return place;
}

}  // namespace

machine_place place_of_rdma_device(const std::string& name, const std::filesystem::path& sysfs) {
  return place_of(sysfs / "class/infiniband" / name / "device");
}

machine_place place_of_pci_device(const std::string& address, const std::filesystem::path& sysfs) {
  return place_of(sysfs / "bus/pci/devices" / as_sysfs_has_it(address));
}

memory_place memory_near(const std::vector<int>& processors, const std::filesystem::path& sysfs) {
  memory_place memory;
  const auto folder = sysfs / "devices/system/node";
  const auto nodes = numbers_in(line_of(folder / "online"));
  for (const auto node : nodes) {
    const auto at = folder / ("node" + std::to_string(node));
    std::istringstream distances{line_of(at / "distance")};
    // One distance per online node, in the order of the nodes.
    for (const auto other : nodes) {
      if (std::uint32_t value = 0; distances >> value) memory.between[{node, other}] = value;
    }
    const auto here = numbers_in(line_of(at / "cpulist"));
    if (std::ranges::find_first_of(here, processors) != here.end()) memory.nodes.push_back(node);
  }
  return memory;
}

memory_place memory_of_this_process() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  std::vector<int> processors;
  if (::sched_getaffinity(0, sizeof allowed, &allowed) == 0) {
    for (int i = 0; i < CPU_SETSIZE; ++i) {
      if (CPU_ISSET(i, &allowed)) processors.push_back(i);
    }
  }
  return memory_near(processors);
}

memory_place memory_of_gpu(const std::string& address, const std::filesystem::path& sysfs) {
  auto memory = memory_near({}, sysfs);
  memory.gpu = place_of_pci_device(address, sysfs);
  return memory;
}

std::optional<std::uint32_t> distance(const machine_place& device, const memory_place& memory) {
  const auto between = [&](std::int32_t node) -> std::optional<std::uint32_t> {
    const auto at = memory.between.find({device.numa_node, node});
    if (device.numa_node < 0 || at == memory.between.end()) return std::nullopt;
    return at->second;
  };
  if (!memory.gpu) {
    std::optional<std::uint32_t> nearest;
    for (const auto node : memory.nodes) {
      const auto this_far = between(node);
      if (this_far && (!nearest || *this_far < *nearest)) nearest = this_far;
    }
    return nearest;
  }
  const auto& there = memory.gpu->pci_path;
  if (device.pci_path.empty() || there.empty()) return std::nullopt;
  const auto fork = std::ranges::mismatch(device.pci_path, there);
  const auto common = fork.in1 - device.pci_path.begin();
  // 1000 exceeds every distance between NUMA nodes.
  if (common == 0) return 1000 + between(memory.gpu->numa_node).value_or(1000);
  const auto hops = (device.pci_path.end() - fork.in1) + (there.end() - fork.in2);
  return static_cast<std::uint32_t>(hops) + (common == 1 ? 100U : 0U);
}

}  // namespace troupe::transport::rdma
