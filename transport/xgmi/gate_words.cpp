#include "troupe/transport/xgmi/gate_words.hpp"

#include <atomic>
#include <string>
#include <utility>

namespace troupe::transport::xgmi {

void gate_word::open() const noexcept {
  // Release: the stream sees everything that this thread has seen.
  std::atomic_ref<std::uint32_t>{*word.host}.store(value, std::memory_order_release);
}

result<gate_word> gate_words::take(std::uint32_t gpu, const void* stream) {
  auto& mine = of(gpu);
  const std::lock_guard taking{mine.taking};
  std::unique_lock lock{mutex_};
  const auto& device = runtime_->devices()[gpu];
  if (device.queues < least_queues) {
    return fail(errc::backend_unavailable,
                "the work of this process comes to GPU " + device.bus_id + " through " +
                    std::to_string(device.queues) +
                    " queues, and a stream that waits in one may hold up the copies that it waits "
                    "for; give the process at least " +
                    std::to_string(least_queues) +
                    " (CUDA_DEVICE_MAX_CONNECTIONS, GPU_MAX_HW_QUEUES)");
  }
  const auto at_most = device.queues / 2;
  if (!mine.held.contains(stream) && mine.held.size() >= at_most) {
    return fail(errc::overloaded,
                std::to_string(at_most) + " streams of GPU " + device.bus_id +
                    " are held already, and its other queues are for copies; hold one stream for "
                    "several receives, or give the process more queues "
                    "(CUDA_DEVICE_MAX_CONNECTIONS, GPU_MAX_HW_QUEUES)");
  }
  if (mine.free.empty()) {
    if (mine.made >= per_gpu) {
      return fail(errc::overloaded,
                  std::to_string(per_gpu) + " gates are shut on one GPU; open some of them first");
    }
    // The driver may wait for the GPU, and the GPU for a gate: do not block the thread that opens
    // one.
    lock.unlock();
    auto more = runtime_->make_words(gpu);
    lock.lock();
    if (!more) return fail(std::move(more).error());
    mine.made += more->size();
    mine.free.reserve(mine.made);
    for (const auto& word : *more) mine.free.push_back({word, 0, nullptr});
  }
  auto taken = mine.free.back();
  mine.free.pop_back();
  ++taken.value;
  taken.stream = stream;
  ++mine.held[stream];
  return taken;
}

void gate_words::give_back(const gate_word& open) noexcept {
  const std::lock_guard lock{mutex_};
  auto& mine = gpus_[open.word.device];
  if (const auto held = mine.held.find(open.stream);
      held != mine.held.end() && --held->second == 0) {
    mine.held.erase(held);
  }
  if (open.value != last_value) mine.free.push_back(open);
}

bool gate_words::unless_held(std::uint32_t gpu, const std::function<void()>& what) {
  auto& mine = of(gpu);
  const std::unique_lock taking{mine.taking, std::try_to_lock};
  if (!taking.owns_lock()) return false;  // a stream is about to be held
  {
    const std::lock_guard lock{mutex_};
    if (!mine.held.empty()) return false;
  }
  what();
  return true;
}

gate_words::of_gpu& gate_words::of(std::uint32_t gpu) {
  const std::lock_guard lock{mutex_};
  return gpus_[gpu];
}

std::size_t gate_words::made() const {
  const std::lock_guard lock{mutex_};
  std::size_t all = 0;
  for (const auto& [gpu, words] : gpus_) all += words.made;
  return all;
}

}  // namespace troupe::transport::xgmi
