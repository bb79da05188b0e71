#include "troupe/transport/rdma/device.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <optional>
#include <sstream>
#include <string_view>
#include <utility>

#include <arpa/inet.h>

#include "troupe/transport/os_error.hpp"
#include "troupe/transport/rdma/verbs_library.hpp"

namespace troupe::transport::rdma {

namespace {

constexpr const char* what_to_do =
    "install the NIC's driver and Debian's ibverbs-providers, or set transport.backend: tcp";

struct device_list {
  int count{0};
  ibv_device** all{::ibv_get_device_list(&count)};
  device_list() = default;
  device_list(const device_list&) = delete;
  device_list& operator=(const device_list&) = delete;
  ~device_list() {
    if (all != nullptr) ::ibv_free_device_list(all);
  }
};

struct context_closer {
  void operator()(ibv_context* context) const noexcept { ::ibv_close_device(context); }
};
using open_context = std::unique_ptr<ibv_context, context_closer>;

template <class Names>
std::string joined(const Names& names) {
  std::string text;
  for (const auto& name : names) {
    if (!text.empty()) text += ", ";
    text += name;
  }
  return text;
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> words;
  std::istringstream in{text};
  for (std::string word; std::getline(in, word, ',');) {
    if (!word.empty()) words.push_back(word);
  }
  return words;
}

bool is_mapped_v4(const ibv_gid& gid) {
  static constexpr std::array<std::uint8_t, 12> prefix{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  return std::equal(prefix.begin(), prefix.end(), std::begin(gid.raw));
}
bool is_link_local(const ibv_gid& gid) {
  return gid.raw[0] == 0xfe && (gid.raw[1] & 0xc0) == 0x80;
}

/// The lower the better.
int rank_of(const gid_entry& entry) {
  const int type = entry.type == 2 ? 0 : entry.type == 0 ? 0 : 1;
  const int address = is_mapped_v4(entry.gid) ? 0 : is_link_local(entry.gid) ? 2 : 1;
  return type * 3 + address;
}

device_view placed(std::string name, const memory_place& memory,
                   const std::filesystem::path& sysfs) {
  device_view view;
  view.name = std::move(name);
  view.at = place_of_rdma_device(view.name, sysfs);
  view.distance = distance(view.at, memory);
  return view;
}

device_view look_at(ibv_device* which, const memory_place& memory,
                    const std::filesystem::path& sysfs) {
  auto view = placed(::ibv_get_device_name(which), memory, sysfs);
  errno = 0;
  const open_context context{::ibv_open_device(which)};
  if (!context) {
    view.trouble = "it cannot be opened (" + what_errno(errno) +
                   "); is /dev/infiniband there and does its user-space driver fit the kernel's?";
    return view;
  }
  if (const int bad = ::ibv_query_device(context.get(), &view.attributes); bad != 0) {
    view.trouble = "its capabilities cannot be queried: " + what_errno(bad);
    return view;
  }
  std::vector<ibv_gid_entry> table(256);
  const auto found = ::ibv_query_gid_table(context.get(), table.data(), table.size(), 0);
  table.resize(found > 0 ? static_cast<std::size_t>(found) : 0);
  for (std::uint8_t number = 1; number <= view.attributes.phys_port_cnt; ++number) {
    port_view port;
    port.number = number;
    if (::ibv_query_port(context.get(), number, &port.attributes) != 0) continue;
    for (const auto& entry : table) {
      if (entry.port_num == number) {
        port.gids.push_back({entry.gid_index, entry.gid_type, entry.gid});
      }
    }
    port.trouble = trouble_of_port(view.name, number, sysfs / "class/infiniband");
    view.ports.push_back(std::move(port));
  }
  return view;
}

/// The first usable port and its address, or why there is none.
result<place> place_on(const device_view& device, const rdma_options& options) {
  if (!device.trouble.empty()) {
    return fail(errc::no_device, "RDMA device " + device.name + ": " + device.trouble);
  }
  std::string why = "it has no port";
  for (const auto& port : device.ports) {
    if (options.port != 0 && port.number != options.port) continue;
    if (!port.active()) {
      why = "port " + std::to_string(port.number) + " is not active; is its network interface up?";
      continue;
    }
    // Checked here, since not every device checks it: Soft-RoCE accepts any index.
    if (const auto keys = port.attributes.pkey_tbl_len; keys != 0 && options.pkey_index >= keys) {
      why = "port " + std::to_string(port.number) + " has no partition key at pkey_index " +
            std::to_string(options.pkey_index) + "; it has those from 0 to " +
            std::to_string(keys - 1);
      continue;
    }
    const gid_entry* chosen = nullptr;
    if (options.gid_index >= 0) {
      for (const auto& entry : port.gids) {
        if (entry.index == static_cast<std::uint32_t>(options.gid_index)) chosen = &entry;
      }
    } else {
      chosen = best_gid(port);
    }
    if (chosen == nullptr) {
      why = "port " + std::to_string(port.number) +
            (options.gid_index >= 0
                 ? " has no address at gid_index " + std::to_string(options.gid_index)
                 : " has no address (GID); give its network interface one");
      continue;
    }
    return place{device.name, port.number, chosen->index, port.speed()};
  }
  if (options.port != 0 && std::ranges::none_of(device.ports, [&](const port_view& port) {
        return port.number == options.port;
      })) {
    why = "it has no port " + std::to_string(options.port);
  }
  return fail(errc::no_device, "RDMA device " + device.name + ": " + why);
}

/// A usable device.
struct candidate {
  place where;
  bool ethernet{true};
  std::optional<std::uint32_t> distance;

  /// Whether it is preferred over `other` regardless of distance.
  [[nodiscard]] bool faster_than(const candidate& other) const noexcept {
    if (ethernet != other.ethernet) return !ethernet;
    return where.speed > other.where.speed;
  }
};

/// `all` must not be empty and must be sorted by device name.
place best_of(std::vector<candidate> all) {
  const auto best =
      *std::ranges::min_element(all, [](const auto& a, const auto& b) { return a.faster_than(b); });
  std::erase_if(all, [&](const auto& one) { return best.faster_than(one); });
  if (std::ranges::any_of(all, [](const auto& one) { return !one.distance; })) return best.where;
  return std::ranges::min_element(all, {}, &candidate::distance)->where;
}

/// Joins sentences of the form "problem; what to do" into one: first all problems, then what to do.
std::string joined_reasons(const std::vector<std::string>& sentences) {
  constexpr std::string_view end_of_what = "; ";
  std::vector<std::string> whats;
  std::vector<std::string> to_do;
  for (const auto& sentence : sentences) {
    const auto end = sentence.find(end_of_what);
    whats.push_back(sentence.substr(0, end));
    if (end == std::string::npos) continue;
    auto rest = sentence.substr(end + end_of_what.size());
    if (std::ranges::find(to_do, rest) == to_do.end()) to_do.push_back(std::move(rest));
  }
  auto text = joined(whats);
  for (const auto& one : to_do) text += std::string{end_of_what} + one;
  return text;
}

/// Whether the options name the devices to use.
bool names_devices(const rdma_options& options) {
  return !options.device.empty() && options.device != "auto" && options.device.front() != '^';
}
std::vector<std::string> excluded_by(const rdma_options& options) {
  if (!options.device.starts_with('^')) return {};
  return split(options.device.substr(1));
}

result<std::vector<place>> choose_best(const rdma_options& options,
                                       const std::vector<device_view>& devices) {
  const auto excluded = excluded_by(options);
  std::vector<std::string> tried;
  std::vector<candidate> able;
  for (const auto& device : devices) {
    if (std::ranges::find(excluded, device.name) != excluded.end()) {
      tried.push_back(device.name + ": excluded");
      continue;
    }
    auto here = place_on(device, options);
    if (!here) {
      tried.push_back(here.error().message);
      continue;
    }
    const auto port = std::ranges::find(device.ports, here->port, &port_view::number);
    able.push_back({std::move(*here), port->ethernet(), device.distance});
  }
  if (able.empty()) {
    return fail(errc::no_device, "no RDMA device can be used: " + joined_reasons(tried));
  }
  return std::vector{best_of(std::move(able))};
}

}  // namespace

std::uint64_t port_view::speed() const noexcept {
  // InfiniBand Architecture, 14.2.5.6 (PortInfo), in megabits per second and lane.
  const auto per_lane = [&]() -> std::uint64_t {
    switch (attributes.active_speed) {
      case 1: return 2'500;
      case 2: return 5'000;
      case 4:
      case 8: return 10'000;
      case 16: return 14'000;
      case 32: return 25'000;
      case 64: return 50'000;
      case 128: return 100'000;
      default: return 0;
    }
  }();
  const auto lanes = [&]() -> std::uint64_t {
    switch (attributes.active_width) {
      case 1: return 1;
      case 2: return 4;
      case 4: return 8;
      case 8: return 12;
      case 16: return 2;
      default: return 0;
    }
  }();
  return per_lane * lanes;
}

std::string gid_text(std::span<const std::uint8_t, 16> gid) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  ::inet_ntop(AF_INET6, gid.data(), text.data(), text.size());
  return text.data();
}

std::string to_string(const gid_entry& entry) {
  const char* type = entry.type == 2 ? "RoCE v2" : entry.type == 1 ? "RoCE v1" : "InfiniBand";
  return gid_text(std::span{entry.gid.raw}) + " (" + type + ")";
}

std::string describe(const device_view& device) {
  if (!device.trouble.empty()) return device.name + ": " + device.trouble;
  std::string text;
  for (const auto& port : device.ports) {
    if (!text.empty()) text += "; ";
    text += device.name + " port " + std::to_string(port.number) + ": " +
            ::ibv_port_state_str(port.attributes.state) +
            (port.ethernet() ? ", Ethernet" : ", InfiniBand");
    if (const auto speed = port.speed(); speed != 0) {
      text += ", " + std::to_string(speed / 1000) + " Gb/s";
    }
    text += ", MTU " + std::to_string(128U << port.attributes.active_mtu);
    if (!device.at.pci_path.empty()) text += ", PCI " + device.at.pci_address();
    if (device.at.numa_node >= 0) text += ", NUMA node " + std::to_string(device.at.numa_node);
    if (const auto* gid = best_gid(port)) {
      text += ", GID " + std::to_string(gid->index) + " " + to_string(*gid);
    }
    for (const auto& counter : port.trouble) {
      text += ", " + counter.name + " " + std::to_string(counter.value);
    }
  }
  return text.empty() ? device.name + ": no port" : text;
}

std::vector<device_view> look_at_devices(const memory_place& memory,
                                         const kernel_folders& folders) {
  std::vector<device_view> views;
  const device_list list;
  views.reserve(static_cast<std::size_t>(list.count));
  for (int i = 0; i < list.count; ++i) {
    views.push_back(look_at(list.all[i], memory, folders.sysfs));
  }
  for (const auto& known : kernel_devices(folders.sysfs)) {
    if (std::ranges::find(views, known.name, &device_view::name) != views.end()) continue;
    auto view = placed(known.name, memory, folders.sysfs);
    const auto no_verbs = why_no_verbs();
    view.trouble =
        no_verbs ? "libibverbs cannot be opened (" + *no_verbs + "); install Debian's libibverbs1"
                 : why_not_listed(known, folders.dev);
    views.push_back(std::move(view));
  }
  std::ranges::sort(views, {}, &device_view::name);
  return views;
}

const gid_entry* best_gid(const port_view& port) {
  const auto best = std::ranges::min_element(port.gids, {}, rank_of);
  return best == port.gids.end() ? nullptr : &*best;
}

result<std::vector<place>> choose_places(const rdma_options& options,
                                         const std::vector<device_view>& devices) {
  if (devices.empty()) {
    return fail(errc::no_device,
                std::string{"no RDMA device found under /sys/class/infiniband; "} + what_to_do);
  }
  if (!names_devices(options)) return choose_best(options, devices);
  std::vector<place> places;
  for (const auto& name : split(options.device)) {
    const auto at = std::ranges::find(devices, name, &device_view::name);
    if (at == devices.end()) {
      std::vector<std::string> names;
      names.reserve(devices.size());
      for (const auto& device : devices) names.push_back(device.name);
      return fail(errc::no_device, "there is no RDMA device '" + name +
                                       "' here; transport.device may name " + joined(names));
    }
    auto here = place_on(*at, options);
    if (!here) return fail(std::move(here).error());
    places.push_back(std::move(*here));
  }
  if (places.empty()) {
    return fail(errc::invalid_config, "transport.device '" + options.device + "' names no device");
  }
  return places;
}

std::vector<std::string> passed_over(const rdma_options& options,
                                     const std::vector<device_view>& devices) {
  std::vector<std::string> all;
  if (names_devices(options)) return all;
  const auto excluded = excluded_by(options);
  for (const auto& device : devices) {
    if (std::ranges::find(excluded, device.name) != excluded.end()) continue;
    if (auto here = place_on(device, options); !here) all.push_back(here.error().message);
  }
  return all;
}

result<std::shared_ptr<device>> device::open(const place& where) {
  const std::shared_ptr<device> made{new device{where}};
  const device_list list;
  for (int i = 0; i < list.count; ++i) {
    if (::ibv_get_device_name(list.all[i]) != where.device) continue;
    made->context_ = ::ibv_open_device(list.all[i]);
  }
  if (made->context_ == nullptr) {
    return fail(errc::no_device, "RDMA device " + where.device +
                                     " cannot be opened: " + what_errno(errno) + "; " + what_to_do);
  }
  made->domain_ = ::ibv_alloc_pd(made->context_);
  if (made->domain_ == nullptr) {
    return fail(errc::no_device, "RDMA device " + where.device +
                                     " gives no protection domain: " + what_errno(errno));
  }
  auto& address = made->address_;
  if (::ibv_query_device(made->context_, &made->limits_) != 0 ||
      ::ibv_query_port(made->context_, where.port, &made->port_) != 0 ||
      ::ibv_query_gid(made->context_, where.port, static_cast<int>(where.gid_index),
                      &address.gid) != 0) {
    return fail(errc::no_device,
                "RDMA device " + where.device +
                    " cannot be queried for its capabilities: " + what_errno(errno));
  }
  address.lid = made->port_.lid;
  address.mtu = static_cast<std::uint8_t>(made->port_.active_mtu);
  return made;
}

port_address device::address() const {
  const std::lock_guard lock{mutex_};
  return address_;
}

void device::look_again() {
  ibv_port_attr port{};
  ibv_gid gid{};
  // A port that is down reports no usable address.
  if (::ibv_query_port(context_, where_.port, &port) != 0 || port.state != IBV_PORT_ACTIVE ||
      ::ibv_query_gid(context_, where_.port, static_cast<int>(where_.gid_index), &gid) != 0) {
    return;
  }
  // A removed address reads as zeros, which no peer could reach.
  if (std::ranges::all_of(gid.raw, [](std::uint8_t byte) { return byte == 0; })) return;
  const std::lock_guard lock{mutex_};
  address_ = {.gid = gid, .lid = port.lid, .mtu = static_cast<std::uint8_t>(port.active_mtu)};
}

void device::record_if_down() {
  ibv_port_attr port{};
  if (::ibv_query_port(context_, where_.port, &port) == 0 && port.state != IBV_PORT_ACTIVE) {
    record_.note(IBV_EVENT_PORT_ERR, port_record::clock::now());
    // The port may have come back, and its event been handled, in between.
    if (::ibv_query_port(context_, where_.port, &port) == 0 && port.state == IBV_PORT_ACTIVE) {
      record_.note(IBV_EVENT_PORT_ACTIVE, port_record::clock::now());
    }
  }
}

bool device::mark_failed(const std::string& why) {
  const std::lock_guard lock{mutex_};
  if (failure_) return false;
  failure_ = why;
  return true;
}

std::optional<std::string> device::failure() const {
  const std::lock_guard lock{mutex_};
  return failure_;
}

bool device::has_windows() const noexcept {
  constexpr auto any = IBV_DEVICE_MEM_WINDOW_TYPE_2A | IBV_DEVICE_MEM_WINDOW_TYPE_2B;
  if ((limits_.device_cap_flags & any) == 0 || limits_.max_mw <= 0) return false;
  auto* window = ::ibv_alloc_mw(domain_, IBV_MW_TYPE_2);
  if (window == nullptr) return false;
  ::ibv_dealloc_mw(window);
  return true;
}

device::~device() {
  if (domain_ != nullptr) ::ibv_dealloc_pd(domain_);
  if (context_ != nullptr) ::ibv_close_device(context_);
}

}  // namespace troupe::transport::rdma
