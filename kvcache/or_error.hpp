#pragma once

#include <functional>
#include <string_view>
#include <type_traits>
#include <utility>

#include "troupe/kvcache/result.hpp"

namespace troupe {

/// Converts the exception being handled to an error of the activity named by `doing`:
/// `pool_exhausted` if memory ran out, `overloaded` if the system refused another limited resource,
/// else `internal`. Call it in a `catch`.
[[nodiscard]] error exception_as_error(std::string_view doing) noexcept;

namespace detail {
template <class T>
struct as_result {
  using type = T;
};
template <>
struct as_result<void> {
  using type = result<void>;
};
}  // namespace detail

/// Calls `call`, which returns a `result` or nothing, and returns its result. An exception is
/// returned as an error. For the edges of a folder, which no exception crosses.
template <class Call>
[[nodiscard]] auto or_error(std::string_view doing, Call&& call) noexcept ->
    typename detail::as_result<std::invoke_result_t<Call>>::type {
  try {
    if constexpr (std::is_void_v<std::invoke_result_t<Call>>) {
      std::invoke(std::forward<Call>(call));
      return {};
    } else {
      return std::invoke(std::forward<Call>(call));
    }
  } catch (...) {
    return fail(exception_as_error(doing));
  }
}

}  // namespace troupe
