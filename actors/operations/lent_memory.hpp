#pragma once

#include <atomic>
#include <cstdint>

#include "troupe/kvcache/errc.hpp"

namespace troupe::actors {

/// Memory that the engine lends with a put, until the outcome or until the node has stopped. A
/// reader holds a `read` meanwhile. Thread-safe.
class lent_memory {
 public:
  /// Converts to false if the node has stopped and nothing may be read.
  class read {
   public:
    explicit read(lent_memory& of) noexcept : of_{of} {
      of_.reads_.fetch_add(1);
      may_ = !of_.shut_.load();
    }
    read(const read&) = delete;
    read& operator=(const read&) = delete;
    ~read() { of_.reads_.fetch_sub(1); }
    explicit operator bool() const noexcept { return may_; }

   private:
    lent_memory& of_;
    bool may_{false};
  };

  /// No read begins after this, however late an actor runs.
  void shut_out() noexcept { shut_.store(true); }
  [[nodiscard]] bool is_read() const noexcept { return reads_.load() != 0; }
  /// The error of a put that came too late.
  [[nodiscard]] static troupe::error refusal() { return {errc::aborted, "the node was stopped"}; }

 private:
  std::atomic<std::uint32_t> reads_{0};
  std::atomic<bool> shut_{false};
};

}  // namespace troupe::actors
