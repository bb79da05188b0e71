#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "troupe/actors/engine.hpp"
#include "troupe/kvcache/result.hpp"

namespace troupe::c {

/// A frontend's call that waits to be taken.
struct waiting_call {
  std::uint64_t id{0};
  std::string method;
  std::vector<std::uint8_t> payload;
};

/// Calls of frontends, which arrive on Troupe's threads and are taken as events by the engine's
/// threads. Bounded: beyond `max_open` unanswered calls, a further call is refused with
/// `overloaded`. A call whose deadline has passed is neither counted nor handed out. Thread-safe.
class call_inbox {
 public:
  static constexpr std::size_t max_open = 4096;

  [[nodiscard]] static result<std::unique_ptr<call_inbox>> make();
  ~call_inbox();
  call_inbox(const call_inbox&) = delete;
  call_inbox& operator=(const call_inbox&) = delete;

  void put(call incoming);
  [[nodiscard]] std::vector<waiting_call> take(std::size_t max);
  /// `not_found` if there is no such call, or it was answered. If memory runs out, the call stays
  /// open.
  [[nodiscard]] result<void> reply(std::uint64_t id, result<std::vector<std::uint8_t>> answer);
  /// Refuses further calls; open calls are answered with `aborted`.
  void close();
  /// Readable while a call waits to be taken.
  [[nodiscard]] int descriptor() const noexcept { return descriptor_; }

 private:
  using answer_call = std::function<void(result<std::vector<std::uint8_t>>)>;
  struct open_call {
    answer_call answer;
    std::chrono::steady_clock::time_point deadline;
  };
  using open_calls = std::map<std::uint64_t, open_call>;

  explicit call_inbox(int descriptor) : descriptor_{descriptor} {}
  /// Removes the calls whose deadline has passed. Needs the lock; `tell_overdue` answers them
  /// without it.
  [[nodiscard]] open_calls take_overdue();
  static void tell_overdue(open_calls overdue);

  const int descriptor_;
  std::mutex mutex_;
  bool closed_{false};
  std::uint64_t last_id_{0};
  std::deque<waiting_call> waiting_;
  open_calls open_;
};

}  // namespace troupe::c
