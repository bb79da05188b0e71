#pragma once

#include <exception>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>

#include "troupe/kvcache/errc.hpp"

namespace troupe {

/// Thrown by `result::value()` on an error, as in `std::expected`. Our own code checks first.
class bad_result_access : public std::exception {
 public:
  explicit bad_result_access(troupe::error e) : error_{std::move(e)}, text_{to_string(error_)} {}
  [[nodiscard]] const char* what() const noexcept override { return text_.c_str(); }
  [[nodiscard]] const troupe::error& error() const noexcept { return error_; }

 private:
  troupe::error error_;
  std::string text_;
};

/// Wraps an error so that it converts to any `result<T>`.
struct unexpected {
  troupe::error value;
};

[[nodiscard]] inline unexpected fail(errc code, std::string message) {
  return unexpected{troupe::error{code, std::move(message)}};
}
[[nodiscard]] inline unexpected fail(troupe::error e) {
  return unexpected{std::move(e)};
}

/// A value or an `error`: the part of `std::expected<T, error>` that is used here, under the same
/// names (not every supported compiler has that header).
template <class T>
class [[nodiscard]] result {
  using stored = std::conditional_t<std::is_void_v<T>, std::monostate, T>;

 public:
  using value_type = T;

  result() requires std::is_void_v<T> : state_{std::in_place_index<0>} {}
  template <class U = stored>
  requires(!std::is_void_v<T> && std::is_constructible_v<stored, U&&> &&
           !std::is_same_v<std::remove_cvref_t<U>, result> &&
           !std::is_same_v<std::remove_cvref_t<U>, unexpected>)
      result(U&& value)  // NOLINT(google-explicit-constructor): a value is returned as it is
      : state_{std::in_place_index<0>, std::forward<U>(value)} {}
  result(unexpected e)  // NOLINT(google-explicit-constructor): and so is fail(...)
      : state_{std::in_place_index<1>, std::move(e.value)} {}

  [[nodiscard]] bool has_value() const noexcept { return state_.index() == 0; }
  explicit operator bool() const noexcept { return has_value(); }

  stored& operator*() & noexcept { return *std::get_if<0>(&state_); }
  const stored& operator*() const& noexcept { return *std::get_if<0>(&state_); }
  stored&& operator*() && noexcept { return std::move(*std::get_if<0>(&state_)); }
  stored* operator->() noexcept { return std::get_if<0>(&state_); }
  const stored* operator->() const noexcept { return std::get_if<0>(&state_); }

  stored& value() & { return checked(), **this; }
  const stored& value() const& { return checked(), **this; }
  stored&& value() && { return checked(), std::move(**this); }

  [[nodiscard]] const troupe::error& error() const& noexcept { return *std::get_if<1>(&state_); }
  [[nodiscard]] troupe::error&& error() && noexcept { return std::move(*std::get_if<1>(&state_)); }

  template <class U>
  [[nodiscard]] stored value_or(U&& other) const& {
    return has_value() ? **this : static_cast<stored>(std::forward<U>(other));
  }

 private:
  void checked() const {
    if (!has_value()) throw bad_result_access{error()};
  }

  std::variant<stored, troupe::error> state_;
};

}  // namespace troupe
