#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <utility>

#include "troupe/transport/types.hpp"
#include "troupe/transport/xgmi/gpu_runtime.hpp"

namespace troupe::transport::xgmi {

/// A stream of an engine, which counts its finished work.
class engine_stream {
 public:
  explicit engine_stream(gpu_runtime& gpus, std::uint32_t gpu = 0)
      : gpus_{gpus}, stream_{gpus.make_stream(gpu).value()} {}
  engine_stream(const engine_stream&) = delete;
  engine_stream& operator=(const engine_stream&) = delete;
  ~engine_stream() { gpus_.release_stream(stream_); }

  [[nodiscard]] compute_stream name() const { return {stream_.handle, stream_.device}; }
  [[nodiscard]] gpu_stream stream() const { return stream_; }
  /// Queues one more piece of work. On a real GPU the work must not call the driver.
  void work(std::function<void()> what = {}) {
    static_cast<void>(gpus_.ring_after(stream_, std::make_shared<piece>(done_, std::move(what))));
  }
  [[nodiscard]] int done() const { return *done_; }

 private:
  using counter = std::shared_ptr<std::atomic<int>>;
  struct piece final : bell {
    piece(counter counts, std::function<void()> does)
        : done{std::move(counts)}, what{std::move(does)} {}
    void ring() noexcept override {
      if (what) what();
      ++*done;
    }
    const counter done;
    const std::function<void()> what;
  };

  gpu_runtime& gpus_;
  const gpu_stream stream_;
  const counter done_{std::make_shared<std::atomic<int>>(0)};
};

}  // namespace troupe::transport::xgmi
