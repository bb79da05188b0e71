#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "troupe/transport/endpoint.hpp"
#include "troupe/transport/xgmi/gpu_site.hpp"

namespace troupe::transport::xgmi {

/// The gates of one endpoint: what streams of engines wait at. A gate is a word of the host's memory
/// and the value that opens it; the GPU looks at the word itself, so that no thread waits and the
/// one that opens writes four bytes. Thread-safe.
class stream_gates {
 public:
  explicit stream_gates(std::shared_ptr<gpu_site> site) : site_{std::move(site)} {}
  stream_gates(const stream_gates&) = delete;
  stream_gates& operator=(const stream_gates&) = delete;
  ~stream_gates() { close(); }

  /// See `endpoint::hold`.
  [[nodiscard]] result<std::shared_ptr<stream_gate>> hold(const compute_stream& stream);
  /// Opens every gate; no stream is held from then on.
  void close();

 private:
  class gate;

  /// Makes it known to `close`. False: that has come.
  [[nodiscard]] bool keep(const std::shared_ptr<gate>& made);

  const std::shared_ptr<gpu_site> site_;
  std::mutex mutex_;
  std::vector<std::weak_ptr<gate>> gates_;
  std::size_t look_at_{64};  ///< so many, and those that are open are forgotten
  bool closed_{false};
};

}  // namespace troupe::transport::xgmi
