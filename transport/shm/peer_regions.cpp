#include "troupe/transport/shm/peer_regions.hpp"

#include <string>
#include <utility>

#include <sys/mman.h>

#include "troupe/transport/shm/sealed_memory.hpp"

namespace troupe::transport::shm {

mapped_region::~mapped_region() {
  ::munmap(base_, size_);
}

result<void> peer_regions::add(const region_shared_message& shared, owned_fd fd) {
  const auto said = "region " + std::to_string(shared.region) + " of the shm peer: ";
  auto at = map_sealed(fd.get(), shared.size);
  if (!at) return fail(at.error().code, said + at.error().message);
  auto mapped = std::make_shared<const mapped_region>(*at, shared.size);
  const std::lock_guard lock{mutex_};
  if (regions_.size() >= max_regions) {
    return fail(errc::overloaded,
                said + "more than " + std::to_string(max_regions) + " are shared");
  }
  if (!regions_.emplace(region_id{shared.region}, std::move(mapped)).second) {
    return fail(errc::unauthorized, said + "it was shared before");
  }
  return {};
}

void peer_regions::remove(region_id region) {
  std::shared_ptr<const mapped_region> unmapped;  // goes after the lock is gone
  const std::lock_guard lock{mutex_};
  const auto at = regions_.find(region);
  if (at == regions_.end()) return;
  unmapped = std::move(at->second);
  regions_.erase(at);
}

void peer_regions::clear() {
  decltype(regions_) unmapped;
  const std::lock_guard lock{mutex_};
  unmapped.swap(regions_);
}

std::shared_ptr<const mapped_region> peer_regions::find(region_id region) const {
  const std::lock_guard lock{mutex_};
  const auto at = regions_.find(region);
  return at == regions_.end() ? nullptr : at->second;
}

}  // namespace troupe::transport::shm
