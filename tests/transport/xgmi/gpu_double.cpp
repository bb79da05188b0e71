#include "gpu_double.hpp"

#include <cstring>
#include <optional>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "troupe/transport/wire_access.hpp"
#include "troupe/transport/xgmi/gpu_error.hpp"

namespace troupe::transport::xgmi {

namespace {

/// An exported handle of the double: the process and address of the memory.
struct handle_of_double {
  std::int32_t pid{0};
  std::int32_t fd{0};
  std::uint64_t size{0};
  std::uint64_t id{0};
};
static_assert(sizeof(handle_of_double) <= sizeof(memory_handle));

unexpected gone() {
  return fail(gpu_error(gpu_fault::lost, "0000:0a:00.0", "a copy", "it has fallen off the bus"));
}

unexpected invalid() {
  return fail(gpu_error(gpu_fault::invalid, "0000:0a:00.0", "a call", "invalid value"));
}

/// Pinned ranges of host memory: address, size.
struct pinned_ranges {
  std::mutex mutex;
  std::map<std::uint64_t, std::uint64_t> sizes;

  /// Call with the lock held.
  [[nodiscard]] bool hold(std::uint64_t address) const {
    const auto after = sizes.upper_bound(address);
    return after != sizes.begin() && address - std::prev(after)->first < std::prev(after)->second;
  }
};
pinned_ranges& pinned() {
  static pinned_ranges all;
  return all;
}

/// Copies are serialised: batches that write the same bytes at once are the poster's concern. The
/// thread sanitizer should see the races between hosts and GPUs, but not those on bytes that come
/// from or go to a socket, since it does not know the order that a peer's answer imposes.
void copy_bytes(std::uint64_t to, std::uint64_t from, std::uint64_t bytes) {
  const std::lock_guard lock{pinned().mutex};
  std::optional<wire_access> for_peer;
  if (pinned().hold(to) || pinned().hold(from)) for_peer.emplace();
  std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
}

}  // namespace

/// A thread that does one thing after the other.
class gpu_double::stream {
 public:
  stream(const std::atomic<bool>& still, const std::atomic<bool>& lost)
      : still_{still}, lost_{lost}, thread_{[this] { run(); }} {}
  ~stream() {
    {
      const std::lock_guard lock{mutex_};
      ending_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }
  void give(std::function<void()> work) {
    {
      const std::lock_guard lock{mutex_};
      work_.push_back(std::move(work));
    }
    changed_.notify_one();
  }
  void wait() {
    std::unique_lock lock{mutex_};
    idle_.wait(lock, [&] { return work_.empty() && !working_; });
  }

 private:
  void run() {
    std::unique_lock lock{mutex_};
    while (true) {
      changed_.wait(lock, [&] { return ending_ || !work_.empty(); });
      if (work_.empty()) return;
      auto next = std::move(work_.front());
      work_.pop_front();
      working_ = true;
      lock.unlock();
      while (still_.load()) std::this_thread::sleep_for(std::chrono::microseconds{100});
      if (!lost_.load()) next();  // a lost GPU does nothing more
      next = {};
      lock.lock();
      working_ = false;
      if (work_.empty()) idle_.notify_all();
    }
  }

  const std::atomic<bool>& still_;
  const std::atomic<bool>& lost_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::condition_variable idle_;
  bool working_{false};
  std::deque<std::function<void()>> work_;
  bool ending_{false};
  std::thread thread_;
};

namespace {

/// The state of an event that several processes share: a page that all of them map.
struct shared_counts {
  std::atomic<std::uint64_t> recorded{0}, happened{0};
};

std::shared_ptr<shared_counts> map_counts(int fd) {
  void* at = ::mmap(nullptr, sizeof(shared_counts), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) return nullptr;
  return {static_cast<shared_counts*>(at),
          [](shared_counts* counts) { ::munmap(counts, sizeof *counts); }};
}

}  // namespace

class gpu_double::event {
 public:
  event() = default;
  event(std::shared_ptr<shared_counts> counts, int fd) : counts_{std::move(counts)}, fd_{fd} {}
  event(const event&) = delete;
  event& operator=(const event&) = delete;
  ~event() {
    if (fd_ >= 0) ::close(fd_);
  }
  [[nodiscard]] int fd() const { return fd_; }
  /// Whether the event belongs to another process.
  [[nodiscard]] bool opened() const { return counts_ != nullptr && fd_ < 0; }
  /// How many streams were told to wait for it and have not reached that point.
  [[nodiscard]] std::shared_ptr<std::atomic<int>> awaited() const { return awaited_; }

  /// A function that tells whether its last record has completed. Streams may call it after the
  /// event was recorded again or released.
  [[nodiscard]] std::function<bool()> now() const {
    if (counts_) {
      return [counts = counts_, wanted = counts_->recorded.load()] {
        return counts->happened.load(std::memory_order_acquire) >= wanted;
      };
    }
    const std::lock_guard lock{mutex_};
    return [flag = happened_] { return flag->load(std::memory_order_acquire); };
  }
  /// What the stream does when it reaches the record. A stream that waited before the first record
  /// of an event of ours, as no driver's would, waits for that record.
  [[nodiscard]] std::function<void()> record() {
    if (counts_) {
      return [counts = counts_, mine = ++counts_->recorded] {
        counts->happened.store(mine, std::memory_order_release);
      };
    }
    const std::lock_guard lock{mutex_};
    if (recorded_) happened_ = std::make_shared<std::atomic<bool>>(false);
    recorded_ = true;
    return [flag = happened_] { flag->store(true, std::memory_order_release); };
  }

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<std::atomic<bool>> happened_{std::make_shared<std::atomic<bool>>(false)};
  bool recorded_{false};
  const std::shared_ptr<shared_counts> counts_;  ///< of an event that processes share
  const int fd_{-1};
  const std::shared_ptr<std::atomic<int>> awaited_{std::make_shared<std::atomic<int>>(0)};
};

gpu_double::gpu_double(std::vector<std::string> bus_ids) {
  for (auto& id : bus_ids) {
    // Only the first GPU can copy in bulk, so both ways are tested.
    devices_.push_back({.bus_id = std::move(id),
                        .name = "double",
                        .processors = 4,
                        .bulk_copies = devices_.empty()});
  }
}

gpu_double::~gpu_double() {
  for (const auto& [base, one] : memory_) {
    ::munmap(const_cast<std::byte*>(base), one.about.size);
    ::close(one.fd);
  }
}

void gpu_double::lose() {
  lost_ = true;
}
void gpu_double::hold(bool still) {
  still_ = still;
}
bool gpu_double::refuses(call what) {
  auto& left = refused_[static_cast<std::size_t>(what)];
  auto now = left.load();
  while (now > 0 && !left.compare_exchange_weak(now, now - 1)) {
  }
  return now > 0;
}
std::uint64_t gpu_double::launched(copy_way way) const {
  return launched_[static_cast<std::size_t>(way)];
}
void gpu_double::cut(std::uint32_t device, std::uint32_t peer) {
  const std::lock_guard lock{mutex_};
  cut_[{device, peer}] = true;
}
void gpu_double::reach(const std::vector<std::string>& bus_ids) {
  const std::lock_guard lock{mutex_};
  unseen_.insert(bus_ids.begin(), bus_ids.end());
}

usability gpu_double::state() const {
  if (lost_) return {false, "GPU 0000:0a:00.0 has fallen off the bus"};
  return {true, "doubles"};
}

std::optional<gpu_allocation> gpu_double::find(const void* at) const {
  const auto* address = static_cast<const std::byte*>(at);
  const std::lock_guard lock{mutex_};
  auto after = memory_.upper_bound(address);
  if (after == memory_.begin()) return std::nullopt;
  const auto& one = std::prev(after)->second;
  if (address >= one.about.base + one.about.size) return std::nullopt;
  return one.about;
}

result<std::byte*> gpu_double::allocate(std::uint32_t device, std::uint64_t size) {
  const int fd = ::memfd_create("gpu_double", MFD_CLOEXEC);
  if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(size)) != 0) {
    return fail(gpu_error(gpu_fault::no_memory, "", "memfd", "refused"));
  }
  void* at = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) return fail(gpu_error(gpu_fault::no_memory, "", "mmap", "refused"));
  const std::lock_guard lock{mutex_};
  auto* base = static_cast<std::byte*>(at);
  memory_[base] = {{.device = device, .base = base, .size = size, .id = ++last_id_}, fd, false};
  return base;
}

void gpu_double::release(std::uint32_t /*device*/, std::byte* base) noexcept {
  // As drivers do: memory in use is not released.
  std::vector<std::shared_ptr<stream>> running;
  {
    const std::lock_guard lock{mutex_};
    for (const auto& [handle, one] : streams_) running.push_back(one);
  }
  for (const auto& one : running) one->wait();
  const std::lock_guard lock{mutex_};
  const auto at = memory_.find(base);
  if (at == memory_.end()) return;
  ::munmap(base, at->second.about.size);
  ::close(at->second.fd);
  memory_.erase(at);
}

result<void> gpu_double::copy_now(std::byte* to, const std::byte* from, std::uint64_t bytes) {
  std::memcpy(to, from, bytes);
  return {};
}

result<memory_handle> gpu_double::export_memory(const gpu_allocation& of) {
  const std::lock_guard lock{mutex_};
  const auto at = memory_.find(of.base);
  if (at == memory_.end()) return fail(errc::backend_unavailable, "not allocated here");
  const handle_of_double made{::getpid(), at->second.fd, of.size, of.id};
  memory_handle bytes{};
  std::memcpy(bytes.data(), &made, sizeof made);
  return bytes;
}

result<exported_memory> gpu_double::export_dmabuf(const gpu_allocation& of,
                                                  std::span<const std::byte> memory) {
  const std::lock_guard lock{mutex_};
  const auto at = memory_.find(of.base);
  if (at == memory_.end()) return fail(errc::backend_unavailable, "not allocated here");
  exported_ += memory.size();
  return exported_memory{.dmabuf = ::fcntl(at->second.fd, F_DUPFD_CLOEXEC, 0),
                         .offset = static_cast<std::uint64_t>(memory.data() - of.base)};
}

result<std::byte*> gpu_double::open_memory(std::uint32_t device, const memory_handle& handle) {
  handle_of_double wanted;
  std::memcpy(&wanted, handle.data(), sizeof wanted);
  if (wanted.pid == ::getpid()) {
    return fail(gpu_error(gpu_fault::bad_handle, "", "open", "exported by this process"));
  }
  const auto path = "/proc/" + std::to_string(wanted.pid) + "/fd/" + std::to_string(wanted.fd);
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return fail(gpu_error(gpu_fault::bad_handle, "", "open", path));
  void* at = ::mmap(nullptr, wanted.size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) return fail(gpu_error(gpu_fault::no_memory, "", "mmap", "refused"));
  const std::lock_guard lock{mutex_};
  auto* base = static_cast<std::byte*>(at);
  memory_[base] = {
      {.device = device, .base = base, .size = wanted.size, .id = wanted.id}, fd, true};
  ++open_now_;
  return base;
}

void gpu_double::close_memory(std::uint32_t device, std::byte* base) noexcept {
  release(device, base);
  --open_now_;
}

result<pinned_memory> gpu_double::allocate_pinned(std::uint32_t /*device*/, std::size_t size) {
  if (size > may_pin_) return fail(gpu_error(gpu_fault::no_memory, "", "pin", "refused"));
  may_pin_ -= size;
  pinned_now_ += size;
  auto* const at = new std::byte[size];
  const std::lock_guard lock{pinned().mutex};
  pinned().sizes[reinterpret_cast<std::uintptr_t>(at)] = size;
  return pinned_memory{at, reinterpret_cast<std::uintptr_t>(at), size};
}

void gpu_double::release_pinned(const pinned_memory& memory) noexcept {
  pinned_now_ -= memory.size;
  {
    const std::lock_guard lock{pinned().mutex};
    pinned().sizes.erase(reinterpret_cast<std::uintptr_t>(memory.host));
  }
  delete[] memory.host;
}

result<pinned_memory> gpu_double::pin(std::uint32_t /*device*/, std::span<std::byte> memory) {
  if (memory.size() > may_pin_) return fail(gpu_error(gpu_fault::no_memory, "", "pin", "refused"));
  may_pin_ -= memory.size();
  pinned_now_ += memory.size();
  const auto at = reinterpret_cast<std::uintptr_t>(memory.data());
  const std::lock_guard lock{pinned().mutex};
  pinned().sizes[at] = memory.size();
  return pinned_memory{memory.data(), at, memory.size()};
}

void gpu_double::unpin(const pinned_memory& memory) noexcept {
  pinned_now_ -= memory.size;
  const std::lock_guard lock{pinned().mutex};
  pinned().sizes.erase(reinterpret_cast<std::uintptr_t>(memory.host));
}

bool gpu_double::reaches(std::uint32_t device, std::uint32_t peer) const {
  const std::lock_guard lock{mutex_};
  return device < devices_.size() && peer < devices_.size() && !cut_.contains({device, peer});
}

usability gpu_double::reaches_unseen(std::uint32_t /*device*/, const std::string& bus_id) const {
  const std::lock_guard lock{mutex_};
  return {unseen_.contains(bus_id), "it is out of reach; let it see both (CUDA_VISIBLE_DEVICES)"};
}

result<void> gpu_double::enable(std::uint32_t device, std::uint32_t peer) {
  if (reaches(device, peer)) return {};
  return fail(errc::backend_unavailable, "GPU " + devices_[device].bus_id +
                                             " does not reach the memory of GPU " +
                                             devices_[peer].bus_id);
}

result<gpu_stream> gpu_double::make_stream(std::uint32_t device) {
  if (device >= devices_.size()) return fail(errc::no_device, "no such GPU");
  auto made = std::make_shared<stream>(still_, lost_);
  const std::lock_guard lock{mutex_};
  auto* const handle = made.get();
  streams_.emplace(handle, std::move(made));
  device_of_[handle] = device;
  return gpu_stream{device, handle};
}
void gpu_double::release_stream(gpu_stream stream_handle) noexcept {
  std::shared_ptr<stream> ended;  // joins its thread after the lock is released
  const std::lock_guard lock{mutex_};
  const auto at = streams_.find(stream_handle.handle);
  if (at == streams_.end()) return;
  ended = std::move(at->second);
  streams_.erase(at);
  device_of_.erase(stream_handle.handle);
}
result<gpu_event> gpu_double::make_event(std::uint32_t device) {
  return gpu_event{device, new event};
}
gpu_event gpu_double::make_shared_event(std::uint32_t device) {
  const int fd = ::memfd_create("gpu_double event", MFD_CLOEXEC);
  static_cast<void>(::ftruncate(fd, sizeof(shared_counts)));
  return {device, new event{map_counts(fd), fd}};
}
event_handle gpu_double::export_event(gpu_event event_handle_) const {
  const handle_of_double made{::getpid(), static_cast<event*>(event_handle_.handle)->fd(), 0, 0};
  event_handle bytes{};
  std::memcpy(bytes.data(), &made, sizeof made);
  return bytes;
}
result<gpu_event> gpu_double::open_event(std::uint32_t device, const event_handle& handle) {
  if (device >= devices_.size()) return fail(errc::no_device, "no such GPU");
  handle_of_double wanted;
  std::memcpy(&wanted, handle.data(), sizeof wanted);
  const auto path = "/proc/" + std::to_string(wanted.pid) + "/fd/" + std::to_string(wanted.fd);
  const int fd = wanted.pid == ::getpid() ? -1 : ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  auto counts = fd < 0 ? nullptr : map_counts(fd);
  if (fd >= 0) ::close(fd);
  if (counts == nullptr) {
    return fail(errc::invalid_config,
                "the double knows no such event" + std::string{foreign_event});
  }
  ++events_open_now_;
  ++events_opened_ever_;
  return gpu_event{device, new event{std::move(counts), -1}};
}
void gpu_double::release_event(gpu_event event_handle) noexcept {
  const auto* const one = static_cast<event*>(event_handle.handle);
  if (one->opened()) {
    --events_open_now_;
    if (*one->awaited() != 0) ++events_closed_early_;
  }
  delete one;
}

void gpu_double::give(gpu_stream on, std::function<void()> work) {
  static_cast<stream*>(on.handle)->give(std::move(work));
}

result<void> gpu_double::copy(gpu_stream on, std::uint64_t to, std::uint64_t from,
                              std::uint64_t bytes) {
  if (lost_) return gone();
  if (refuses(call::copy)) return invalid();
  ++engine_copies_;
  give(on, [=] { copy_bytes(to, from, bytes); });
  return {};
}

result<void> gpu_double::launch(gpu_stream on, const copy_launch& what) {
  if (lost_) return gone();
  if (refuses(call::launch)) return invalid();
  if (what.count == 0 || what.blocks == 0) return fail(errc::internal, "an empty launch");
  ++launches_;
  launched_[static_cast<std::size_t>(what.way)] += what.count;
  if (what.way == copy_way::rows) {
    give(on, [what] {
      const auto* items = reinterpret_cast<const rows_item*>(what.table);
      for (std::uint32_t i = 0; i < what.count; ++i) {
        for (std::uint32_t row = 0; row < items[i].rows; ++row) {
          copy_bytes(items[i].to + row * items[i].to_stride,
                     items[i].from + row * items[i].from_stride, items[i].length);
        }
      }
    });
    return {};
  }
  std::vector<run_item> here;
  if (what.table == 0) {
    if (what.count > max_inline_items) return fail(errc::internal, "too many items in a launch");
    const auto* items = static_cast<const run_item*>(what.here);
    here.assign(items, items + what.count);
  }
  give(on, [what, here = std::move(here)] {
    const auto* items = here.empty() ? reinterpret_cast<const run_item*>(what.table) : here.data();
    for (std::uint32_t i = 0; i < what.count; ++i) {
      const auto from = items[i].from_and_low & item_address;
      const auto to = items[i].to_and_high & item_address;
      const auto bytes = items[i].from_and_low >> item_address_bits |
                         items[i].to_and_high >> item_address_bits << 8;
      // A real GPU would not do this either.
      if (what.way == copy_way::bulk && ((from | to | bytes) & 15) != 0) continue;
      if (what.way == copy_way::vector && ((from ^ to) & 15) != 0) continue;
      copy_bytes(to, from, bytes);
    }
  });
  return {};
}

result<void> gpu_double::record(gpu_event event_handle, gpu_stream on) {
  if (lost_) return gone();
  if (refuses(call::record)) return invalid();
  give(on, static_cast<event*>(event_handle.handle)->record());
  return {};
}

result<bool> gpu_double::happened(gpu_event event_handle) {
  if (lost_) return gone();
  if (refuses(call::query)) return invalid();
  return static_cast<event*>(event_handle.handle)->now()();
}

result<void> gpu_double::wait_for(gpu_stream on, void* event_handle) {
  if (lost_) return gone();
  const auto* const what = static_cast<event*>(event_handle);
  ++*what->awaited();
  give(on, [this, happened = what->now(), awaited = what->awaited()] {
    while (!happened() && !lost_) std::this_thread::sleep_for(std::chrono::microseconds{50});
    --*awaited;
  });
  return {};
}

result<std::vector<gpu_word>> gpu_double::make_words(std::uint32_t device) {
  constexpr std::size_t count = 8;
  if (!waits_) return fail(gpu_error(gpu_fault::not_permitted, "", "wait", "not supported"));
  const std::lock_guard lock{mutex_};
  words_.push_back(std::make_unique<std::uint32_t[]>(count));
  std::vector<gpu_word> made;
  for (std::size_t i = 0; i < count; ++i) made.push_back({device, words_.back().get() + i, 0});
  return made;
}

result<void> gpu_double::wait_at(gpu_stream on, const gpu_word& word, std::uint32_t value) {
  if (lost_) return gone();
  {
    const std::lock_guard lock{mutex_};
    const auto known = device_of_.find(on.handle);
    if (known == device_of_.end() || known->second != word.device) {
      return fail(errc::invalid_config,
                  "the stream is none of GPU " + devices_[word.device].bus_id);
    }
  }
  give(on, [this, at = word.host, value] {
    const std::atomic_ref word_now{*at};
    if (word_now.load(std::memory_order_acquire) >= value) return;
    ++standing_;
    while (word_now.load(std::memory_order_acquire) < value && !lost_) {
      std::this_thread::sleep_for(std::chrono::microseconds{50});
    }
    --standing_;
  });
  return {};
}

result<void> gpu_double::ring_after(gpu_stream on, std::shared_ptr<bell> what) {
  if (lost_) return gone();
  give(on, [this, what = std::move(what)] {
    if (!lost_) what->ring();  // a driver calls nobody after an error
  });
  return {};
}

std::shared_ptr<gpu_site> double_site() {
  static const auto site = std::make_shared<gpu_site>(std::make_unique<gpu_double>());
  return site;
}

}  // namespace troupe::transport::xgmi
