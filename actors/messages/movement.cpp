#include "troupe/actors/messages/movement.hpp"

#include <algorithm>

namespace troupe::actors {

namespace {

std::chrono::microseconds between(time_point begin, time_point end) {
  return std::chrono::duration_cast<std::chrono::microseconds>(
      std::max(end - begin, time_point::duration::zero()));
}

}  // namespace

void seen_movement::add(const seen_movement& more) {
  segments += more.segments;
  if (backend.empty()) backend = more.backend;
  if (more.first == time_point{}) return;
  first = first == time_point{} ? more.first : std::min(first, more.first);
  last = std::max({last, more.first, more.last});
}

movement seen_movement::told(time_point began, time_point ended) const {
  const bool any = first != time_point{};
  return {between(began, any ? first : ended),
          any ? between(first, last) : std::chrono::microseconds{0}, segments, backend};
}

}  // namespace troupe::actors
