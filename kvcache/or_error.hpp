#pragma once

#include <functional>
#include <string_view>
#include <type_traits>
#include <utility>

#include "troupe/kvcache/result.hpp"

namespace troupe {

/// The exception that is being handled, as an error of what `doing` names: `pool_exhausted` where memory
/// could not be had, `overloaded` where the system refused something else that is limited, `internal`
/// for all others. To be called in a `catch`.
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

/// Calls `call`, which returns a `result` or nothing, and returns what it returns. What it throws comes
/// back as an error. For the edges of a folder: no exception crosses them.
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
