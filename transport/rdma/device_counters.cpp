#include "troupe/transport/rdma/device_counters.hpp"

#include <algorithm>
#include <array>
#include <fstream>
#include <string_view>
#include <utility>

#include "troupe/transport/folder.hpp"

namespace troupe::transport::rdma {

namespace {

/// Parts of counter names of the drivers: completer_retry_err, local_ack_timeout_err,
/// rnr_nak_retry_err, out_of_sequence, packet_seq_err, duplicate_request, to_retransmits,
/// link_downed.
constexpr std::array<std::string_view, 7> of_trouble{"retr", "rnr", "timeout", "seq",
                                                     "dup",  "err", "down"};

/// The drivers' counters of what makes a requester retransmit, one counter per cause.
constexpr std::array<std::string_view, 13> of_retries{
    // rdma_rxe; the first counts timeouts and gaps
    "completer_retry_err", "rcvd_rnr_err",
    // mlx5
    "local_ack_timeout_err", "packet_seq_err", "implied_nak_seq_err", "rnr_nak_retry_err",
    // bnxt_re
    "to_retransmits", "seq_err_naks_rcvd", "rnr_naks_rcvd",
    // ionic
    "tx_rdma_ack_timeout", "req_rx_pkt_seq_err", "req_rx_impl_nak_seq_err", "req_rx_rnr_retry_err"};

bool tells_of_trouble(const std::string& name) {
  return std::ranges::any_of(
      of_trouble, [&](std::string_view part) { return name.find(part) != std::string::npos; });
}

}  // namespace

std::vector<device_counter> trouble_of_port(const std::string& device, std::uint8_t port,
                                            const std::filesystem::path& sysfs) {
  std::vector<device_counter> found;
  const auto folder = sysfs / device / "ports" / std::to_string(port);
  // The driver's own counters, and those that InfiniBand requires of every port.
  for (const auto* kind : {"hw_counters", "counters"}) {
    for (const auto& entry : entries_of(folder / kind)) {
      device_counter counter{.name = entry.filename().string(), .value = 0};
      if (!tells_of_trouble(counter.name)) continue;
      std::ifstream file{entry};
      if (file >> counter.value && counter.value != 0) found.push_back(std::move(counter));
    }
  }
  std::ranges::sort(found, {}, &device_counter::name);
  return found;
}

std::optional<std::uint64_t> retries_of_port(const std::string& device, std::uint8_t port,
                                             const std::filesystem::path& sysfs) {
  std::optional<std::uint64_t> all;
  const auto folder = sysfs / device / "ports" / std::to_string(port) / "hw_counters";
  for (const auto name : of_retries) {
    std::ifstream file{folder / name};
    if (std::uint64_t value = 0; file >> value) all = all.value_or(0) + value;
  }
  return all;
}

std::optional<std::uint64_t> counted_since(std::optional<std::uint64_t> before,
                                           std::optional<std::uint64_t> now) {
  if (!before || !now) return std::nullopt;
  return *now < *before ? *now : *now - *before;  // less: the driver was reloaded
}

}  // namespace troupe::transport::rdma
