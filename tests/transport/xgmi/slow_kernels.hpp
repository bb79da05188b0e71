#pragma once

#include <cstddef>
#include <vector>

#include "gpu_double.hpp"

namespace troupe::transport::xgmi {

/// Kernels that end when the test says so.
class slow_kernels {
 public:
  explicit slow_kernels(gpu_double& gpus)
      : gpus_{gpus}, stream_{gpus.make_stream(0).value()}, other_{gpus.make_stream(0).value()} {}
  slow_kernels(const slow_kernels&) = delete;
  slow_kernels& operator=(const slow_kernels&) = delete;
  /// Ends all kernels.
  ~slow_kernels() {
    for (std::size_t i = 0; i < gates_.size(); ++i) finish(i);
    gpus_.release_stream(stream_);
    gpus_.release_stream(other_);
    for (const auto gate : gates_) gpus_.release_event(gate);
  }
  /// Launches the next kernel of the stream.
  void launch() {
    gates_.push_back(gpus_.make_event(0).value());
    static_cast<void>(gpus_.wait_for(stream_, gates_.back().handle));
  }
  /// An event behind the kernels launched so far.
  [[nodiscard]] gpu_event mark() {
    auto event = gpus_.make_event(0).value();
    record(event);
    return event;
  }
  void record(gpu_event event) { static_cast<void>(gpus_.record(event, stream_)); }
  void finish(std::size_t kernel) { static_cast<void>(gpus_.record(gates_.at(kernel), other_)); }

 private:
  gpu_double& gpus_;
  gpu_stream stream_, other_;
  std::vector<gpu_event> gates_;
};

}  // namespace troupe::transport::xgmi
