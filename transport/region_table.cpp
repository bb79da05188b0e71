#include "troupe/transport/region_table.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <mutex>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "troupe/transport/os_error.hpp"

namespace troupe::transport {

namespace {

// What can be had without swapping, as the kernel estimates it; a very large number if it does not
// say.
std::uint64_t available_bytes() {
  std::ifstream in{"/proc/meminfo"};
  std::string word;
  while (in >> word) {
    std::uint64_t kib = 0;
    if (word == "MemAvailable:" && in >> kib) return kib << 10;
  }
  return UINT64_MAX;
}

std::string free_memory() {
  const auto bytes = available_bytes();
  return bytes == UINT64_MAX ? "an unknown amount is free"
                             : std::to_string(bytes >> 20) + " MiB are free";
}

// A mapping of a new memfd, sealed so that neither we nor a peer that maps it can shrink it under
// the other (which would turn an access into SIGBUS).
result<region::description> map_memfd(std::uint64_t size, std::string name) {
  const auto refused = [&](const char* call) {
    return fail(errc::pool_exhausted, "region '" + name + "' of " + std::to_string(size) +
                                          " bytes: " + call + ": " + what_errno(errno) + "; " +
                                          free_memory());
  };
  // Reserving more than there is would not fail: the kernel would first kill processes to get it.
  if (size > available_bytes()) {
    return fail(errc::pool_exhausted,
                "region '" + name + "' of " + std::to_string(size) +
                    " bytes is more than this machine has left: " + free_memory());
  }
  // Asked first: fallocate takes what it can get before it fails, and on a machine without swap
  // that is every other process's memory.
  if (size > available_bytes()) {
    errno = ENOMEM;
    return refused("more than is free");
  }
  const int fd =
      ::memfd_create(("troupe:" + name.substr(0, 200)).c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return refused("memfd_create");
  const auto refused_after_open = [&](const char* call) {
    auto said = refused(call);
    ::close(fd);
    return said;
  };
  if (size > static_cast<std::uint64_t>(INT64_MAX) ||
      ::ftruncate(fd, static_cast<off_t>(size)) != 0) {
    return refused_after_open("ftruncate");
  }
  // Reserves the pages now: an OS that is out of memory then says so here and not by a signal
  // later.
  if (::fallocate(fd, 0, 0, static_cast<off_t>(size)) != 0) return refused_after_open("fallocate");
  if (::fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return refused_after_open("fcntl(F_ADD_SEALS)");
  }
  void* at = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) return refused_after_open("mmap");
  return region::description{.id = {},
                             .bytes = {static_cast<std::byte*>(at), size},
                             .kind = memory_kind::host,
                             .name = std::move(name),
                             .fd = fd};
}

}  // namespace

region::~region() {
  if (what_.dmabuf >= 0) ::close(what_.dmabuf);
  if (what_.fd < 0) return;
  ::munmap(what_.bytes.data(), what_.bytes.size());
  ::close(what_.fd);
}

result<region_id> region_table::allocate(std::uint64_t size, std::string name) {
  if (size == 0) {
    return fail(errc::invalid_config,
                "region '" + name + "': its size is 0; ask for at least 1 byte");
  }
  auto mapped = map_memfd(size, std::move(name));
  if (!mapped) return fail(std::move(mapped).error());
  return insert(std::move(*mapped));
}

result<region_id> region_table::add(std::span<std::byte> bytes, std::string name) {
  return add_checked(
      {.id = {}, .bytes = bytes, .kind = memory_kind::host, .name = std::move(name)});
}

result<region_id> region_table::add_of_gpu(std::span<std::byte> bytes, std::string name,
                                           std::uint32_t gpu, std::shared_ptr<void> owner) {
  return add_checked({.id = {},
                      .bytes = bytes,
                      .kind = memory_kind::device,
                      .name = std::move(name),
                      .owner = std::move(owner),
                      .gpu = gpu});
}

result<region_id> region_table::add_checked(region::description what) {
  if (what.bytes.data() == nullptr || what.bytes.empty()) {
    return fail(errc::invalid_config,
                "region '" + what.name + "': the memory to register is null or empty");
  }
  return insert(std::move(what));
}

result<region_id> region_table::add(std::span<std::byte> bytes, std::string name,
                                    const exported_memory& as, std::optional<std::uint32_t> gpu,
                                    std::shared_ptr<void> owner) {
  const auto wrong = [&](const std::string& what) {
    return fail(errc::invalid_config, "region '" + name + "': " + what);
  };
  if (bytes.data() == nullptr || bytes.empty()) {
    return wrong("the memory to register is null or empty");
  }
  if (as.offset + bytes.size() < as.offset) return wrong("its end in the dma-buf wraps around");
  constexpr std::uint64_t in_page = 4095;
  if (((reinterpret_cast<std::uintptr_t>(bytes.data()) ^ as.offset) & in_page) != 0) {
    return wrong("offset " + std::to_string(as.offset) +
                 " in the dma-buf and the address of its bytes differ in their place in a page");
  }
  // One of our own: the caller may close his, and a number that is used again is other memory.
  const int own = ::fcntl(as.dmabuf, F_DUPFD_CLOEXEC, 0);
  if (own < 0) {
    return wrong("descriptor " + std::to_string(as.dmabuf) +
                 " of its dma-buf cannot be used: " + what_errno(errno));
  }
  return insert({.id = {},
                 .bytes = bytes,
                 .kind = as.kind,
                 .name = std::move(name),
                 .fd = -1,
                 .dmabuf = own,
                 .dmabuf_offset = as.offset,
                 .owner = std::move(owner),
                 .gpu = as.kind == memory_kind::device ? gpu : std::nullopt});
}

result<region_id> region_table::insert(region::description what) {
  // Made before the lock is taken, so that a refusal unmaps after the lock is gone.
  owned_region made{new region(std::move(what))};
  const auto begin = reinterpret_cast<std::uintptr_t>(made->data());
  const auto end = begin + made->size();
  if (end < begin) {
    return fail(errc::invalid_config, "region '" + made->name() + "': its end wraps around");
  }
  const std::unique_lock lock{mutex_};
  if (regions_.size() >= max_regions_ || last_id_ == UINT32_MAX) {
    return fail(errc::overloaded, "region '" + made->name() +
                                      "': " + std::to_string(regions_.size()) +
                                      " regions are registered, the maximum; deregister one first");
  }
  auto next = by_address_.lower_bound(begin);
  const region* other = nullptr;
  if (next != by_address_.end() && next->first < end) other = next->second;
  if (next != by_address_.begin()) {
    const auto* previous = std::prev(next)->second;
    if (reinterpret_cast<std::uintptr_t>(previous->data()) + previous->size() > begin) {
      other = previous;
    }
  }
  if (other != nullptr) {
    return fail(errc::already_exists, "region '" + made->name() + "' overlaps region " +
                                          std::to_string(other->id().value) + " '" + other->name() +
                                          "'");
  }
  made->what_.id = region_id{++last_id_};
  const auto id = made->id();
  by_address_.emplace(begin, made.get());
  regions_.emplace(id, std::move(made));
  return id;
}

result<void> region_table::remove(region_id id) {
  owned_region removed;  // dies after the lock: unmapping may take long
  std::unique_lock lock{mutex_};
  const auto at = regions_.find(id);
  if (at == regions_.end()) {
    return fail(errc::unknown_region, "region " + std::to_string(id.value) + " is not registered");
  }
  // Uses are only added under the shared lock, so none stays none here.
  if (const auto uses = at->second->uses_.load(std::memory_order_acquire) - 1; uses != 0) {
    return fail(errc::overloaded, "region " + std::to_string(id.value) + " '" + at->second->name() +
                                      "' is used by " + std::to_string(uses) +
                                      " grants and batches; fence their transfers first");
  }
  removed = std::move(at->second);
  regions_.erase(at);
  by_address_.erase(reinterpret_cast<std::uintptr_t>(removed->data()));
  lock.unlock();
  for (const auto& [number, listener] : listeners_) listener(id);
  return {};
}

std::uint64_t region_table::on_removed(std::function<void(region_id)> handler) {
  const std::unique_lock lock{mutex_};
  listeners_.emplace(++last_listener_, std::move(handler));
  return last_listener_;
}

void region_table::forget_listener(std::uint64_t number) {
  const std::unique_lock lock{mutex_};
  listeners_.erase(number);
}

result<region_use> region_table::use(region_id id) const {
  const std::shared_lock lock{mutex_};
  const auto at = regions_.find(id);
  if (at == regions_.end()) {
    return fail(errc::unknown_region, "region " + std::to_string(id.value) + " is not registered");
  }
  at->second->uses_.fetch_add(1, std::memory_order_relaxed);
  return region_use{*at->second};
}

result<region_use> region_table::use_on_host(region_id id, backend_kind by) const {
  auto used = use(id);
  if (used && (*used)->kind() != memory_kind::host) {
    return fail(errc::backend_unavailable,
                "region " + std::to_string(id.value) + " '" + (*used)->name() +
                    "' is memory of a device, which " + std::string{to_string(by)} +
                    " cannot reach; use xgmi or shm within a host, rdma, or tcp");
  }
  return used;
}

result<region_use> region_table::use_by_way_of_host(region_id id, backend_kind by) const {
  auto used = use(id);
  if (used && (*used)->kind() != memory_kind::host && !(*used)->gpu()) {
    return fail(errc::backend_unavailable,
                "region " + std::to_string(id.value) + " '" + (*used)->name() +
                    "' is memory of a device that is no GPU of this process, which " +
                    std::string{to_string(by)} + " cannot reach; use rdma");
  }
  return used;
}

result<std::span<std::byte>> region_table::bytes(region_id id) const {
  const std::shared_lock lock{mutex_};
  const auto at = regions_.find(id);
  if (at == regions_.end()) {
    return fail(errc::unknown_region, "region " + std::to_string(id.value) + " is not registered");
  }
  return at->second->bytes();
}

std::set<std::uint32_t> region_table::gpus() const {
  const std::shared_lock lock{mutex_};
  std::set<std::uint32_t> found;
  for (const auto& [id, one] : regions_) {
    if (const auto gpu = one->gpu()) found.insert(*gpu);
  }
  return found;
}

bool region_table::has_engine_memory() const {
  const std::shared_lock lock{mutex_};
  return std::ranges::any_of(regions_, [](const auto& entry) {
    const region& one = *entry.second;
    return one.kind() == memory_kind::host && one.fd() < 0;
  });
}

std::size_t region_table::size() const {
  const std::shared_lock lock{mutex_};
  return regions_.size();
}

}  // namespace troupe::transport
