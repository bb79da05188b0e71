#include <algorithm>
#include <string>
#include <utility>

#include <unistd.h>

#include "troupe/transport/xgmi/xgmi_link.hpp"

// GPU memory that the two ends lend each other: sharing, opening, closing and returning it.

namespace troupe::transport::xgmi {

/// Under the lock. Ensures that the peer can reach the region: writes the region's message to the
/// socket before the grant can arrive anywhere.
result<void> xgmi_link::share_region(const region& memory, const gpu_allocation& place) {
  if (shared_regions_.contains(memory.id())) return {};
  if (lent_.size() >= 2 * peer_gpu_regions::max_regions) {
    return fail(errc::overloaded, "the peer was told of " + std::to_string(lent_.size()) +
                                      " regions and closes none that are gone");
  }
  shm::gpu_region_shared_message said;
  said.region = memory.id().value;
  said.size = memory.size();
  said.allocation = place.id;
  said.allocation_size = place.size;
  said.offset = static_cast<std::uint64_t>(memory.data() - place.base);
  said.address = reinterpret_cast<std::uintptr_t>(memory.data());
  const auto& gpu = gpus_->site->runtime->devices()[place.device].bus_id;
  std::copy_n(gpu.begin(), std::min(gpu.size(), said.gpu.size() - 1), said.gpu.begin());
  // Within one process the address suffices, and drivers refuse to open a process's own exports.
  if (peer_process_.pid() != static_cast<std::uint32_t>(::getpid())) {
    auto handle = gpus_->site->runtime->export_memory(place);
    if (!handle) {
      return fail(handle.error().code, "region " + std::to_string(memory.id().value) + " '" +
                                           memory.name() + "': " + handle.error().message);
    }
    said.handle = *handle;
    said.exported = 1;
  }
  if (auto ok = share(said); !ok) return ok;
  shared_regions_.insert(memory.id());
  lent_.emplace(memory.id(), memory.owner());
  return {};
}

// -- what the peer shares

result<void> xgmi_link::on_shared(shm::received in) {
  if (std::holds_alternative<shm::region_shared_message>(in.body)) {
    return shm_link::on_shared(std::move(in));
  }
  const auto* shared = std::get_if<shm::gpu_region_shared_message>(&in.body);
  if (shared == nullptr || !peer_regions_) {
    return fail(errc::unauthorized, "the xgmi peer shared memory that is not on a GPU");
  }
  if (const auto gone = closed_->size(); gone >= peer_gpu_regions::max_regions) {
    return fail(errc::overloaded, std::to_string(gone) +
                                      " regions of the xgmi peer wait to be closed here, or the "
                                      "peer does not read that they are closed");
  }
  return peer_regions_->add(*shared);
}

// -- the end of a region of the peer

void xgmi_link::on_gone(region_id region) {
  shm_link::on_gone(region);
  if (!peer_regions_) return;
  peer_regions_->part_with(region);
  attention_.store(true, std::memory_order_release);
}

bool xgmi_link::prepare_memory() {
  // Before the link is up nothing of the peer is open; after its end nobody can be told.
  if (up_.load(std::memory_order_acquire)) {
    for (auto& gone : peer_regions_->take_parted()) close_late(std::move(gone));
    say_closed();
  }
  return shm_link::prepare_memory();
}

bool xgmi_link::memory_to_prepare() const {
  return shm_link::memory_to_prepare() || closed_->any() ||
         (peer_regions_ && peer_regions_->any_parting());
}

/// The peer is told once the driver has closed the memory, which held streams delay.
void xgmi_link::close_late(parted_region gone) {
  std::shared_ptr<bell> rung;
  {
    const std::lock_guard lock{mutex_};
    rung = bell_;
  }
  const bool bell_rings = rung != nullptr;
  closed_->expect();
  gone.open.clear();
  gpus_->site->opened.after_closing(gone.allocation,
                                    [id = gone.id, closed = closed_, rung = std::move(rung)] {
                                      closed->put(id);
                                      if (rung) rung->ring();
                                    });
  if (!bell_rings) watch_over();
}

/// Reports closed regions to the peer; those that the socket does not accept now are sent next
/// round.
void xgmi_link::say_closed() {
  const std::lock_guard lock{mutex_};
  if (state_ != link_phase::up) return;
  while (const auto region = closed_->front()) {
    if (!send_message(socket_.get(), shm::gpu_region_closed_message{region->value})) return;
    closed_->pop();
  }
}

// -- the end of a region of ours

result<void> xgmi_link::on_closed(region_id region) {
  std::shared_ptr<void> freed;
  {
    const std::lock_guard lock{mutex_};
    const auto at = lent_.find(region);
    if (at == lent_.end() || shared_regions_.contains(region)) return shm_link::on_closed(region);
    freed = std::move(at->second);
    lent_.erase(at);
  }
  if (freed) gpus_->late.give([freed = std::move(freed)]() mutable { freed.reset(); });
  return {};
}

/// Frees the lent memory: the peer can no longer report that it has closed it.
void xgmi_link::give_back_lent() {
  if (lent_.empty()) return;
  gpus_->late.give([freed = std::move(lent_)]() mutable { freed.clear(); });
  lent_.clear();
}

void xgmi_link::forget_peer_memory() {
  shm_link::forget_peer_memory();
  if (peer_regions_) peer_regions_->take_all().clear();
  give_back_lent();
  bell_.reset();
}

}  // namespace troupe::transport::xgmi
