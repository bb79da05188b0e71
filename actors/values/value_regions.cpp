#include "troupe/actors/values/value_regions.hpp"

#include <algorithm>

#include "troupe/kvcache/touched_blocks.hpp"

namespace troupe::actors {

namespace {

/// Bytes per node; a value that finds no room there is copied to a region of its own.
constexpr std::uint64_t bytes_for_copies = std::uint64_t{16} << 20U;

}  // namespace

std::vector<block_id> pool_blocks_of(const node_context& context,
                                     std::span<const std::byte> value) {
  std::vector<block_id> blocks;
  if (!context.pool) return blocks;
  for (std::uint32_t i = 0; i < context.regions.size(); ++i) {
    const auto region = context.endpoint->bytes(context.regions[i]);
    if (!region) continue;
    const auto* const begin = std::max<const std::byte*>(value.data(), region->data());
    const auto* const end =
        std::min<const std::byte*>(value.data() + value.size(), region->data() + region->size());
    if (begin >= end) continue;
    const auto found = kvcache::touched_blocks(
        *context.layout, {i, static_cast<std::uint64_t>(begin - region->data()),
                          static_cast<std::uint64_t>(end - begin)});
    blocks.insert(blocks.end(), found.begin(), found.end());
  }
  std::ranges::sort(blocks);
  blocks.erase(std::ranges::unique(blocks).begin(), blocks.end());
  return blocks;
}

result<value_store::reservation> room_for_copy(node_context& context, std::uint64_t size) {
  const std::lock_guard lock{context.value_regions_mutex};
  if (!context.value_copies) {
    auto made = value_store::create(*context.endpoint, bytes_for_copies);
    if (!made) return fail(made.error());
    context.value_copies = std::move(*made);
  }
  return context.value_copies->scratch(size);
}

result<value_place> register_value(node_context& context, std::span<const std::byte> value,
                                   const std::string& key) {
  const std::lock_guard lock{context.value_regions_mutex};
  for (auto& [region, of] : context.value_regions) {
    if (of.closed || value.data() < of.bytes.data() ||
        value.data() + value.size() > of.bytes.data() + of.bytes.size()) {
      continue;
    }
    ++of.puts;
    return value_place{region, static_cast<std::uint64_t>(value.data() - of.bytes.data())};
  }
  // The endpoint's type asks for writable memory, but a put grants only reading.
  auto registered = context.endpoint->register_memory(
      {const_cast<std::byte*>(value.data()), value.size()}, "put " + key);
  if (!registered) return fail(registered.error());
  context.value_regions.emplace(*registered, registered_value{value, 1});
  return value_place{*registered, 0};
}

void close_values(node_context& context) {
  const std::lock_guard lock{context.value_regions_mutex};
  for (auto& [region, of] : context.value_regions) of.closed = true;
}

result<void> unregister_value(node_context& context, region_id region) {
  const std::lock_guard lock{context.value_regions_mutex};
  const auto found = context.value_regions.find(region);
  if (found == context.value_regions.end()) {
    return fail(errc::unknown_region, "that region belongs to no put");
  }
  found->second.closed = true;
  if (--found->second.puts != 0) return {};
  context.value_regions.erase(found);
  return context.endpoint->deregister(region);
}

}  // namespace troupe::actors
