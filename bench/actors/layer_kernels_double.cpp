// Kernels for GPUs that are doubles: a thread computes, and streams wait for it.

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "gpu_double.hpp"
#include "layer_kernels.hpp"
#include "pattern_word.hpp"
#include "processes.hpp"

namespace troupe::bench {

namespace {

using namespace transport::xgmi;

/// Executes tasks in order, like the one compute stream of a process.
class processor {
 public:
  void give(std::function<void()> work) {
    {
      const std::lock_guard lock{mutex_};
      work_.push_back(std::move(work));
    }
    came_.notify_one();
  }

 private:
  void run() {
    std::unique_lock lock{mutex_};
    for (;;) {
      came_.wait(lock, [&] { return !work_.empty(); });
      const auto next = std::move(work_.front());
      work_.pop_front();
      lock.unlock();
      next();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable came_;
  std::deque<std::function<void()>> work_;
  std::jthread thread_{[this] { run(); }};
};

/// The processor; lives as long as the process.
processor& the_processor() {
  static auto& only = *std::make_unique<processor>().release();
  return only;
}

struct moment {
  std::mutex mutex;
  std::condition_variable came;
  bool noted{false};
  clock_type::time_point when;
};

clock_type::time_point when(void* handle) {
  auto& m = *static_cast<moment*>(handle);
  std::unique_lock lock{m.mutex};
  m.came.wait(lock, [&] { return m.noted; });
  return m.when;
}

gpu_runtime& runtime() {
  return *gpu_site::of_process()->runtime;
}

}  // namespace

bool prepare_gpus() {
  gpu_site::set_maker(double_site);
  return true;
}

void* make_compute_stream(std::uint32_t gpu) {
  return need(runtime().make_stream(gpu), "stream").handle;
}

const std::uint64_t* on_gpu(std::uint32_t /*gpu*/, const std::uint64_t* list, std::uint64_t count) {
  return (new std::vector<std::uint64_t>(list, list + count))->data();
}

void compute_layer(std::uint32_t gpu, void* stream, const layer_work& what) {
  static const auto beside = need(runtime().make_stream(gpu), "stream");
  const auto gate = need(runtime().make_event(gpu), "event");
  need(runtime().wait_for({gpu, stream}, gate.handle), "a kernel");
  the_processor().give([what, gate] {
    std::this_thread::sleep_for(std::chrono::microseconds{what.steps});
    for (std::uint32_t run = 0; run < what.count; ++run) {
      const auto at = what.places[run];
      auto* const to = static_cast<unsigned char*>(what.cache) + at;
      for (std::uint64_t i = 0; i < what.length; ++i) to[i] = pattern(at + i, what.seed);
    }
    need(runtime().record(gate, beside), "a kernel");
  });
}

void* make_moment(std::uint32_t /*gpu*/) {
  return std::make_unique<moment>().release();
}

void note_moment(std::uint32_t /*gpu*/, void* handle, void* /*stream*/) {
  auto& m = *static_cast<moment*>(handle);
  {
    const std::lock_guard lock{m.mutex};
    m.noted = false;
  }
  the_processor().give([&m] {
    const std::lock_guard lock{m.mutex};
    m.when = clock_type::now();
    m.noted = true;
    m.came.notify_all();
  });
}

double microseconds_between(std::uint32_t /*gpu*/, void* from, void* to) {
  return std::chrono::duration<double, std::micro>(when(to) - when(from)).count();
}

}  // namespace troupe::bench
