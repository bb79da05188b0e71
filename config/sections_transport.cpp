#include <algorithm>
#include <array>
#include <cctype>

#include "troupe/config/sections.hpp"
#include "troupe/config/units.hpp"

namespace troupe::config {
namespace {

using std::chrono::milliseconds;
using std::chrono::minutes;

constexpr std::size_t max_devices = 4;  ///< used by one link at once

constexpr std::array<later_word, 3> other_backends{
    {{"cuda*", "copies between the GPUs of a host are `xgmi`, also where the GPUs are NVIDIA's"},
     {"hip*", "copies between the GPUs of a host are `xgmi`"},
     {"nvlink", "copies between the GPUs of a host are `xgmi`, also where the GPUs are NVIDIA's"}}};

constexpr const char* named_backends = "one of shm, tcp, rdma, xgmi";

std::vector<backend_kind> read_fallback(section& transport, backend_kind first) {
  const yaml_node* list = transport.sequence("fallback");
  std::vector<backend_kind> result;
  if (list == nullptr) return result;
  const std::string path = transport.path_of("fallback");
  for (const auto& [node, at] : scalars_of(transport.into(), *list, path, named_backends)) {
    if (node == nullptr) continue;
    const auto kind = transport.word_in<backend_kind>(node->text, at, other_backends);
    if (!kind) continue;
    const bool repeated = std::find(result.begin(), result.end(), *kind) != result.end();
    if (*kind == backend_kind::automatic) {
      transport.into().refuse(at, named_backends, "a fallback is named, not chosen");
    } else if (*kind == first || repeated) {
      transport.into().refuse(at, "", "it has been tried before this entry is reached");
    } else {
      result.push_back(*kind);
    }
  }
  return result;
}

/// Whether the text is "auto", device names separated by commas, or such names to leave out after a
/// ^.
bool is_device_choice(std::string_view text) {
  if (text == "auto") return true;
  if (!text.empty() && text.front() == '^') text.remove_prefix(1);
  std::size_t names = 1;
  std::size_t length = 0;
  for (const char c : text) {
    if (c == ',') {
      if (length == 0) return false;
      length = 0;
      ++names;
      continue;
    }
    const bool good =
        std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '-' || c == '.';
    if (!good || ++length > 63) return false;
  }
  return length != 0 && names <= max_devices;
}

bool may_use(const transport_config& value, backend_kind kind) {
  return value.backend == backend_kind::automatic || value.backend == kind ||
         std::find(value.fallback.begin(), value.fallback.end(), kind) != value.fallback.end();
}

/// Refuses the options of a backend that no link can use.
void refuse_unused(section& transport, backend_kind kind) {
  const auto word = std::string{to_string(kind)};
  transport.into().refuse(
      transport.path_of(word), "",
      "neither `backend` nor `fallback` may become " + word + "; leave the key out");
}

/// A size, or 0 without a unit.
std::uint64_t read_max_registration(section& in) {
  constexpr std::string_view key = "max_registration";
  constexpr std::uint64_t least = 4096;  // memory is registered by pages
  const std::string expected = "0 (what the device reports) or a size from " + format_size(least) +
                               " to " + format_size(max_size) +
                               " with a unit (KiB, MiB, GiB, TiB, KB, MB, GB, TB), such as 1GiB";
  const auto chosen = in.text(key, expected);
  if (!chosen || *chosen == "0") return 0;
  const auto value = parse_size(*chosen);
  if (value && (*value == 0 || *value >= least)) return *value;
  in.into().refuse(in.path_of(key), expected);
  return 0;
}

/// A duration, or 0 without a unit.
milliseconds read_fence_patience(section& in) {
  constexpr std::string_view key = "fence_patience";
  constexpr auto least = milliseconds{10};
  constexpr auto most = minutes{1};
  const std::string expected = "0 (as long as `peer_silence`) or a duration from " +
                               format_duration(least) + " to " + format_duration(most) +
                               " with a unit (ms, s, min, h), such as 2s";
  const auto chosen = in.text(key, expected);
  if (!chosen || *chosen == "0") return {};
  const auto value = parse_duration(*chosen);
  if (value && *value >= least && *value <= most) return *value;
  in.into().refuse(in.path_of(key), expected);
  return {};
}

rdma_config read_rdma(section& transport, const transport_config& parent) {
  const yaml_node* node = transport.mapping("rdma");
  rdma_config value;
  if (node == nullptr) return value;
  section in{transport.into(), node, transport.path_of("rdma")};
  const auto number = [&in](std::string_view key, std::int64_t low, std::int64_t high,
                            auto otherwise) {
    return static_cast<decltype(otherwise)>(in.integer(key, low, high, otherwise));
  };
  value.port = number("port", 0, 255, value.port);
  value.gid_index = number("gid_index", -1, 255, value.gid_index);
  value.traffic_class = number("traffic_class", 0, 255, value.traffic_class);
  value.service_level = number("service_level", 0, 15, value.service_level);
  value.pkey_index = number("pkey_index", 0, 65'535, value.pkey_index);
  value.hop_limit = number("hop_limit", 1, 255, value.hop_limit);
  value.timeout = number("timeout", 8, 20, value.timeout);
  value.retry_count = number("retry_count", 0, 7, value.retry_count);
  value.memory_windows = in.word("memory_windows", value.memory_windows);
  value.relaxed_ordering = in.word("relaxed_ordering", value.relaxed_ordering);
  value.max_registration = read_max_registration(in);
  value.fence_patience = read_fence_patience(in);
  in.finish();
  if (!may_use(parent, backend_kind::rdma)) refuse_unused(transport, backend_kind::rdma);
  return value;
}

xgmi_config read_xgmi(section& transport, const transport_config& parent) {
  const yaml_node* node = transport.mapping("xgmi");
  xgmi_config value;
  if (node == nullptr) return value;
  section in{transport.into(), node, transport.path_of("xgmi")};
  value.copy_blocks =
      static_cast<std::uint32_t>(in.integer("copy_blocks", 1, 1024, value.copy_blocks));
  value.engine_size = in.size("engine_size", value.engine_size);
  value.bulk = in.word("bulk", value.bulk);
  in.finish();
  if (!may_use(parent, backend_kind::xgmi)) refuse_unused(transport, backend_kind::xgmi);
  return value;
}

}  // namespace

transport_config read_transport(section& stage) {
  section in{stage.into(), stage.mapping("transport"), stage.path_of("transport")};
  transport_config value;
  const auto number = [&in](std::string_view key, std::int64_t low, std::int64_t high,
                            std::uint32_t otherwise) {
    return static_cast<std::uint32_t>(in.integer(key, low, high, otherwise));
  };
  value.backend = in.word("backend", value.backend, other_backends);
  value.fallback = read_fallback(in, value.backend);
  constexpr const char* choice = "auto, up to 4 device names such as mlx5_0,mlx5_1, or ^mlx5_2";
  if (const auto device = in.text("device", choice)) {
    if (!is_device_choice(*device)) {
      in.into().refuse(in.path_of("device"), choice);
    } else if (*device != "auto" && !may_use(value, backend_kind::rdma)) {
      in.into().refuse(in.path_of("device"), "auto",
                       "devices are chosen for rdma, and neither `backend` nor `fallback` may "
                       "become rdma");
    } else {
      value.device = *device;
    }
  }
  value.rdma = read_rdma(in, value);
  value.xgmi = read_xgmi(in, value);
  value.qp_per_transfer = number("qp_per_transfer", 1, 64, value.qp_per_transfer);
  value.post_batch_size =
      static_cast<std::int32_t>(in.integer("post_batch_size", -1, 65'536, value.post_batch_size));
  if (value.post_batch_size == 0) {
    in.into().refuse(in.path_of("post_batch_size"), "-1 (the backend's best) or 1 to 65536");
  }
  value.num_workers = number("num_workers", 1, 64, value.num_workers);
  value.data_port = static_cast<std::uint16_t>(number("data_port", 0, 65'535, value.data_port));
  value.connect_timeout =
      in.duration("connect_timeout", milliseconds{1}, minutes{10}, value.connect_timeout);
  value.max_reconnects = number("max_reconnects", 0, 1000, value.max_reconnects);
  value.peer_silence =
      in.duration("peer_silence", milliseconds{100}, minutes{1}, value.peer_silence);
  in.finish();
  return value;
}

}  // namespace troupe::config
