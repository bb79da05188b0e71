#include "troupe/transport/shm/peer_regions.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include <sys/mman.h>
#include <sys/stat.h>

#include "troupe/transport/shm/sealed_memory.hpp"

namespace troupe::transport::shm {

mapped_region::~mapped_region() {
  ::munmap(base_, size_);
}

bool mapped_region::populate_part() noexcept {
  constexpr std::uint64_t part = std::uint64_t{2} << 20;
  const auto bytes = std::min(part, size_ - populated_);
  // Kernels before 5.14 do not support this: the first copy of each page then takes a fault.
  if (::madvise(base_ + populated_, bytes, MADV_POPULATE_WRITE) != 0) return false;
  populated_ += bytes;
  return populated_ < size_;
}

namespace {

/// Whether the memory is reserved already. If not, the process that touches a page first is charged
/// for it.
bool is_reserved(int fd, std::uint64_t size) noexcept {
  constexpr std::uint64_t block = 512;
  struct stat about {};
  return ::fstat(fd, &about) == 0 && static_cast<std::uint64_t>(about.st_blocks) * block >= size;
}

}  // namespace

result<void> peer_regions::add(const region_shared_message& shared, owned_fd fd) {
  const auto said = "region " + std::to_string(shared.region) + " of the shm peer: ";
  auto at = map_sealed(fd.get(), shared.size);
  if (!at) return fail(at.error().code, said + at.error().message);
  auto mapped = std::make_shared<mapped_region>(*at, shared.size);
  const std::lock_guard lock{mutex_};
  if (regions_.size() >= max_regions) {
    return fail(errc::overloaded,
                said + "more than " + std::to_string(max_regions) + " are shared");
  }
  if (!regions_.emplace(region_id{shared.region}, mapped).second) {
    return fail(errc::unauthorized, said + "it was shared before");
  }
  if (is_reserved(fd.get(), shared.size)) fresh_.push_back(std::move(mapped));
  return {};
}

void peer_regions::remove(region_id region) {
  std::shared_ptr<mapped_region> unmapped;  // destroyed after the lock is released
  const std::lock_guard lock{mutex_};
  const auto at = regions_.find(region);
  if (at == regions_.end()) return;
  unmapped = std::move(at->second);
  regions_.erase(at);
  std::erase(fresh_, unmapped);
}

void peer_regions::clear() {
  decltype(regions_) unmapped;
  decltype(fresh_) forgotten;
  const std::lock_guard lock{mutex_};
  unmapped.swap(regions_);
  forgotten.swap(fresh_);
}

bool peer_regions::has_fresh() const {
  const std::lock_guard lock{mutex_};
  return !fresh_.empty();
}

bool peer_regions::populate_part() {
  std::shared_ptr<mapped_region> next;
  {
    const std::lock_guard lock{mutex_};
    if (fresh_.empty()) return false;
    next = fresh_.back();
  }
  const bool more = next->populate_part();
  const std::lock_guard lock{mutex_};
  if (!more) std::erase(fresh_, next);
  return !fresh_.empty();
}

std::shared_ptr<const mapped_region> peer_regions::find(region_id region) const {
  const std::lock_guard lock{mutex_};
  const auto at = regions_.find(region);
  return at == regions_.end() ? nullptr : at->second;
}

}  // namespace troupe::transport::shm
