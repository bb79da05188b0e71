#pragma once

namespace troupe {

/// Combines several callables into one for `std::visit`: one for each alternative of a variant.
template <class... Cases>
struct overloaded : Cases... {
  using Cases::operator()...;
};
template <class... Cases>
overloaded(Cases...) -> overloaded<Cases...>;

}  // namespace troupe
