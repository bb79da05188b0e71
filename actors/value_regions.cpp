#include "troupe/actors/value_regions.hpp"

#include <algorithm>

namespace troupe::actors {

result<value_place> register_value(node_context& context, std::span<const std::byte> value,
                                   const std::string& key) {
  const std::lock_guard lock{context.value_regions_mutex};
  for (auto& [region, of] : context.value_regions) {
    if (value.data() < of.bytes.data() ||
        value.data() + value.size() > of.bytes.data() + of.bytes.size()) {
      continue;
    }
    ++of.puts;
    return value_place{region, static_cast<std::uint64_t>(value.data() - of.bytes.data())};
  }
  // The endpoint wants writable memory by type only: what a put grants is reading.
  auto registered = context.endpoint->register_memory(
      {const_cast<std::byte*>(value.data()), value.size()}, "put " + key);
  if (!registered) {
    // `already_exists` would say that the key exists.
    const auto& why = registered.error();
    if (why.code != errc::already_exists) return fail(why);
    return fail(errc::overloaded, why.message + "; wait for the outcome of the other put");
  }
  context.value_regions.emplace(*registered, registered_value{value, 1});
  return value_place{*registered, 0};
}

result<void> unregister_value(node_context& context, region_id region) {
  const std::lock_guard lock{context.value_regions_mutex};
  const auto found = context.value_regions.find(region);
  if (found == context.value_regions.end()) {
    return fail(errc::unknown_region, "that region belongs to no put");
  }
  if (--found->second.puts != 0) return {};
  context.value_regions.erase(found);
  return context.endpoint->deregister(region);
}

}  // namespace troupe::actors
