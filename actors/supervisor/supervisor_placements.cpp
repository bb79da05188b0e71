#include <string>
#include <utility>
#include <variant>

#include "troupe/actors/base/phrases.hpp"
#include "troupe/actors/supervisor/supervisor_parts.hpp"

namespace troupe::actors::supervisor_parts {

namespace {

placement failed_placement(const std::string& request, const error& e) {
  placement out;
  out.failed = static_cast<std::uint8_t>(e.code);
  out.sentence = e.message;
  out.request = request;
  return out;
}

}  // namespace

void supervisor_state::place(const placement_request& request, placement_promise promise) {
  auto outcome = routes->place(request, now());
  if (!outcome) {
    not_placed(request.request, outcome.error());
    promise.deliver(failed_placement(request.request, outcome.error()));
  } else if (auto* placed = std::get_if<placement>(&*outcome)) {
    report(*placed);
    promise.deliver(std::move(*placed));
  } else {
    waiting[std::get<ticket_id>(*outcome)] = {std::move(promise), request.request};
  }
}

void supervisor_state::deliver(std::vector<served_ticket> served) {
  for (served_ticket& s : served) {
    const auto it = waiting.find(s.ticket);
    if (it == waiting.end()) continue;
    if (s.outcome) {
      report(*s.outcome);
      it->second.promise.deliver(std::move(*s.outcome));
    } else {
      not_placed(it->second.request, s.outcome.error());
      it->second.promise.deliver(failed_placement(it->second.request, s.outcome.error()));
    }
    waiting.erase(it);
  }
}

/// A placement has a sentence if an affinity had to leave its replica.
void supervisor_state::report(const placement& where) {
  if (where.sentence.empty()) return;
  if (const auto held_back = moves.pass()) {
    log->info("request {}: {} ({} more since the last such line)", in_quotes(where.request),
              where.sentence, *held_back);
  } else {
    log->debug("request {}: {}", in_quotes(where.request), where.sentence);
  }
}

void supervisor_state::not_placed(const std::string& request, const error& why) {
  if (const auto held_back = unplaced_requests.pass(now())) {
    note("unplaced", {}, 0, table->epoch(),
         "request " + in_quotes(request) + ": " + to_string(why) + more_of(*held_back));
  }
}

}  // namespace troupe::actors::supervisor_parts
