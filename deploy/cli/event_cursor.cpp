#include "troupe/deploy/cli/event_cursor.hpp"

#include <utility>

namespace troupe::deploy::cli {

event_cursor::news event_cursor::take(actors::event_page page) {
  news out;
  const bool another = incarnation_ && *incarnation_ != page.supervisor_incarnation;
  incarnation_ = page.supervisor_incarnation;
  if (another || page.newest < known_) {
    known_ = 0;
    out.restarted = true;
    out.more = true;
    return out;
  }
  for (auto& event : page.events) {
    if (event.sequence <= known_) continue;
    out.missed += event.sequence - known_ - 1;
    known_ = event.sequence;
    out.events.push_back(std::move(event));
  }
  // Without this check, an answer with no new events would be requested in an endless loop.
  out.more = !out.events.empty() && known_ < page.newest;
  return out;
}

}  // namespace troupe::deploy::cli
