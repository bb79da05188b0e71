// Whether the caches of two ranks map onto each other.

#include <algorithm>
#include <array>
#include <set>
#include <string>
#include <string_view>

#include "troupe/kvcache/layer_parts.hpp"
#include "troupe/kvcache/layout.hpp"

namespace troupe::kvcache {
namespace {

unexpected mismatch(const std::string& what, const std::string& local, const std::string& remote) {
  return fail(errc::layout_mismatch, what + " is " + local + " here and " + remote +
                                         " at the peer; both stages must serve the same model with "
                                         "the same cache settings");
}

result<void> equal(const std::string& what, std::uint64_t local, std::uint64_t remote) {
  if (local == remote) return {};
  return mismatch(what, std::to_string(local), std::to_string(remote));
}

std::string in_quotes(const std::string& text) {
  return "'" + text + "'";
}

result<void> equal(const std::string& what, const std::string& local, const std::string& remote) {
  if (local == remote) return {};
  return mismatch(what, in_quotes(local), in_quotes(remote));
}

std::uint32_t value_dim_of(const layer_shape& shape) noexcept {
  return shape.value_dim != 0 ? shape.value_dim : shape.head_dim;
}

const std::string& dtype_of(const cache_layout& layout, const layer_shape& shape) noexcept {
  return shape.dtype.empty() ? layout.dtype : shape.dtype;
}

/// A layer of the model that both sides hold.
struct shared_layer {
  std::string name;
  std::uint32_t here{0};  ///< with `there`: its number in each layout
  std::uint32_t there{0};
};

shared_layer shared_layer_of(const cache_layout& local, const cache_layout& remote,
                             std::uint32_t number) {
  return {"layer " + std::to_string(number), number - local.first_layer,
          number - remote.first_layer};
}

result<void> check_compatible_opaque(const cache_layout& local, const cache_layout& remote,
                                     const shared_layer& layer) {
  const layer_layout& here = local.layers[layer.here];
  const layer_layout& there = remote.layers[layer.there];
  const auto& name = layer.name;
  if (auto ok = equal(name + " packing", here.shape.packing, there.shape.packing); !ok) return ok;
  if (auto ok = equal(name + " unit", static_cast<unsigned>(here.shape.unit),
                      static_cast<unsigned>(there.shape.unit));
      !ok) {
    return ok;
  }
  if (auto ok = equal(name + " planes", here.planes.size(), there.planes.size()); !ok) return ok;
  for (std::size_t p = 0; p < here.planes.size(); ++p) {
    auto ok = equal(name + " plane " + std::to_string(p) + " bytes of a piece",
                    here.planes[p].head_bytes, there.planes[p].head_bytes);
    if (!ok) return ok;
  }
  if (here.shape.unit != opaque_unit::block) return {};
  return equal(name + " has opaque blocks, and tensor-parallel size", local.tp_size,
               remote.tp_size);
}

result<void> check_compatible_layer(const cache_layout& local, const cache_layout& remote,
                                    const shared_layer& layer) {
  const layer_shape& here = local.layers[layer.here].shape;
  const layer_shape& there = remote.layers[layer.there].shape;
  const auto& name = layer.name;
  if (here.kind != there.kind) {
    return mismatch(name + " kind", std::string{to_string(here.kind)},
                    std::string{to_string(there.kind)});
  }
  if (auto ok = equal(name + " kv_heads", here.kv_heads, there.kv_heads); !ok) return ok;
  const auto* dim = here.kind == layer_kind::mla ? " latent_dim" : " head_dim";
  if (auto ok = equal(name + dim, here.head_dim, there.head_dim); !ok) return ok;
  if (auto ok = equal(name + " value_dim", value_dim_of(here), value_dim_of(there)); !ok) return ok;
  if (here.kind == layer_kind::opaque) return check_compatible_opaque(local, remote, layer);
  if (auto ok = equal(name + " dtype", dtype_of(local, here), dtype_of(remote, there)); !ok)
    return ok;
  return equal(name + " element size", element_size_of(local, here),
               element_size_of(remote, there));
}

/// Groups are defined for the whole model: if the ranges differ, only the shared layers are
/// compared.
result<void> check_compatible_groups(const cache_layout& local, const cache_layout& remote) {
  if (auto ok = equal("number of groups of layers", local.groups.size(), remote.groups.size());
      !ok) {
    return ok;
  }
  const bool one_range = held_layers(local) == held_layers(remote);
  for (std::uint32_t g = 0; g < local.groups.size(); ++g) {
    const std::string name = "group " + std::to_string(g);
    if (one_range) {
      const auto& here = local.groups[g].layers;
      const auto& there = remote.groups[g].layers;
      if (auto ok = equal(name + " layers", here.size(), there.size()); !ok) return ok;
      const auto [mine, other] = std::ranges::mismatch(here, there);
      if (mine != here.end()) {
        const auto at = " layer number " + std::to_string(mine - here.begin());
        if (auto ok = equal(name + at, *mine, *other); !ok) return ok;
      }
    }
    auto ok = equal(name + " block_tokens", block_tokens_of(local, g), block_tokens_of(remote, g));
    if (!ok) return ok;
  }
  if (one_range) return {};
  const auto shared = shared_layers(local, remote);
  for (auto number = shared.begin; number < shared.end; ++number) {
    const auto layer = shared_layer_of(local, remote, number);
    auto ok =
        equal(layer.name + " group", table_of(local, layer.here), table_of(remote, layer.there));
    if (!ok) return ok;
  }
  return {};
}

result<void> check_same_model(const cache_layout& local, const cache_layout& remote) {
  constexpr std::array<std::byte, 32> not_said{};
  if (local.model == remote.model || local.model == not_said || remote.model == not_said) return {};
  const auto begin_of = [](const std::array<std::byte, 32>& model) {
    constexpr std::string_view digits = "0123456789abcdef";
    std::string text;
    for (std::size_t i = 0; i < 8; ++i) {
      text += digits[std::to_integer<unsigned>(model[i]) >> 4U];
      text += digits[std::to_integer<unsigned>(model[i]) & 15U];
    }
    return text + "...";
  };
  return mismatch("the hash of the model", begin_of(local.model), begin_of(remote.model));
}

std::string_view to_string(state_sharding sharding) noexcept {
  return sharding == state_sharding::sliced ? "sliced" : "replicated";
}

result<void> check_compatible_state(const cache_layout& local, const state_tensor& a,
                                    const cache_layout& remote, const state_tensor& b,
                                    const std::string& name) {
  const auto here = parts_of(a);
  const auto there = parts_of(b);
  if (auto ok = equal(name + " parts", here.size(), there.size()); !ok) return ok;
  for (std::size_t i = 0; i < here.size(); ++i) {
    const auto part = here.size() == 1 ? name : name + " part " + std::to_string(i);
    if (here[i].sharding != there[i].sharding) {
      return mismatch(part + " sharding", std::string{to_string(here[i].sharding)},
                      std::string{to_string(there[i].sharding)});
    }
    const bool sliced = here[i].sharding == state_sharding::sliced;
    auto ok = equal(part + " bytes per request", here[i].bytes * (sliced ? local.tp_size : 1),
                    there[i].bytes * (sliced ? remote.tp_size : 1));
    if (!ok) return ok;
  }
  return {};
}

result<void> check_state_named_once(const cache_layout& layout, const char* side) {
  std::set<std::string_view> seen;
  for (const auto& state : layout.states) {
    if (seen.insert(state.name).second) continue;
    return fail(errc::layout_mismatch, "state " + in_quotes(state.name) + " appears twice " + side +
                                           ", and a part of a model knows states by their names");
  }
  return {};
}

/// A side with all layers of the model has all of its states, so also those of the other side.
result<void> check_states_there(const cache_layout& all, const char* side,
                                const cache_layout& other) {
  if (is_part(all)) return {};
  std::set<std::string_view> there;
  for (const auto& state : all.states) there.insert(state.name);
  for (const auto& state : other.states) {
    if (there.contains(state.name)) continue;
    return fail(errc::layout_mismatch, "state " + in_quotes(state.name) + " is missing " + side +
                                           ", where all layers of the model are; both stages must "
                                           "serve the same model with the same cache settings");
  }
  return {};
}

/// States of parts are matched by name; states that only one side has are not compared.
result<void> check_compatible_states_of_parts(const cache_layout& local,
                                              const cache_layout& remote) {
  if (auto ok = check_state_named_once(local, "here"); !ok) return ok;
  if (auto ok = check_state_named_once(remote, "at the peer"); !ok) return ok;
  if (auto ok = check_states_there(local, "here", remote); !ok) return ok;
  if (auto ok = check_states_there(remote, "at the peer", local); !ok) return ok;
  for (const auto& [here, there] : shared_states(local, remote)) {
    auto ok = check_compatible_state(local, local.states[here], remote, remote.states[there],
                                     "state " + in_quotes(local.states[here].name));
    if (!ok) return ok;
  }
  return {};
}

result<void> check_compatible_states(const cache_layout& local, const cache_layout& remote) {
  if (is_part(local) || is_part(remote)) return check_compatible_states_of_parts(local, remote);
  if (auto ok = equal("number of states", local.states.size(), remote.states.size()); !ok) {
    return ok;
  }
  for (std::size_t i = 0; i < local.states.size(); ++i) {
    const std::string name = "state " + std::to_string(i);
    const auto& here = local.states[i];
    const auto& there = remote.states[i];
    if (auto ok = equal(name + " name", here.name, there.name); !ok) return ok;
    if (auto ok = check_compatible_state(local, here, remote, there, name); !ok) return ok;
  }
  return {};
}

}  // namespace

result<void> check_compatible(const cache_layout& local, const cache_layout& remote) {
  if (auto ok = equal("dtype", local.dtype, remote.dtype); !ok) return ok;
  if (auto ok = equal("element size", local.element_size, remote.element_size); !ok) return ok;
  if (auto ok = equal("block_tokens", local.block_tokens, remote.block_tokens); !ok) return ok;
  if (auto ok = equal("number of layers", total_layers_of(local), total_layers_of(remote)); !ok) {
    return ok;
  }
  const auto shared = shared_layers(local, remote);
  for (auto number = shared.begin; number < shared.end; ++number) {
    auto ok = check_compatible_layer(local, remote, shared_layer_of(local, remote, number));
    if (!ok) return ok;
  }
  if (auto ok = check_compatible_groups(local, remote); !ok) return ok;
  if (auto ok = check_compatible_states(local, remote); !ok) return ok;
  return check_same_model(local, remote);
}

}  // namespace troupe::kvcache
