#include "troupe/io/memory_table.hpp"

#include <algorithm>
#include <utility>

#include "troupe/kvcache/or_undo.hpp"
#include "troupe/transport/random.hpp"

namespace troupe::io {

namespace {

std::uint64_t address_of(const std::byte* at) noexcept {
  return reinterpret_cast<std::uintptr_t>(at);
}

}  // namespace

std::vector<memory_table::gap> memory_table::gaps_in(std::span<const std::byte> bytes) const {
  std::vector<gap> gaps;
  auto at = address_of(bytes.data());
  const auto end = at + bytes.size();
  auto next = regions_.upper_bound(at);
  if (next != regions_.begin()) {
    const auto& [begin, before] = *std::prev(next);
    at = std::max(at, begin + before.length);
  }
  for (; at < end; ++next) {
    const auto until = next == regions_.end() ? end : std::min(end, next->first);
    if (until > at) gaps.push_back({at, until - at});
    if (next == regions_.end()) break;
    at = next->first + next->second.length;
  }
  return gaps;
}

void memory_table::add_region(region_id id, const gap& of) {
  regions_.emplace(of.address, owned_region{.id = id, .length = of.length, .uses = 0});
}

std::uint64_t memory_table::draw_number() const {
  auto number = transport::random_id();
  while (memories_.contains(number)) number = transport::random_id();
  return number;
}

result<memory_id> memory_table::add(std::span<std::byte> bytes, std::string name,
                                    transport::access rights) {
  own_memory made{.what = {.number = draw_number(), .rights = rights, .parts = {}},
                  .name = std::move(name),
                  .base = bytes.data(),
                  .age = ++last_age_};
  auto at = address_of(bytes.data());
  const auto end = at + bytes.size();
  std::vector<owned_region*> used;
  for (auto region = std::prev(regions_.upper_bound(at)); at < end; ++region) {
    auto& [begin, owned] = *region;
    const auto offset = at - begin;
    const auto length = std::min(owned.length - offset, end - at);
    made.what.parts.push_back(
        {.region = owned.id, .offset = offset, .address = at, .length = length});
    used.push_back(&owned);
    at += length;
    if (owned.leaving) {
      return fail(errc::overloaded, "memory '" + made.name +
                                        "' overlaps one that is just being deregistered; wait "
                                        "until `deregister` has said ok");
    }
  }
  if (used.size() > descriptor::max_parts) {
    return fail(errc::overloaded, "memory '" + made.name + "' lies in " +
                                      std::to_string(used.size()) +
                                      " stretches that overlap others, the most is " +
                                      std::to_string(descriptor::max_parts) +
                                      "; register whole allocations before parts of them");
  }
  const auto number = made.what.number;
  const auto at_number = memories_.emplace(number, std::move(made)).first;
  const auto& what = at_number->second.what;
  or_undo([&] { by_address_.add(what.address(), what.length(), number); },
          [&] { memories_.erase(at_number); });
  for (auto* one : used) ++one->uses;
  return memory_id{number};
}

void memory_table::withdraw(memory_id id) {
  auto* one = find(id);
  if (one == nullptr) return;
  one->withdrawn = true;
  by_address_.remove(id.value);
}

std::vector<region_id> memory_table::let_leave(memory_id id) {
  auto* one = find(id);
  if (one == nullptr) return {};
  if (std::exchange(one->left, true)) return one->leaving;
  // Release the uses now, not in `remove`: of two memories that leave together, each would
  // otherwise see the other as a remaining user.
  for (const auto& part : one->what.parts) {
    auto& region = regions_.at(part.address - part.offset);
    if (--region.uses != 0) continue;
    region.leaving = true;
    one->leaving.push_back(region.id);
  }
  return one->leaving;
}

void memory_table::remove(memory_id id) {
  const auto gone = let_leave(id);
  const auto at = memories_.find(id.value);
  if (at == memories_.end()) return;
  const auto& what = at->second.what;
  for (const auto& part : what.parts) {
    const auto region = regions_.find(part.address - part.offset);
    // A region that left with another memory is removed with that memory.
    if (region != regions_.end() && std::ranges::find(gone, region->second.id) != gone.end()) {
      regions_.erase(region);
    }
  }
  by_address_.remove(what.number);
  memories_.erase(at);
}

void memory_table::remove_region(region_id id) {
  std::erase_if(regions_,
                [id](const auto& one) { return one.second.id == id && one.second.uses == 0; });
}

std::vector<region_id> memory_table::regions() const {
  std::vector<region_id> ids;
  for (const auto& [address, one] : regions_) ids.push_back(one.id);
  return ids;
}

own_memory* memory_table::find(memory_id id) {
  const auto at = memories_.find(id.value);
  return at == memories_.end() ? nullptr : &at->second;
}

const own_memory* memory_table::find(memory_id id) const {
  const auto at = memories_.find(id.value);
  return at == memories_.end() ? nullptr : &at->second;
}

const own_memory* memory_table::find_at(std::uint64_t address, std::uint64_t length) const {
  const auto number = by_address_.find(address, length);
  return number ? &memories_.at(*number) : nullptr;
}

std::vector<memory_id> memory_table::all() const {
  std::map<std::uint64_t, memory_id> by_age;
  for (const auto& [number, one] : memories_) by_age.emplace(one.age, memory_id{number});
  std::vector<memory_id> ids;
  ids.reserve(by_age.size());
  for (const auto& [age, id] : by_age) ids.push_back(id);
  return ids;
}

}  // namespace troupe::io
