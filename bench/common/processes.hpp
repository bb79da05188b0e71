#pragma once

/// Processes of a benchmark and their messages.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "troupe/kvcache/result.hpp"

namespace troupe::bench {

using clock_type = std::chrono::steady_clock;

/// Ends the process; the sentence goes to standard error after the program's name.
[[noreturn]] void die(const std::string& what);

template <class T>
T need(result<T> outcome, const char* doing) {
  if (!outcome) die(std::string{doing} + ": " + to_string(outcome.error()));
  return std::move(*outcome);
}
inline void need(const result<void>& outcome, const char* doing) {
  if (!outcome) die(std::string{doing} + ": " + to_string(outcome.error()));
}

[[nodiscard]] double seconds_since(clock_type::time_point start);
[[nodiscard]] double microseconds_since(clock_type::time_point start);
[[nodiscard]] double median(std::vector<double> values);
/// Resident memory of this process, bytes.
[[nodiscard]] std::uint64_t resident_bytes();
/// Processor time of this process, seconds.
[[nodiscard]] double processor_seconds();

/// One end of a socket pair between a process and its child. If the other end is gone, reading or
/// writing ends the process, since its result is no longer wanted.
struct control {
  int fd{-1};
  void put_bytes(const void* data, std::size_t size) const;
  void get_bytes(void* data, std::size_t size) const;
  template <class T>
  void put(const T& value) const {
    put_bytes(&value, sizeof value);
  }
  template <class T>
  T get() const {
    T value;
    get_bytes(&value, sizeof value);
    return value;
  }
  /// Preceded by their number.
  void put_list(const std::vector<std::byte>& bytes) const;
  [[nodiscard]] std::vector<std::byte> get_list() const;
  [[nodiscard]] bool readable() const;
};

/// Forks; call it before any thread starts. The child dies with its parent.
[[nodiscard]] control fork_child(const std::function<void(const control&)>& body);

}  // namespace troupe::bench
