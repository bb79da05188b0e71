#include <fstream>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <spdlog/version.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "troupe/deploy/cli/backends.hpp"
#include "troupe/deploy/cli/text_table.hpp"
#include "troupe/deploy/cli/verbs.hpp"
#include "troupe/deploy/report_json.hpp"
#include "troupe/transport/endpoint.hpp"
#include "troupe/transport/folder.hpp"

namespace troupe::deploy::cli {

namespace {

using facts = std::vector<std::pair<std::string, std::string>>;

// -- the build

facts build_facts() {
  const std::string sanitizers = TROUPE_SANITIZERS;
  return {{"version", TROUPE_VERSION},
          {"protocol", std::to_string(actors::protocol_version)},
          {"build type", TROUPE_BUILD_TYPE},
          {"compiler", TROUPE_COMPILER},
          {"sanitizers", sanitizers.empty() ? "none" : sanitizers},
          {"CAF", TROUPE_BUILT_WITH_CAF},
          {"spdlog", std::to_string(SPDLOG_VER_MAJOR) + "." + std::to_string(SPDLOG_VER_MINOR) +
                         "." + std::to_string(SPDLOG_VER_PATCH)}};
}

// -- the machine

/// The value of the first line of a /proc file that begins with `key`; "unknown" without one.
std::string proc_value(const char* path, const std::string& key) {
  std::ifstream in{path};
  for (std::string line; std::getline(in, line);) {
    if (!line.starts_with(key)) continue;
    const auto start = line.find_first_not_of(" \t:", key.size());
    if (start != std::string::npos) return line.substr(start);
  }
  return "unknown";
}

std::string memory_text() {
  const auto pages = ::sysconf(_SC_PHYS_PAGES);
  const auto page = ::sysconf(_SC_PAGESIZE);
  if (pages <= 0 || page <= 0) return "unknown";
  return bytes_text(static_cast<std::uint64_t>(pages) * static_cast<std::uint64_t>(page)) + ", " +
         proc_value("/proc/meminfo", "MemAvailable") + " available";
}

/// The entries of a folder that the kernel fills, e.g. one per device.
std::string entries_of(const char* folder, const std::string& prefix) {
  std::string names;
  for (const auto& entry : transport::entries_of(folder)) {
    const auto name = entry.filename().string();
    if (name.starts_with(prefix)) names += (names.empty() ? "" : ", ") + name;
  }
  return names.empty() ? "none" : names;
}

/// The devices' own descriptions, or the kernel's names if the devices cannot be opened.
std::string rdma_text() {
  std::string text;
  for (const auto& device : transport::describe_rdma_devices()) {
    text += (text.empty() ? "" : "; ") + device;
  }
  return text.empty() ? entries_of("/sys/class/infiniband", "") : text;
}

std::string kernel_text() {
  utsname name{};
  if (::uname(&name) != 0) return "unknown";
  return std::string{name.sysname} + " " + name.release + " " + name.machine;
}

facts hardware_facts() {
  return {{"host", transport::host_identity::of_this_process().boot_id + " (boot id)"},
          {"kernel", kernel_text()},
          {"processor", proc_value("/proc/cpuinfo", "model name")},
          {"cores", std::to_string(std::thread::hardware_concurrency())},
          {"memory", memory_text()},
          {"memory nodes", entries_of("/sys/devices/system/node", "node")},
          {"RDMA devices", rdma_text()},
          {"GPUs", entries_of("/dev/dri", "render")}};
}

// -- printing

void print_facts(const char* heading, const facts& list) {
  std::cout << heading << "\n";
  for (const auto& [name, value] : list) {
    auto padded = name;
    padded.resize(14, ' ');
    std::cout << "  " << padded << value << "\n";
  }
}

void print_text(const std::vector<actors::backend_report>& backends) {
  print_facts("troupe", build_facts());
  facts verdicts;
  for (const auto& b : backends) verdicts.emplace_back(b.name, verdict_text(b));
  print_facts("backends", verdicts);
  print_facts("machine", hardware_facts());
}

void print_json(const std::vector<actors::backend_report>& backends) {
  nlohmann::json out{{"troupe", nlohmann::json::object()}, {"machine", nlohmann::json::object()}};
  for (const auto& [name, value] : build_facts()) out["troupe"][name] = value;
  for (const auto& [name, value] : hardware_facts()) out["machine"][name] = value;
  out["backends"] = deploy::to_json(backends);
  std::cout << text_of(out, 2) << "\n";
}

exit_code run_info(bool as_json) {
  const auto backends = backends_here();
  if (!backends) {
    std::cerr << "troupe info: " << to_string(backends.error()) << "\n";
    return exit_code::failed;
  }
  if (as_json) {
    print_json(*backends);
  } else {
    print_text(*backends);
  }
  return exit_code::ok;
}

}  // namespace

void add_info(CLI::App& app, exit_code& code) {
  auto* verb = app.add_subcommand(
      "info",
      "Show the version, how it was built, which backends are compiled in and usable on this\n"
      "machine (with the reason where one is not), and the hardware.");
  const auto as_json = std::make_shared<bool>(false);
  verb->add_flag("--json", *as_json, "One JSON object instead of text");
  verb->callback([as_json, &code] { code = run_info(*as_json); });
}

}  // namespace troupe::deploy::cli
