#pragma once

#include <array>
#include <cstdint>

/// Tells the thread sanitizer of an order that it cannot see. Two ends of a link in one process map
/// the control page at two addresses; a store through one and a load through the other synchronise
/// the threads, but the sanitizer, which knows addresses only, reports the accesses that they order
/// as races. Does nothing in other builds.
namespace troupe::transport::shm {

#if defined(__SANITIZE_THREAD__)

extern "C" {
void __tsan_acquire(void* address);
void __tsan_release(void* address);
}

class thread_order {
 public:
  /// `page` and `direction` identify the ring, with the same values at both ends.
  thread_order(std::uint64_t page, unsigned direction) noexcept
      : key_{&keys[(page * 2 + direction) % keys.size()]} {}
  void before_store() const noexcept { __tsan_release(key_); }
  void after_load() const noexcept { __tsan_acquire(key_); }

 private:
  inline static std::array<char, 8192> keys{};
  char* key_;
};

#else

class thread_order {
 public:
  thread_order(std::uint64_t /*page*/, unsigned /*direction*/) noexcept {}
  void before_store() const noexcept {}
  void after_load() const noexcept {}
};

#endif

}  // namespace troupe::transport::shm
