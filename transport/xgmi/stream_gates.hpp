#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "troupe/transport/endpoint.hpp"
#include "troupe/transport/xgmi/gpu_site.hpp"

namespace troupe::transport::xgmi {

/// The gates of one endpoint, at which streams of engines wait. A gate is a word of host memory and
/// the value that opens it. The GPU reads the word itself, so no thread waits, and opening a gate
/// is a write of four bytes. Thread-safe.
class stream_gates {
 public:
  explicit stream_gates(std::shared_ptr<gpu_site> site) : site_{std::move(site)} {}
  stream_gates(const stream_gates&) = delete;
  stream_gates& operator=(const stream_gates&) = delete;
  ~stream_gates() { close(); }

  /// See `endpoint::hold`.
  [[nodiscard]] result<std::shared_ptr<stream_gate>> hold(const compute_stream& stream);
  /// Opens every gate; no stream is held after this.
  void close();

 private:
  class gate;

  /// Registers a gate for `close`. Returns false if `close` has been called.
  [[nodiscard]] bool keep(const std::shared_ptr<gate>& made);

  const std::shared_ptr<gpu_site> site_;
  std::mutex mutex_;
  std::vector<std::weak_ptr<gate>> gates_;
  std::size_t look_at_{64};  ///< number of gates at which the open ones are dropped
  bool closed_{false};
};

}  // namespace troupe::transport::xgmi
