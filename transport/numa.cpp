#include "troupe/transport/numa.hpp"

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <sstream>
#include <string_view>
#include <utility>

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "troupe/transport/folder.hpp"
#include "troupe/transport/os_error.hpp"

namespace troupe::transport {

namespace {

/// The value of `key` in a file of lines "key value".
std::optional<std::string> value_in(const std::filesystem::path& file, std::string_view key) {
  std::ifstream in{file};
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with(key)) return line.substr(key.size());
  }
  return std::nullopt;
}

std::string words_of(const std::vector<int>& nodes) {
  std::string text;
  for (const auto node : nodes) text += (text.empty() ? "" : ", ") + std::to_string(node);
  return text;
}

/// Memory of one node that is free or that the kernel can reclaim at once.
std::uint64_t available_on(std::uint32_t node, const std::filesystem::path& sysfs) {
  const auto name = "node" + std::to_string(node);
  const auto file = sysfs / "devices/system/node" / name / "meminfo";
  std::uint64_t kib = 0;
  bool found = false;
  for (const auto* key : {"MemFree:", "Active(file):", "Inactive(file):"}) {
    const auto value = value_in(file, "Node " + std::to_string(node) + " " + key);
    if (!value) continue;
    std::uint64_t part = 0;
    std::istringstream{*value} >> part;
    kib += part;
    found = true;
  }
  return found ? kib << 10U : UINT64_MAX;
}

constexpr unsigned long mask_bits = 16 * 64;

}  // namespace

std::vector<int> numbers_in(const std::string& text) {
  std::vector<int> numbers;
  std::istringstream in{text};
  for (std::string part; std::getline(in, part, ',');) {
    std::istringstream range{part};
    int first = 0;
    if (!(range >> first)) continue;
    int last = first;
    char dash = 0;
    if (range >> dash && dash == '-') range >> last;
    for (int i = first; i <= last; ++i) numbers.push_back(i);
  }
  return numbers;
}

std::vector<int> numa_nodes(const std::filesystem::path& sysfs, const std::filesystem::path& proc) {
  auto nodes = numbers_in(line_of(sysfs / "devices/system/node/has_memory"));
  if (const auto allowed = value_in(proc / "self/status", "Mems_allowed_list:")) {
    const auto mine = numbers_in(*allowed);
    std::erase_if(nodes, [&](int node) { return !std::ranges::binary_search(mine, node); });
  }
  if (nodes.empty()) nodes.push_back(0);
  return nodes;
}

std::uint64_t available_bytes(std::optional<std::uint32_t> node, const std::filesystem::path& sysfs,
                              const std::filesystem::path& proc) {
  std::uint64_t here = UINT64_MAX;
  if (const auto value = value_in(proc / "meminfo", "MemAvailable:")) {
    std::uint64_t kib = 0;
    if (std::istringstream{*value} >> kib) here = kib << 10U;
  }
  return node ? std::min(here, available_on(*node, sysfs)) : here;
}

result<numa_scope> numa_scope::enter(std::optional<std::uint32_t> node) {
  if (!node) return numa_scope{std::nullopt};
  const auto nodes = numa_nodes();
  const bool there =
      std::ranges::any_of(nodes, [&](int one) { return static_cast<std::uint32_t>(one) == *node; });
  if (!there || *node >= mask_bits) {
    return fail(errc::invalid_config, "NUMA node " + std::to_string(*node) +
                                          " is not there; this process may allocate on node " +
                                          words_of(nodes) + ": name one of these, or none");
  }
  if (nodes.size() == 1) return numa_scope{std::nullopt};
  const auto refused = [&](const char* call) {
    const int number = errno;
    return fail(errc::backend_unavailable,
                "the kernel does not let this process choose NUMA node " + std::to_string(*node) +
                    " (" + call + ": " + what_errno(number) +
                    "); give its container CAP_SYS_NICE, or name no node");
  };
  policy former;
  // The kernel uses one bit less than it is told.
  if (::syscall(SYS_get_mempolicy, &former.mode, former.nodes.data(), mask_bits + 1, nullptr, 0) !=
      0) {
    return refused("get_mempolicy");
  }
  std::array<std::uint64_t, 16> wanted{};
  wanted.at(*node / 64) = std::uint64_t{1} << (*node % 64);
  if (::syscall(SYS_set_mempolicy, MPOL_BIND, wanted.data(), mask_bits + 1) != 0) {
    return refused("set_mempolicy");
  }
  return numa_scope{former};
}

numa_scope::numa_scope(numa_scope&& other) noexcept
    : former_{std::exchange(other.former_, std::nullopt)} {}

numa_scope::~numa_scope() {
  if (!former_) return;
  ::syscall(SYS_set_mempolicy, former_->mode, former_->nodes.data(), mask_bits + 1);
}

}  // namespace troupe::transport
