#include "troupe/actors/operations/operation_table.hpp"

#include <algorithm>
#include <limits>
#include <utility>

#include "troupe/kvcache/or_undo.hpp"

namespace troupe::actors {

std::uint32_t operation_table::room_of(std::uint64_t tokens) noexcept {
  return static_cast<std::uint32_t>(
      std::min<std::uint64_t>(tokens, std::numeric_limits<std::uint32_t>::max()));
}

std::string operation_table::key_of(const entry& what) {
  if (what.request.empty()) return {};
  return std::to_string(static_cast<int>(what.kind)) + ":" + what.request;
}

result<operation_id> operation_table::begin(entry what) {
  const std::lock_guard lock{mutex_};
  if (closed_) return fail(errc::aborted, "the node was stopped");
  if (live_.size() + ended_.size() >= bound_) {
    return fail(errc::overloaded,
                std::to_string(bound_) +
                    " operations are open at this node, which is limits.max_operations: " +
                    std::to_string(live_.size()) + " are live, " + std::to_string(ended_.size()) +
                    " have ended but not had their last event taken; take events with `wait` or "
                    "`take`, or raise the limit");
  }
  const operation_id id{next_};
  const auto key = key_of(what);
  if (by_request_.contains(key)) {
    return fail(errc::already_exists, "request `" + what.request + "` is live here already");
  }
  const auto begun = live_.emplace(id, std::move(what)).first;
  or_undo(
      [&] {
        if (!key.empty()) by_request_.emplace(key, id);
      },
      [&] { live_.erase(begun); });
  ++next_;
  return id;
}

void operation_table::take_back(operation_id id) noexcept {
  const std::lock_guard lock{mutex_};
  live_.erase(id);
  // Its key is not built again, which would need memory.
  std::erase_if(by_request_, [id](const auto& known) { return known.second == id; });
}

result<operation_table::entry> operation_table::find(operation_id id) const {
  const std::lock_guard lock{mutex_};
  const auto found = live_.find(id);
  if (found == live_.end()) {
    return fail(errc::not_found, "operation " + std::to_string(id.value) + " has ended");
  }
  return found->second;
}

result<void> operation_table::grow(operation_id send, std::uint64_t tokens, std::uint32_t group) {
  const std::lock_guard lock{mutex_};
  const auto found = live_.find(send);
  if (found == live_.end()) {
    return fail(errc::not_found, "operation " + std::to_string(send.value) + " has ended");
  }
  auto& of = found->second;
  if (of.kind != operation_kind::send || !of.grows) {
    return fail(errc::invalid_config,
                "operation " + std::to_string(send.value) +
                    " is not a send that grows; begin it with `grows`, or name all blocks at once");
  }
  if (of.sealed) return fail(errc::already_exists, "request `" + of.request + "` is sealed");
  if (of.by_group.empty()) {
    of.token_capacity = room_of(of.token_capacity + tokens);
    return {};
  }
  auto& of_group = of.by_group.at(group);
  of_group = room_of(of_group + tokens);
  of.token_capacity = *std::ranges::min_element(of.by_group);
  return {};
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

void operation_table::unseal(operation_id id) noexcept {
  const std::lock_guard lock{mutex_};
  if (const auto found = live_.find(id); found != live_.end()) found->second.sealed = false;
}

bool operation_table::end_locked(operation_id id) {
  const auto found = live_.find(id);
  if (found == live_.end()) return false;
  // Allocate first, so that it either ends completely or goes on.
  const auto key = key_of(found->second);
  ended_.insert(id);
  if (!key.empty()) by_request_.erase(key);
  live_.erase(found);
  return true;
}

bool operation_table::end(operation_id id) {
  const std::lock_guard lock{mutex_};
  return end_locked(id);
}

bool operation_table::end(operation_id id, const std::optional<troupe::error>& failure) {
  const std::lock_guard lock{mutex_};
  const auto found = live_.find(id);
  if (found == live_.end()) return false;
  if (found->second.kind == operation_kind::receive) {
    ended_receive ending{found->second.token_capacity, failure};
    if (!endings_.contains(id)) ending_order_.push_back(id);
    endings_.insert_or_assign(id, std::move(ending));
    if (ending_order_.size() > receives_kept) {
      endings_.erase(ending_order_.front());
      ending_order_.pop_front();
    }
  }
  return end_locked(id);
}

std::optional<operation_table::ended_receive> operation_table::ended(operation_id receive) const {
  const std::lock_guard lock{mutex_};
  const auto found = endings_.find(receive);
  if (found == endings_.end()) return std::nullopt;
  return found->second;
}

void operation_table::last_event_taken(const std::vector<operation_id>& operations) noexcept {
  const std::lock_guard lock{mutex_};
  for (const auto id : operations) ended_.erase(id);
}

bool operation_table::is_open(operation_id id) const {
  const std::lock_guard lock{mutex_};
  return live_.contains(id) || ended_.contains(id);
}

std::size_t operation_table::open() const {
  const std::lock_guard lock{mutex_};
  return live_.size() + ended_.size();
}

void operation_table::close() noexcept {
  const std::lock_guard lock{mutex_};
  closed_ = true;
}

std::vector<operation_id> operation_table::live() const {
  const std::lock_guard lock{mutex_};
  std::vector<operation_id> all;
  for (const auto& [id, what] : live_) all.push_back(id);
  std::ranges::sort(all);
  return all;
}

}  // namespace troupe::actors
