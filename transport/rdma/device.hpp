#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <infiniband/verbs.h>

#include "troupe/kvcache/result.hpp"
#include "troupe/transport/rdma/device_counters.hpp"
#include "troupe/transport/rdma/device_distance.hpp"
#include "troupe/transport/rdma/kernel_device.hpp"
#include "troupe/transport/rdma/options.hpp"
#include "troupe/transport/rdma/port_record.hpp"

namespace troupe::transport::rdma {

/// One address of a port.
struct gid_entry {
  std::uint32_t index{0};
  std::uint32_t type{0};  ///< of `ibv_gid_type`: 0 InfiniBand, 1 RoCE v1, 2 RoCE v2
  ibv_gid gid{};
};

/// "::ffff:10.0.0.1".
[[nodiscard]] std::string gid_text(std::span<const std::uint8_t, 16> gid);
/// "::ffff:10.0.0.1 (RoCE v2)".
[[nodiscard]] std::string to_string(const gid_entry& entry);

struct port_view {
  std::uint8_t number{0};
  ibv_port_attr attributes{};
  std::vector<gid_entry> gids;
  std::vector<device_counter> trouble;  ///< non-zero counters of retries, losses and errors
  [[nodiscard]] bool active() const noexcept { return attributes.state == IBV_PORT_ACTIVE; }
  [[nodiscard]] bool ethernet() const noexcept {
    return attributes.link_layer == IBV_LINK_LAYER_ETHERNET;
  }
  /// Megabits per second as the port negotiated it.
  [[nodiscard]] std::uint64_t speed() const noexcept;
};

/// What one device reports about itself.
struct device_view {
  std::string name;
  machine_place at;
  /// Distance to the memory that a device is chosen for (`device_distance.hpp`). Empty if unknown.
  std::optional<std::uint32_t> distance;
  ibv_device_attr attributes{};
  std::vector<port_view> ports;
  std::string trouble;  ///< why the device cannot be used; then the other fields are empty
};

/// Every device that the kernel has, sorted by name, for `troupe info`, tests and `choose_places`.
/// A device that the user-space library does not list is included, with `trouble` set.
[[nodiscard]] std::vector<device_view> look_at_devices(
    const memory_place& memory = memory_of_this_process(), const kernel_folders& folders = {});
/// One line about a device for people: "rxe0 port 1: active, Ethernet, 1 Gb/s, MTU 4096, ...".
[[nodiscard]] std::string describe(const device_view& device);

/// The address that a port should use. Null if none is usable.
[[nodiscard]] const gid_entry* best_gid(const port_view& port);

/// The device, port and address that an endpoint uses.
struct place {
  std::string device;
  std::uint8_t port{1};
  std::uint32_t gid_index{0};
  std::uint64_t speed{0};
};

/// Chooses by `options.device`; one place per device. If no device is named, prefers among those
/// with an active port InfiniBand over Ethernet, then the fastest, then the nearest to the memory,
/// then the first by name. (InfiniBand first: hosts whose devices differ in speed still choose
/// ports that reach each other.) If the distance of any of the fastest devices is unknown, distance
/// is ignored. `no_device` (names what was examined and what to do), `invalid_config` (a name, port
/// or address that does not exist).
[[nodiscard]] result<std::vector<place>> choose_places(const rdma_options& options,
                                                       const std::vector<device_view>& devices);
/// The devices that the automatic choice skips, each with the reason: "RDMA device mlx5_1: port 1
/// is not active; is its network interface up?". Empty if devices are named (an unusable one is
/// then an error of `choose_places`). Excluded devices are left out.
[[nodiscard]] std::vector<std::string> passed_over(const rdma_options& options,
                                                   const std::vector<device_view>& devices);

/// How peers reach a port.
struct port_address {
  ibv_gid gid{};
  std::uint16_t lid{0};  ///< InfiniBand only
  std::uint8_t mtu{0};   ///< of `ibv_mtu`
};

/// An open device: its context and its protection domain. Thread-safe. Only its address, its record
/// and its failure change after it was opened.
class device {
 public:
  /// `no_device`: the device disappeared or denies access.
  [[nodiscard]] static result<std::shared_ptr<device>> open(const place& where);
  device(const device&) = delete;
  device& operator=(const device&) = delete;
  ~device();

  [[nodiscard]] const std::string& name() const noexcept { return where_.device; }
  [[nodiscard]] std::uint8_t port() const noexcept { return where_.port; }
  [[nodiscard]] std::uint32_t gid_index() const noexcept { return where_.gid_index; }
  [[nodiscard]] ibv_context* context() const noexcept { return context_; }
  [[nodiscard]] ibv_pd* domain() const noexcept { return domain_; }
  [[nodiscard]] const ibv_device_attr& limits() const noexcept { return limits_; }
  [[nodiscard]] const ibv_port_attr& port_limits() const noexcept { return port_; }
  /// The current address; `look_again` updates it.
  [[nodiscard]] port_address address() const;
  /// Reads the port's address again after the device has reported a change. Links made from now on
  /// use the new address; existing links keep the old one, and break if it no longer exists.
  void look_again();
  /// Records that the port is down if it is and the device has not reported it yet.
  void record_if_down();
  /// How often the port has retransmitted, see `retries_of_port`. Asks the kernel.
  [[nodiscard]] std::optional<std::uint64_t> retries() const {
    return retries_of_port(where_.device, where_.port);
  }
  /// Marks the device as failed for good; `why` is a sentence. Returns false if it was marked
  /// before.
  bool mark_failed(const std::string& why);
  /// Why the device has failed. Empty if it has not, as far as is known. A failure is permanent.
  [[nodiscard]] std::optional<std::string> failure() const;
  [[nodiscard]] port_record& record() noexcept { return record_; }
  [[nodiscard]] const port_record& record() const noexcept { return record_; }
  /// Whether the device claims memory windows that are bound to one queue pair (type 2) and
  /// allocates one. (Types 2A and 2B differ in what else must match; here it always does.)
  [[nodiscard]] bool has_windows() const noexcept;

 private:
  explicit device(place where) : where_{std::move(where)} {}
  const place where_;
  ibv_context* context_{nullptr};
  ibv_pd* domain_{nullptr};
  ibv_device_attr limits_{};
  ibv_port_attr port_{};
  port_record record_;
  mutable std::mutex mutex_;
  port_address address_;
  std::optional<std::string> failure_;
};

}  // namespace troupe::transport::rdma
