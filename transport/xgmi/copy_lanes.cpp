#include "troupe/transport/xgmi/copy_lanes.hpp"

#include <chrono>
#include <string>
#include <thread>
#include <utility>

namespace troupe::transport::xgmi {

namespace {

/// How long a driver may keep refusing to report the progress of a GPU that is not lost, as drivers
/// do while another thread captures a graph, for example. After that the lane has failed.
constexpr std::chrono::seconds longest_refusal{10};

}  // namespace

// -- a lane

copy_lane::~copy_lane() {
  // Kernels still running access memory that its owner is about to free.
  const auto last = std::chrono::steady_clock::now() + std::chrono::seconds{10};
  while (!reached(last_) && std::chrono::steady_clock::now() < last) {
    if (!look()) std::this_thread::yield();
  }
  for (const auto& one : waiting_) {
    if (one.event.handle != nullptr) runtime_->release_event(one.event);
  }
  for (const auto event : free_) runtime_->release_event(event);
  runtime_->release_stream(stream_);
}

std::uint64_t copy_lane::mark() {
  const std::lock_guard lock{mutex_};
  const auto made = ++last_;
  if (failed_.load(std::memory_order_relaxed)) {
    reached_.store(made, std::memory_order_release);
    return made;
  }
  auto event = event_behind();
  if (event) {
    waiting_.push_back({made, *event});
  } else {
    waiting_.push_back({made, {}});
    static_cast<void>(spoil(made, std::move(event).error()));
  }
  return made;
}

/// Under the lock: records an event behind all work given to the stream so far.
result<gpu_event> copy_lane::event_behind() {
  gpu_event event;
  if (!free_.empty()) {
    event = free_.back();
    free_.pop_back();
  } else if (auto fresh = runtime_->make_event(stream_.device)) {
    event = *fresh;
  } else {
    return fresh;
  }
  if (auto ok = runtime_->record(event, stream_); !ok) {
    free_.push_back(event);
    return fail(std::move(ok).error());
  }
  return event;
}

/// Under the lock: the driver refused the event of the mark. The work before the mark may still
/// run, so the mark waits. Returns false if the lane has failed.
bool copy_lane::spoil(std::uint64_t mark, troupe::error why) {
  const auto now = std::chrono::steady_clock::now();
  if (!refused_since_) refused_since_ = now;
  if (!runtime_->state().usable || now - *refused_since_ >= longest_refusal) {
    fail_all(std::move(why));
    return false;
  }
  spoiled_.emplace(mark, std::move(why));
  spoiled_count_.store(spoiled_.size(), std::memory_order_release);
  return true;
}

/// Under the lock.
void copy_lane::fail_all(troupe::error why) {
  failure_ = std::move(why);
  failed_.store(true, std::memory_order_release);
  for (const auto& one : waiting_) {
    if (one.event.handle != nullptr) free_.push_back(one.event);
  }
  waiting_.clear();
  reached_.store(last_, std::memory_order_release);
}

bool copy_lane::look() {
  const std::unique_lock lock{mutex_, std::try_to_lock};
  if (!lock.owns_lock()) return false;  // another thread looks, or sets a mark
  const auto before = reached_.load(std::memory_order_relaxed);
  while (!waiting_.empty() && hear_of_front()) {
  }
  return reached_.load(std::memory_order_relaxed) != before;
}

/// Under the lock. Returns whether the first mark was reached.
bool copy_lane::hear_of_front() {
  auto& front = waiting_.front();
  if (front.event.handle == nullptr) {
    auto event = event_behind();
    if (!event) {
      static_cast<void>(spoil(front.mark, std::move(event).error()));
      return false;
    }
    front.event = *event;
  }
  const auto happened = runtime_->happened(front.event);
  if (!happened) {
    free_.push_back(std::exchange(front.event, {}));
    static_cast<void>(spoil(front.mark, happened.error()));
    return false;
  }
  refused_since_.reset();  // the driver answers
  if (!*happened) return false;
  reached_.store(front.mark, std::memory_order_release);
  free_.push_back(front.event);
  waiting_.pop_front();
  return true;
}

result<bool> copy_lane::ring_at_end(const std::shared_ptr<bell>& what) {
  const std::lock_guard lock{mutex_};
  if (waiting_.empty()) return false;
  if (auto ok = runtime_->ring_after(stream_, what); !ok) return fail(std::move(ok).error());
  return true;
}

std::optional<troupe::error> copy_lane::take_failure(std::uint64_t mark) {
  if (!failed() && spoiled_count_.load(std::memory_order_acquire) == 0) return std::nullopt;
  const std::lock_guard lock{mutex_};
  const auto at = spoiled_.find(mark);
  if (at == spoiled_.end()) return failure_;
  auto why = std::move(at->second);
  spoiled_.erase(at);
  spoiled_count_.store(spoiled_.size(), std::memory_order_release);
  return why;
}

// -- the lanes of a GPU

result<std::unique_ptr<device_lanes>> device_lanes::make(gpu_runtime& runtime,
                                                         std::uint32_t device) {
  std::unique_ptr<device_lanes> made{new device_lanes{runtime, device}};
  for (std::size_t i = 0; i < lane_count; ++i) {
    auto stream = runtime.make_stream(device);
    if (!stream) return fail(std::move(stream).error());
    made->lanes_.push_back(std::make_unique<copy_lane>(runtime, *stream));
  }
  if (auto ok = made->add_tables(small_table, made->small_); !ok) return fail(ok.error());
  if (auto ok = made->add_tables(large_table, made->large_); !ok) return fail(ok.error());
  return made;
}

device_lanes::~device_lanes() {
  lanes_.clear();
  for (const auto& slab : slabs_) runtime_->release_pinned(slab);
}

/// Under the lock, or before anyone else has access.
result<void> device_lanes::add_tables(std::size_t size, std::vector<pinned_memory>& to) {
  constexpr std::size_t at_once = 16;
  auto slab = runtime_->allocate_pinned(device_, size * at_once);
  if (!slab) return fail(std::move(slab).error());
  slabs_.push_back(*slab);
  for (std::size_t i = 0; i < at_once; ++i) {
    to.push_back({slab->host + i * size, slab->device_address + i * size, size});
  }
  return {};
}

result<pinned_memory> device_lanes::lend_table(std::size_t bytes) {
  const std::lock_guard lock{mutex_};
  const auto size = bytes <= small_table ? small_table : large_table;
  auto& from = bytes <= small_table ? small_ : large_;
  if (from.empty()) {
    if (auto ok = add_tables(size, from); !ok) return fail(std::move(ok).error());
  }
  const auto lent = from.back();
  from.pop_back();
  lent_.fetch_add(size, std::memory_order_release);
  return lent;
}

void device_lanes::take_back(const pinned_memory& table) {
  const std::lock_guard lock{mutex_};
  (table.size == small_table ? small_ : large_).push_back(table);
  lent_.fetch_sub(table.size, std::memory_order_release);
}

// -- all

result<device_lanes*> copy_lanes::on(std::uint32_t device) {
  if (device >= most) {
    return fail(errc::no_device,
                "GPU " + std::to_string(device) + " is one too many for this process");
  }
  if (auto* known = known_[device].load(std::memory_order_acquire)) return known;
  const std::lock_guard lock{mutex_};
  auto& place = devices_[device];
  if (!place) {
    auto made = device_lanes::make(*runtime_, device);
    if (!made) return fail(std::move(made).error());
    place = std::move(*made);
    known_[device].store(place.get(), std::memory_order_release);
  }
  return place.get();
}

bool copy_lanes::look() {
  bool further = false;
  for (auto& known : known_) {
    auto* const device = known.load(std::memory_order_acquire);
    if (device == nullptr) continue;
    for (std::size_t i = 0; i < device_lanes::lane_count; ++i) {
      further = device->lane(i).look() || further;
    }
  }
  return further;
}

bool copy_lanes::ring_at_ends(const std::shared_ptr<bell>& what) {
  bool armed = false;
  for (auto& known : known_) {
    auto* const device = known.load(std::memory_order_acquire);
    if (device == nullptr) continue;
    for (std::size_t i = 0; i < device_lanes::lane_count; ++i) {
      auto rings = device->lane(i).ring_at_end(what);
      if (!rings) return false;
      armed = armed || *rings;
    }
  }
  return armed;
}

}  // namespace troupe::transport::xgmi
