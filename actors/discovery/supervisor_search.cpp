#include "troupe/actors/discovery/supervisor_search.hpp"

#include <utility>

#include "troupe/actors/base/phrases.hpp"
#include "troupe/kvcache/or_error.hpp"

namespace troupe::actors {

namespace {

constexpr std::chrono::milliseconds between_tellings{50};

}  // namespace

result<found_supervisor> supervisor_place::now(std::chrono::milliseconds patience) {
  using std::chrono::steady_clock;
  {
    const std::lock_guard lock{mutex_};
    if (!how_) return first_;
    const auto time = steady_clock::now();
    const bool is_fresh = looked_ && time - *looked_ < between_looks;
    if (is_fresh && why_not_) return fail(*why_not_);
    if (is_fresh && last_) return *last_;
    looked_ = time;
  }
  // Without the lock: other callers use the previous result meanwhile.
  auto found = how_(patience);
  const std::lock_guard lock{mutex_};
  why_not_.reset();
  if (found) {
    last_ = *found;
  } else {
    why_not_ = found.error();
  }
  return found;
}

std::string supervisor_place::text() const {
  const std::lock_guard lock{mutex_};
  const auto& at = last_ ? *last_ : first_;
  return address_text(at.host, at.port);
}

result<bool> supervisor_search::begin(std::shared_ptr<const begun_terms> terms,
                                      std::function<void(const result<found_supervisor>&)> told) {
  return or_error("no thread can look for the supervisor", [&]() -> result<bool> {
    const std::lock_guard lock{mutex_};
    if (stopped_ || looks_) return false;
    looks_ = true;
    try {
      thread_ = std::jthread{[this, terms = std::move(terms),
                              told = std::move(told)](const std::stop_token& given_up) {
        const auto found = find_or_begin_supervisor(*terms, begin_patience, given_up);
        while (!given_up.stop_requested() && !or_error("", [&] { told(found); }))
          std::this_thread::sleep_for(between_tellings);
        looks_ = false;  // last: assigning the next look's thread joins this one
      }};
    } catch (...) {
      looks_ = false;
      throw;
    }
    return true;
  });
}

void supervisor_search::stop() noexcept {
  std::jthread last;
  {
    const std::lock_guard lock{mutex_};
    stopped_ = true;
    last = std::move(thread_);
  }
  // The destructor of `last` requests the stop and joins.
}

}  // namespace troupe::actors
