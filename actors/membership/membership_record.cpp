#include "troupe/actors/membership/membership_record.hpp"

#include <charconv>
#include <limits>
#include <optional>
#include <utility>

#define XXH_INLINE_ALL
#include <nlohmann/json.hpp>
#include <spdlog/fmt/fmt.h>
#include <xxhash.h>

namespace troupe::actors {

namespace {

using nlohmann::json;

constexpr std::string_view magic = "troupe-membership ";

std::string checksum_of(std::string_view body) {
  return fmt::format("{:016x}", XXH3_64bits(body.data(), body.size()));
}

unexpected damaged(const std::string& what) {
  return fail(errc::invalid_config, std::string{"it is damaged: "} + what);
}

// -- fields, any of which may be missing or of any type

template <class Number>
std::optional<Number> number_in(const json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_number_unsigned()) return std::nullopt;
  const auto value = found->get<std::uint64_t>();
  if (value > std::numeric_limits<Number>::max()) return std::nullopt;
  return static_cast<Number>(value);
}

std::optional<std::string> text_in(const json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_string()) return std::nullopt;
  return found->get<std::string>();
}

/// Reads the labels. Older records and nodes that a file names have none.
std::optional<std::vector<node_label>> labels_in(const json& object) {
  std::vector<node_label> labels;
  const auto found = object.find("labels");
  if (found == object.end()) return labels;
  if (!found->is_object() || found->size() > max_labels) return std::nullopt;
  for (const auto& [key, value] : found->items()) {
    if (!value.is_string()) return std::nullopt;
    labels.push_back({key, value.get<std::string>()});
  }
  return labels;
}

std::optional<kvcache::layout_fingerprint> fingerprint_in(const json& object) {
  kvcache::layout_fingerprint fingerprint{};
  const auto found = object.find("fingerprint");
  if (found == object.end()) return fingerprint;
  if (!found->is_array() || found->size() != fingerprint.size()) return std::nullopt;
  for (std::size_t i = 0; i < fingerprint.size(); ++i) {
    const json& byte = (*found)[i];
    if (!byte.is_number_unsigned() || byte.get<std::uint64_t>() > 255) return std::nullopt;
    fingerprint[i] = byte.get<std::uint8_t>();
  }
  return fingerprint;
}

const json* array_in(const json& object, const char* key) {
  const auto found = object.find(key);
  return found == object.end() || !found->is_array() ? nullptr : &*found;
}

std::optional<membership_record::node> node_from(const json& object) {
  if (!object.is_object()) return std::nullopt;
  auto name = text_in(object, "name");
  auto host = text_in(object, "host");
  const auto number = number_in<std::uint8_t>(object, "state");
  const auto state = number ? node_state_from(*number) : std::nullopt;
  const auto incarnation = number_in<std::uint64_t>(object, "incarnation");
  const auto port = number_in<std::uint16_t>(object, "port");
  const auto pid = number_in<std::uint32_t>(object, "pid");
  const auto* former = array_in(object, "former");
  auto labels = labels_in(object);
  const auto fingerprint = fingerprint_in(object);
  if (!labels || !fingerprint) return std::nullopt;
  if (!name || !host || !state || !incarnation || !port || !pid || former == nullptr) {
    return std::nullopt;
  }
  membership_record::node out{std::move(*name),
                              *state,
                              *incarnation,
                              std::move(*host),
                              *port,
                              *pid,
                              {},
                              number_in<std::uint64_t>(object, "registered").value_or(0),
                              number_in<std::uint32_t>(object, "ranks").value_or(0),
                              *fingerprint,
                              std::move(*labels)};
  for (const json& one : *former) {
    if (!one.is_number_unsigned()) return std::nullopt;
    out.former.push_back(one.get<std::uint64_t>());
  }
  return out;
}

result<membership_record> record_from(const json& object) {
  if (!object.is_object()) return damaged("it is not a JSON object");
  auto cluster = text_in(object, "cluster");
  const auto limit = number_in<std::uint64_t>(object, "epoch_limit");
  const auto* nodes = array_in(object, "nodes");
  if (!cluster || !limit || nodes == nullptr) return damaged("a field is missing");
  membership_record out{std::move(*cluster), *limit, {}};
  for (const json& one : *nodes) {
    auto node = node_from(one);
    if (!node)
      return damaged(std::string{"node "} + std::to_string(out.nodes.size()) + " is incomplete");
    out.nodes.push_back(std::move(*node));
  }
  if (const auto* over = array_in(object, "over")) {
    for (const json& one : *over) {
      if (!one.is_number_unsigned()) return damaged("a life that is over is not a number");
      out.over.push_back(one.get<std::uint64_t>());
    }
  }
  return out;
}

}  // namespace

std::string to_text(const membership_record& record) {
  // Made as an object at once: if turning null into an object fails for want of memory, the
  // destructor reads an object that was never made.
  auto object = json::object();
  object["cluster"] = record.cluster;
  object["epoch_limit"] = record.epoch_limit;
  auto& nodes = object["nodes"] = json::array();
  for (const auto& n : record.nodes) {
    nodes.push_back({{"name", n.name},
                     {"state", static_cast<std::uint8_t>(n.state)},
                     {"incarnation", n.incarnation},
                     {"host", n.host},
                     {"port", n.port},
                     {"pid", n.pid},
                     {"former", n.former},
                     {"registered", n.registered}});
    if (n.ranks == 0) continue;
    json& joined = nodes.back();
    joined["ranks"] = n.ranks;
    joined["fingerprint"] = n.fingerprint;
    auto& labels = joined["labels"] = json::object();
    for (const node_label& label : n.labels) labels[label.key] = label.value;
  }
  if (!record.over.empty()) object["over"] = record.over;
  // A host that is not UTF-8 came from a stranger; no decision depends on it.
  const auto body = object.dump(1, ' ', false, json::error_handler_t::replace) + "\n";
  return std::string{magic} + std::to_string(record_version) + " " + checksum_of(body) + "\n" +
         body;
}

bool is_of_record(std::string_view text) noexcept {
  return text.starts_with(magic);
}

result<membership_record> parse_record(std::string_view text) {
  if (!is_of_record(text)) {
    return fail(errc::invalid_config,
                text.empty() ? "it is empty" : "it holds no state of Troupe's");
  }
  const auto end = text.find('\n');
  if (end == std::string_view::npos) return damaged("its first line does not end");
  const auto line = text.substr(magic.size(), end - magic.size());
  std::uint32_t version = 0;
  const auto [rest, bad] = std::from_chars(line.data(), line.data() + line.size(), version);
  if (bad != std::errc{}) return damaged("its first line names no version");
  if (version > record_version) {
    return fail(errc::version_mismatch, std::string{"it has format "} + std::to_string(version) +
                                            " of a later release; this one reads format " +
                                            std::to_string(record_version));
  }
  const auto body = text.substr(end + 1);
  const std::string_view sum{rest, static_cast<std::size_t>(line.data() + line.size() - rest)};
  if (version == 0 || sum != std::string{" "} + checksum_of(body))
    return damaged("its checksum is wrong");
  return record_from(json::parse(body, nullptr, false));
}

}  // namespace troupe::actors
