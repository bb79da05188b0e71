#include "troupe/actors/operations/operation_outcome.hpp"

#include <optional>
#include <utility>

namespace troupe::actors {

namespace {

struct collected_events {
  outcome end;
  std::optional<troupe::error> failure;

  void operator()(event_allocated& e) { end.blocks = std::move(e.blocks); }
  void operator()(event_layers&) {}  // the outcome covers all layers
  void operator()(event_done& e) {
    end.aux = std::move(e.aux);
    end.bytes = e.bytes;
    end.how = std::move(e.how);
  }
  void operator()(event_failed& e) { failure = std::move(e.why); }
  void operator()(event_unpinned&) {}
  void operator()(event_value& e) { end.value = std::move(e.value); }
  void operator()(event_info& e) {
    end.size = e.size;
    end.ttl = e.ttl;
  }
  void operator()(event_wanted&) {}  // only for engines that take events
  void operator()(event_member&) {}  // of no operation
  void operator()(event_placed& e) { end.where = std::move(e.where); }
};

}  // namespace

result<outcome> outcome_of(std::vector<event> events, cache_pool* pool) {
  collected_events all;
  for (auto& e : events) std::visit(all, e.what);
  if (!all.failure) return std::move(all.end);
  const auto& given = all.end.blocks;
  if (pool != nullptr && !given.blocks.empty()) (void)pool->free(given.owner, given.blocks);
  return fail(std::move(*all.failure));
}

}  // namespace troupe::actors
