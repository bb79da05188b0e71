#pragma once

/// The result of a call of the C ABI: TROUPE_OK, or a code whose sentence the calling thread can
/// ask for. Nothing is thrown across the ABI.

#include <string>
#include <string_view>
#include <utility>

#include "troupe/kvcache/or_error.hpp"
#include "troupe/kvcache/result.hpp"
#include "troupe/troupe.h"

namespace troupe::c {

/// Stores the sentence for `troupe_last_error` of this thread and returns the code.
troupe_status refuse(troupe_status code, std::string_view sentence) noexcept;
troupe_status refuse(const error& why) noexcept;
/// The error for an argument that cannot be accepted.
[[nodiscard]] unexpected bad_argument(std::string sentence);

/// The code that C sees.
[[nodiscard]] constexpr troupe_status code_of(errc code) noexcept {
  return static_cast<troupe_status>(code);
}

/// Runs the body of a call. Exceptions (out of memory, a defect) become codes.
template <class Body>
troupe_status guarded(Body&& body) noexcept {
  try {
    const result<void> ended = std::forward<Body>(body)();
    return ended ? TROUPE_OK : refuse(ended.error());
  } catch (const bad_result_access& unexpected_error) {
    return refuse(unexpected_error.error());
  } catch (...) {
    return refuse(exception_as_error("the call cannot be made"));
  }
}

}  // namespace troupe::c
