// The wire form of a layout.
//
//   magic      4 bytes "TKVL"
//   version    varint, 2
//   dtype      varint length (1..32), bytes
//   element_size, block_tokens, blocks, tp_rank, tp_size      varints
//   range      2 varints: 0 and the count of layers below (the whole model), or first_layer + 1 and total_layers
//   model      1 byte: 0, or 1 and 32 bytes
//   groups     varint count of groups of layers that have block tables of their own, then each: block_tokens (0: as
//              above), number of layers, for each layer the distance from the one before (varints; the first: from 0)
//   layers     varint count, then each layer:
//     form     1 byte. 0: kind (1 byte), kv_heads, head_dim, value_dim (varints), varint length and dtype (0: the
//              layout's), element_size (varint), unit (1 byte), varint length and packing, number of planes (varint),
//              then of each plane
//              region, heads, base, block_stride, token_stride, head_stride, head_bytes (varints)
//              1: as the layer before, with the differences of region and base for each plane (zigzag
//              varints)
//   states     varint count, then each: varint length and name, sharding (1 byte), region, slots, base, slot_stride,
//              slot_bytes (varints), varint count of parts, then of each: bytes (varint), sharding (1 byte)
//
// A varint has seven bits a byte, least significant first, the top bit set on all but the last; ten
// bytes at most. Nothing follows the last state.

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <utility>

#include "troupe/kvcache/layout.hpp"

namespace troupe::kvcache {
namespace {

constexpr char magic[] = {'T', 'K', 'V', 'L'};
constexpr std::uint64_t version = 2;
constexpr std::uint8_t form_full = 0;
constexpr std::uint8_t form_as_before = 1;
constexpr std::size_t max_planes = 2;
constexpr std::size_t max_name = 32;
constexpr std::array<std::byte, 32> not_said{};

std::uint64_t zigzag(std::uint64_t difference) noexcept {
  const bool negative = (difference >> 63U) != 0;
  return negative ? ~(difference << 1U) : difference << 1U;
}

std::uint64_t unzigzag(std::uint64_t value) noexcept {
  return (value >> 1U) ^ (std::uint64_t{0} - (value & 1U));
}

class writer {
 public:
  void byte(std::uint8_t value) { bytes_.push_back(std::byte{value}); }
  void number(std::uint64_t value) {
    while (value >= 0x80U) {
      byte(static_cast<std::uint8_t>(value | 0x80U));
      value >>= 7U;
    }
    byte(static_cast<std::uint8_t>(value));
  }
  void text(std::string_view value) {
    number(value.size());
    for (const char c : value) byte(static_cast<std::uint8_t>(c));
  }
  [[nodiscard]] std::vector<std::byte> take() && { return std::move(bytes_); }

 private:
  std::vector<std::byte> bytes_;
};

/// Returns zeros after the first error; the caller checks `good` before it relies on a value.
class reader {
 public:
  explicit reader(std::span<const std::byte> bytes) : rest_{bytes} {}

  std::uint8_t byte() {
    if (rest_.empty()) return good_ = false, std::uint8_t{0};
    const auto value = std::to_integer<std::uint8_t>(rest_.front());
    rest_ = rest_.subspan(1);
    return value;
  }
  std::uint64_t number() {
    std::uint64_t value = 0;
    for (unsigned shift = 0; shift < 64; shift += 7) {
      const std::uint8_t next = byte();
      if (!good_) return 0;
      if (shift == 63 && next > 1) break;
      value |= std::uint64_t{next & 0x7fU} << shift;
      if ((next & 0x80U) == 0) return value;
    }
    good_ = false;
    return 0;
  }
  std::uint32_t small() {
    const std::uint64_t value = number();
    if (value > std::numeric_limits<std::uint32_t>::max()) return good_ = false, 0U;
    return static_cast<std::uint32_t>(value);
  }
  /// A count of elements that take at least one byte each.
  std::size_t count(std::size_t limit) {
    const std::uint64_t value = number();
    if (value > limit || value > rest_.size()) return good_ = false, std::size_t{0};
    return static_cast<std::size_t>(value);
  }
  std::string text(std::size_t limit) {
    const std::size_t length = count(limit);
    std::string value(length, '\0');
    std::transform(rest_.begin(), rest_.begin() + static_cast<std::ptrdiff_t>(length),
                   value.begin(), [](std::byte b) { return static_cast<char>(b); });
    rest_ = rest_.subspan(length);
    return value;
  }
  [[nodiscard]] bool good() const noexcept { return good_; }
  [[nodiscard]] bool at_end() const noexcept { return rest_.empty(); }

 private:
  std::span<const std::byte> rest_;
  bool good_{true};
};

/// Whether `b` differs from `a` only in the places of its planes.
bool same_but_place(const layer_layout& a, const layer_layout& b) {
  if (a.shape != b.shape || a.planes.size() != b.planes.size()) return false;
  for (std::size_t p = 0; p < a.planes.size(); ++p) {
    plane moved = b.planes[p];
    moved.region = a.planes[p].region;
    moved.base = a.planes[p].base;
    if (moved != a.planes[p]) return false;
  }
  return true;
}

void write_full(writer& out, const layer_layout& layer) {
  out.byte(form_full);
  out.byte(static_cast<std::uint8_t>(layer.shape.kind));
  out.number(layer.shape.kv_heads);
  out.number(layer.shape.head_dim);
  out.number(layer.shape.value_dim);
  out.text(layer.shape.dtype);
  out.number(layer.shape.element_size);
  out.byte(static_cast<std::uint8_t>(layer.shape.unit));
  out.text(layer.shape.packing);
  out.number(layer.planes.size());
  for (const auto& p : layer.planes) {
    out.number(p.region);
    out.number(p.heads);
    out.number(p.base);
    out.number(p.block_stride);
    out.number(p.token_stride);
    out.number(p.head_stride);
    out.number(p.head_bytes);
  }
}

void write_as_before(writer& out, const layer_layout& before, const layer_layout& layer) {
  out.byte(form_as_before);
  for (std::size_t p = 0; p < layer.planes.size(); ++p) {
    out.number(zigzag(std::uint64_t{layer.planes[p].region} - before.planes[p].region));
    out.number(zigzag(layer.planes[p].base - before.planes[p].base));
  }
}

std::optional<layer_layout> read_full(reader& in) {
  layer_layout layer;
  layer.shape.kind = static_cast<layer_kind>(in.byte());  // `check` refuses unknown kinds
  layer.shape.kv_heads = in.small();
  layer.shape.head_dim = in.small();
  layer.shape.value_dim = in.small();
  layer.shape.dtype = in.text(max_name);
  layer.shape.element_size = in.small();
  layer.shape.unit = static_cast<opaque_unit>(in.byte());
  layer.shape.packing = in.text(max_name);
  const std::size_t planes = in.count(max_planes);
  for (std::size_t p = 0; p < planes && in.good(); ++p) {
    plane next;
    next.region = in.small();
    next.heads = in.small();
    next.base = in.number();
    next.block_stride = in.number();
    next.token_stride = in.number();
    next.head_stride = in.number();
    next.head_bytes = in.number();
    layer.planes.push_back(next);
  }
  if (!in.good()) return std::nullopt;
  return layer;
}

std::optional<layer_layout> read_as_before(reader& in, const layer_layout& before) {
  layer_layout layer = before;
  for (auto& p : layer.planes) {
    const std::uint64_t region = p.region + unzigzag(in.number());
    p.base += unzigzag(in.number());
    if (!in.good() || region >= max_regions) return std::nullopt;
    p.region = static_cast<std::uint32_t>(region);
  }
  return layer;
}

std::optional<layer_layout> read_layer(reader& in, const std::vector<layer_layout>& before) {
  const std::uint8_t form = in.byte();
  if (!in.good()) return std::nullopt;
  if (form == form_full) return read_full(in);
  if (form == form_as_before && !before.empty()) return read_as_before(in, before.back());
  return std::nullopt;
}

std::optional<state_tensor> read_state(reader& in) {
  state_tensor state;
  state.name = in.text(64);
  state.sharding = static_cast<state_sharding>(in.byte());
  state.region = in.small();
  state.slots = in.small();
  state.base = in.number();
  state.slot_stride = in.number();
  state.slot_bytes = in.number();
  const std::size_t parts = in.count(max_state_parts);
  for (std::size_t i = 0; i < parts && in.good(); ++i) {
    const auto bytes = in.number();
    state.parts.push_back({bytes, static_cast<state_sharding>(in.byte())});
  }
  if (!in.good()) return std::nullopt;
  return state;
}

void write_group(writer& out, const layer_group& group) {
  out.number(group.block_tokens);
  out.number(group.layers.size());
  std::uint32_t before = 0;
  for (const auto layer : group.layers) out.number(layer - std::exchange(before, layer));
}

std::optional<layer_group> read_group(reader& in) {
  layer_group group;
  group.block_tokens = in.small();
  const std::size_t layers = in.count(max_layers);
  std::uint64_t layer = 0;
  for (std::size_t i = 0; i < layers && in.good(); ++i) {
    layer += in.small();
    if (layer >= max_layers) return std::nullopt;
    group.layers.push_back(static_cast<std::uint32_t>(layer));
  }
  if (!in.good()) return std::nullopt;
  return group;
}

unexpected malformed(const char* where) {
  return fail(errc::invalid_config, std::string{"encoded layout: malformed "} + where +
                                        "; the peer sent bytes that no Troupe node writes");
}

}  // namespace

std::vector<std::byte> encode(const cache_layout& layout) {
  writer out;
  for (const char c : magic) out.byte(static_cast<std::uint8_t>(c));
  out.number(version);
  out.text(layout.dtype);
  out.number(layout.element_size);
  out.number(layout.block_tokens);
  out.number(layout.blocks);
  out.number(layout.tp_rank);
  out.number(layout.tp_size);
  const bool says_range = layout.total_layers != 0;
  out.number(says_range ? layout.first_layer + std::uint64_t{1} : 0);
  out.number(says_range ? layout.total_layers : layout.layers.size());
  out.byte(layout.model == not_said ? 0 : 1);
  if (layout.model != not_said) {
    for (const auto byte : layout.model) out.byte(std::to_integer<std::uint8_t>(byte));
  }
  out.number(layout.groups.size());
  for (const auto& group : layout.groups) write_group(out, group);
  out.number(layout.layers.size());
  for (std::size_t i = 0; i < layout.layers.size(); ++i) {
    if (i > 0 && same_but_place(layout.layers[i - 1], layout.layers[i])) {
      write_as_before(out, layout.layers[i - 1], layout.layers[i]);
    } else {
      write_full(out, layout.layers[i]);
    }
  }
  out.number(layout.states.size());
  for (const auto& state : layout.states) {
    out.text(state.name);
    out.byte(static_cast<std::uint8_t>(state.sharding));
    out.number(state.region);
    out.number(state.slots);
    out.number(state.base);
    out.number(state.slot_stride);
    out.number(state.slot_bytes);
    out.number(state.parts.size());
    for (const auto& part : state.parts) {
      out.number(part.bytes);
      out.byte(static_cast<std::uint8_t>(part.sharding));
    }
  }
  return std::move(out).take();
}

result<cache_layout> decode(std::span<const std::byte> bytes) {
  if (bytes.size() > max_encoded_layout) return malformed("size, more than 1 MiB");
  reader in{bytes};
  for (const char c : magic) {
    if (in.byte() != static_cast<std::uint8_t>(c)) return malformed("start");
  }
  const std::uint64_t found = in.number();
  if (!in.good()) return malformed("version");
  if (found != version) {
    return fail(errc::version_mismatch, "encoded layout: version " + std::to_string(found) +
                                            ", this node reads version " + std::to_string(version) +
                                            "; run the same release on both nodes");
  }
  cache_layout layout;
  layout.dtype = in.text(max_name);
  layout.element_size = in.small();
  layout.block_tokens = in.small();
  layout.blocks = in.small();
  layout.tp_rank = in.small();
  layout.tp_size = in.small();
  const auto range_begin = in.small();
  const auto range_of = in.small();
  const auto has_model = in.byte();
  if (has_model > 1) return malformed("model");
  if (has_model == 1) {
    for (auto& byte : layout.model) byte = std::byte{in.byte()};
    if (layout.model == not_said) return malformed("model");  // must use the shorter form
  }
  const std::size_t groups = in.count(max_layer_groups);
  for (std::size_t i = 0; i < groups; ++i) {
    auto group = read_group(in);
    if (!group) return malformed("group");
    layout.groups.push_back(std::move(*group));
  }
  const std::size_t layers = in.count(max_layers);
  if (range_begin != 0) {
    if (range_of == 0) return malformed("range of layers");  // must use the other form
    layout.first_layer = range_begin - 1;
    layout.total_layers = range_of;
  } else if (in.good() && range_of != layers) {
    return malformed("range of layers");
  }
  for (std::size_t i = 0; i < layers; ++i) {
    auto layer = read_layer(in, layout.layers);
    if (!layer) return malformed("layer");
    layout.layers.push_back(std::move(*layer));
  }
  const std::size_t states = in.count(max_states);
  for (std::size_t i = 0; i < states; ++i) {
    auto state = read_state(in);
    if (!state) return malformed("state");
    layout.states.push_back(std::move(*state));
  }
  if (!in.good() || !in.at_end()) return malformed("end");
  if (auto ok = check(layout); !ok) return fail(ok.error());
  return layout;
}

}  // namespace troupe::kvcache
