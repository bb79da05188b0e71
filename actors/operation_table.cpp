#include "troupe/actors/operation_table.hpp"

#include <utility>

namespace troupe::actors {

std::string operation_table::key_of(const entry& what) {
  if (what.request.empty()) return {};
  return (what.kind == operation_kind::send ? "s:" : "r:") + what.request;
}

result<operation_id> operation_table::begin(entry what) {
  const std::lock_guard lock{mutex_};
  if (live_.size() >= bound_) {
    return fail(errc::overloaded, std::to_string(bound_) +
                                      " operations are live at this node, which is its bound; wait "
                                      "for some to end or raise limits.max_transfers");
  }
  const operation_id id{next_};
  const auto key = key_of(what);
  if (!key.empty() && !by_request_.try_emplace(key, id).second) {
    return fail(errc::already_exists, "request `" + what.request + "` is live here already");
  }
  ++next_;
  live_.emplace(id, std::move(what));
  return id;
}

result<operation_table::entry> operation_table::find(operation_id id) const {
  const std::lock_guard lock{mutex_};
  const auto found = live_.find(id);
  if (found == live_.end()) {
    return fail(errc::not_found, "operation " + std::to_string(id.value) + " has ended");
  }
  return found->second;
}

result<void> operation_table::seal(operation_id id) {
  const std::lock_guard lock{mutex_};
  const auto found = live_.find(id);
  if (found == live_.end()) {
    return fail(errc::not_found, "operation " + std::to_string(id.value) + " has ended");
  }
  if (found->second.sealed) {
    return fail(errc::already_exists, "request `" + found->second.request + "` was sealed before");
  }
  found->second.sealed = true;
  return {};
}

bool operation_table::end(operation_id id) {
  const std::lock_guard lock{mutex_};
  const auto found = live_.find(id);
  if (found == live_.end()) return false;
  if (const auto key = key_of(found->second); !key.empty()) by_request_.erase(key);
  live_.erase(found);
  return true;
}

}  // namespace troupe::actors
