#include "troupe/transport/xgmi/peer_gpu_regions.hpp"

#include <algorithm>
#include <utility>

namespace troupe::transport::xgmi {

peer_gpu_regions::record peer_gpu_regions::record_of(const shm::gpu_region_shared_message& said) {
  auto unused = std::make_shared<std::atomic<bool>>(false);
  // Its deleter runs when the last use ends, on any thread.
  std::shared_ptr<const void> use{
      unused.get(), [unused](const void*) { unused->store(true, std::memory_order_release); }};
  return {said, {}, std::move(use), std::move(unused)};
}

allocation_key peer_gpu_regions::key_of(const shm::gpu_region_shared_message& said,
                                        std::uint32_t device) const {
  return {.pid = pid_, .device = device, .id = said.allocation, .handle = said.handle};
}

parted_region peer_gpu_regions::closed_of(region_id id, record& from) const {
  parted_region made{id, key_of(from.said, 0), {}};
  for (auto& [device, reached] : from.by_device) {
    if (reached.open) made.open.push_back(std::move(reached.open));
  }
  return made;
}

result<void> peer_gpu_regions::add(const shm::gpu_region_shared_message& shared) {
  const auto said = "region " + std::to_string(shared.region) + " of the xgmi peer: ";
  if (shared.size == 0 || shared.offset > shared.allocation_size ||
      shared.size > shared.allocation_size - shared.offset) {
    return fail(errc::unauthorized, said + std::to_string(shared.size) + " bytes at offset " +
                                        std::to_string(shared.offset) +
                                        " are not within an allocation of " +
                                        std::to_string(shared.allocation_size));
  }
  if (shared.gpu.back() != '\0') {
    return fail(errc::unauthorized, said + "its bus id has no end");
  }
  const std::lock_guard lock{mutex_};
  if (regions_.size() >= max_regions || parting_.size() >= max_regions) {
    return fail(errc::overloaded,
                said + "more than " + std::to_string(max_regions) + " are shared");
  }
  if (!regions_.emplace(region_id{shared.region}, record_of(shared)).second) {
    return fail(errc::unauthorized, said + "it was shared before");
  }
  return {};
}

void peer_gpu_regions::part_with(region_id region) {
  std::shared_ptr<const void> ended;
  const std::lock_guard lock{mutex_};
  const auto at = regions_.find(region);
  if (at == regions_.end()) return;
  ended = std::move(at->second.use);
  parting_.emplace_back(region, std::move(at->second));
  regions_.erase(at);
}

bool peer_gpu_regions::any_parting() const {
  const std::lock_guard lock{mutex_};
  return !parting_.empty();
}

std::vector<parted_region> peer_gpu_regions::take_parted() {
  std::vector<parted_region> parted;
  const std::lock_guard lock{mutex_};
  std::erase_if(parting_, [&](auto& one) {
    if (!one.second.unused->load(std::memory_order_acquire)) return false;
    parted.push_back(closed_of(one.first, one.second));
    return true;
  });
  return parted;
}

std::vector<parted_region> peer_gpu_regions::take_all() {
  std::vector<parted_region> all;
  const std::lock_guard lock{mutex_};
  for (auto& [id, one] : regions_) all.push_back(closed_of(id, one));
  for (auto& [id, one] : parting_) all.push_back(closed_of(id, one));
  regions_.clear();
  parting_.clear();
  return all;
}

bool peer_gpu_regions::knows(region_id region) const {
  const std::lock_guard lock{mutex_};
  return regions_.contains(region);
}

namespace {
unexpected not_shared(region_id region) {
  return fail(errc::grant_revoked, "region " + std::to_string(region.value) +
                                       " of the peer is not, or no longer, shared with us");
}
}  // namespace

result<reachable_region> peer_gpu_regions::reach(region_id region, std::uint32_t device) {
  std::unique_lock lock{mutex_};
  const auto at = regions_.find(region);
  if (at == regions_.end()) return not_shared(region);
  auto& known = at->second.by_device;
  if (const auto found = known.find(device); found != known.end()) {
    auto reached = found->second;
    reached.use = at->second.use;
    return reached;
  }
  // Open without the lock, which progress threads need: the driver may take long. The use keeps the
  // record until the opened allocation is stored in it.
  const auto said = at->second.said;
  const auto use = at->second.use;
  lock.unlock();
  auto made = open(said, device);
  if (!made) return made;
  lock.lock();
  if (const auto still = regions_.find(region);
      still != regions_.end() && still->second.use == use) {
    still->second.by_device.emplace(device, *made);
    made->use = use;
    return made;
  }
  const auto parted = std::ranges::find_if(
      parting_, [&](const auto& one) { return one.second.unused.get() == use.get(); });
  if (parted != parting_.end()) parted->second.by_device.emplace(device, std::move(*made));
  return not_shared(region);
}

result<reachable_region> peer_gpu_regions::open(const shm::gpu_region_shared_message& said,
                                                std::uint32_t device) const {
  const std::string gpu{said.gpu.data()};
  if (auto reached = site_->reaches(device, gpu); !reached.usable) {
    return fail(errc::backend_unavailable, std::move(reached.reason));
  }
  if (same_process_) {
    const auto theirs = site_->index_of(gpu);
    if (!theirs) {
      return fail(errc::unauthorized, "a region of this process is said to be on GPU " + gpu +
                                          ", which it does not see");
    }
    if (auto ok = site_->runtime->enable(device, *theirs); !ok) return fail(std::move(ok).error());
    return reachable_region{reinterpret_cast<std::byte*>(said.address), said.size, {}, nullptr};
  }
  if (said.exported != 1) {
    return fail(errc::backend_unavailable,
                "region " + std::to_string(said.region) +
                    " of the peer is in memory that cannot be lent to another process");
  }
  // Opening enables the peer access that the GPU needs; `enable` would cost a context on the peer's
  // GPU.
  auto open = site_->opened.open(key_of(said, device), said.allocation_size);
  if (!open) return fail(std::move(open).error());
  auto* const base = (*open)->base() + said.offset;
  return reachable_region{base, said.size, {}, std::move(*open)};
}

}  // namespace troupe::transport::xgmi
