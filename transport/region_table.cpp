#include "troupe/transport/region_table.hpp"

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <new>
#include <utility>

#include <fcntl.h>

#include "troupe/kvcache/or_undo.hpp"
#include "troupe/transport/os_error.hpp"

namespace troupe::transport {

namespace {

unexpected not_registered(region_id id) {
  return fail(errc::unknown_region, "region " + std::to_string(id.value) + " is not registered");
}

}  // namespace

result<region_id> region_table::allocate(std::uint64_t size, std::string name) {
  if (size == 0) {
    return fail(errc::invalid_config,
                "region '" + name + "': its size is 0; ask for at least 1 byte");
  }
  if (auto room = check_has_room(1, name); !room) return fail(room.error());
  auto file = memory_file::create(name, size, {.pages = page_choice::ordinary});
  if (!file) return fail(std::move(file).error());
  return add_file(std::move(*file), std::move(name));
}

result<allocated_regions> region_table::allocate(std::span<const std::uint64_t> sizes,
                                                 const std::string& name,
                                                 const host_memory_options& how) {
  std::uint64_t together = 0;
  for (const auto size : sizes) {
    together = size > UINT64_MAX - together ? UINT64_MAX : together + size;
  }
  if (auto room = check_has_room(sizes.size(), name); !room) return fail(room.error());
  if (auto room = check_room_for(together, sizes.size(), how); !room) return fail(room.error());
  allocated_regions made;
  std::vector<std::shared_ptr<const memory_file>> files;
  const auto next = [&](std::uint64_t size) -> result<region_id> {
    auto called = name + " " + std::to_string(files.size());
    if (size == 0) {
      return fail(errc::invalid_config,
                  "region '" + called + "': its size is 0; ask for at least 1 byte");
    }
    auto file = memory_file::create(called, size, how);
    if (!file) return fail(std::move(file).error());
    files.push_back(*file);
    return add_file(std::move(*file), std::move(called));
  };
  const auto take_back = [&] {
    // The regions cannot be in use yet.
    for (const auto id : made.regions) (void)remove(id);
  };
  try {
    made.regions.reserve(sizes.size());
    for (const auto size : sizes) {
      auto region = next(size);
      if (!region) {
        take_back();
        return fail(std::move(region).error());
      }
      made.regions.push_back(*region);
    }
    made.pages = describe_pages(files, how);
  } catch (...) {
    take_back();
    throw;
  }
  return made;
}

result<void> region_table::check_has_room(std::size_t count, const std::string& name) const {
  const std::shared_lock lock{mutex_};
  return check_has_room_locked(count, name);
}

result<void> region_table::check_has_room_locked(std::size_t count, const std::string& name) const {
  const auto left = std::min<std::uint64_t>(max_regions_ - regions_.size(), UINT32_MAX - last_id_);
  if (count <= left) return {};
  return fail(errc::overloaded, "region '" + name + "': " + std::to_string(regions_.size()) +
                                    " regions are registered, the maximum is " +
                                    std::to_string(max_regions_) + " and " + std::to_string(count) +
                                    " more are asked for; deregister some first");
}

result<region_id> region_table::add_file(std::shared_ptr<const memory_file> file,
                                         std::string name) {
  const auto bytes = file->bytes();
  return insert({.id = {},
                 .bytes = bytes,
                 .kind = memory_kind::host,
                 .name = std::move(name),
                 .file = std::move(file)});
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
                 " in the dma-buf and the address of its bytes are at different places in a page");
  }
  // Duplicated: the caller may close its own, and the number may be reused for other memory.
  owned_fd own{::fcntl(as.dmabuf, F_DUPFD_CLOEXEC, 0)};
  if (!own) {
    return wrong("descriptor " + std::to_string(as.dmabuf) +
                 " of its dma-buf cannot be used: " + what_errno(errno));
  }
  return insert({.id = {},
                 .bytes = bytes,
                 .kind = as.kind,
                 .name = std::move(name),
                 .owner = std::move(owner),
                 .dmabuf = std::move(own),
                 .dmabuf_offset = as.offset,
                 .gpu = as.kind == memory_kind::device ? gpu : std::nullopt});
}

result<region_id> region_table::insert(region::description what) {
  // Made before the lock is taken, so that a refusal unmaps after the lock is released.
  owned_region made{new region(std::move(what))};
  const auto begin = reinterpret_cast<std::uintptr_t>(made->data());
  const auto end = begin + made->size();
  if (end < begin) {
    return fail(errc::invalid_config, "region '" + made->name() + "': its end wraps around");
  }
  const std::unique_lock lock{mutex_};
  if (auto room = check_has_room_locked(1, made->name()); !room) return fail(room.error());
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
  const auto place = by_address_.emplace(begin, made.get()).first;
  or_undo([&] { regions_.emplace(id, std::move(made)); }, [&] { by_address_.erase(place); });
  return id;
}

result<void> region_table::withdraw(region_id id) {
  const std::unique_lock lock{mutex_};
  const auto at = regions_.find(id);
  if (at == regions_.end()) return not_registered(id);
  at->second->withdrawn_ = true;
  return {};
}

result<void> region_table::remove(region_id id) {
  owned_region removed;  // destroyed after the lock: unmapping may take long
  std::unique_lock lock{mutex_};
  const auto at = regions_.find(id);
  if (at == regions_.end()) return not_registered(id);
  // Uses are added under the shared lock only, so a count of zero stays zero here.
  if (const auto uses = at->second->uses_.load(std::memory_order_acquire) - 1; uses != 0) {
    return fail(errc::overloaded, "region " + std::to_string(id.value) + " '" + at->second->name() +
                                      "' is used by " + std::to_string(uses) +
                                      " grants and batches; fence their transfers first");
  }
  removed = std::move(at->second);
  regions_.erase(at);
  by_address_.erase(reinterpret_cast<std::uintptr_t>(removed->data()));
  lock.unlock();
  for (const auto& [number, listener] : listeners_) {
    try {
      listener(id);
    } catch (const std::bad_alloc&) {
      // The region is gone, and the other listeners must hear of it.
    }
  }
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
  if (at == regions_.end()) return not_registered(id);
  if (at->second->withdrawn_) {
    return fail(errc::unknown_region, "region " + std::to_string(id.value) + " '" +
                                          at->second->name() + "' was withdrawn");
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
                    "' is memory of a device that is not a GPU of this process, which " +
                    std::string{to_string(by)} + " cannot reach; use rdma");
  }
  return used;
}

result<std::span<std::byte>> region_table::bytes(region_id id) const {
  const std::shared_lock lock{mutex_};
  const auto at = regions_.find(id);
  if (at == regions_.end()) return not_registered(id);
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
