#pragma once

#include <utility>

#include <unistd.h>

namespace troupe::transport {

/// A file descriptor that is closed with its owner.
class owned_fd {
 public:
  owned_fd() = default;
  explicit owned_fd(int fd) noexcept : fd_{fd} {}
  owned_fd(owned_fd&& other) noexcept : fd_{other.release()} {}
  owned_fd& operator=(owned_fd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = other.release();
    }
    return *this;
  }
  ~owned_fd() { reset(); }

  [[nodiscard]] int get() const noexcept { return fd_; }
  explicit operator bool() const noexcept { return fd_ >= 0; }
  /// Hands the descriptor over to the caller, who closes it; -1 if there is none.
  int release() noexcept { return std::exchange(fd_, -1); }
  void reset() noexcept {
    if (const int fd = release(); fd >= 0) ::close(fd);
  }

 private:
  int fd_{-1};
};

}  // namespace troupe::transport
