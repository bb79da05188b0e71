#pragma once

namespace troupe {

/// One callable of several, for `std::visit`: each alternative of a variant has its own.
template <class... Cases>
struct overloaded : Cases... {
  using Cases::operator()...;
};
template <class... Cases>
overloaded(Cases...) -> overloaded<Cases...>;

}  // namespace troupe
