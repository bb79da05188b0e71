#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <set>
#include <string>
#include <utility>

#include "troupe/transport/batch_check.hpp"
#include "troupe/transport/grant_table.hpp"
#include "troupe/transport/os_error.hpp"
#include "troupe/transport/rdma/rdma_link.hpp"

// Grants of this end: binding windows, sending their keys to the peer, invalidating them. And the
// peer's grants to this end.

namespace troupe::transport::rdma {

namespace {

constexpr std::size_t max_grants = 65'536;
/// The most keys that the peer may have sent and not revoked: 16 MiB.
constexpr std::size_t max_peer_keys = std::size_t{4} << 20;
constexpr std::uint32_t grants_at_once = 16;

int rights_of(access rights) {
  return (permits(rights, access::write) ? IBV_ACCESS_REMOTE_WRITE : 0) |
         (permits(rights, access::read) ? IBV_ACCESS_REMOTE_READ : 0);
}

}  // namespace

// -- ours

result<remote_grant> rdma_link::grant(region_id region, byte_set permitted, access rights,
                                      grant_scope scope) {
  auto opened = std::make_unique<open_grant>();
  auto memory = regions_.use(region);
  if (!memory) return fail(std::move(memory).error());
  auto given = draw_grant(**memory, permitted, rights, scope, self_);
  if (!given) return given;
  // Without the lock: the first grant of a region registers it, which may take long.
  auto registered = fabric_.keys->of(**memory, reach_);
  if (!registered) return fail(std::move(registered).error());
  given->key = grant_key{.link = number_,
                         .grant = given->id,
                         .host = (*memory)->kind() == memory_kind::host ? 1U : 0U}
                   .encode();
  const auto hull = given->permitted.hull();
  opened->said = {.grant = given->id,
                  .transfer = scope.transfer,
                  .address = (*registered)->address(),
                  .begin = hull.offset,
                  .end = hull.offset + hull.length,
                  .piece_bytes = (*registered)->piece_bytes(),
                  .rights = rights,
                  .lanes = 0,
                  .keys = {}};
  opened->given.keep(*given, std::move(*memory));
  std::optional<troupe::error> broken;
  {
    std::unique_lock lock{mutex_};
    const auto pieces = opened->said.pieces();
    if (auto ok = may_grant(pieces); !ok) return fail(std::move(ok).error());
    if (reach_ == reach::windows) {
      if (auto ok = reserve_windows(pieces, lock); !ok) return fail(std::move(ok).error());
      if (auto ok = may_grant(pieces); !ok) return fail(std::move(ok).error());
    }
    ++grants_;
    auto& grant = *granted_[scope.transfer].emplace_back(std::move(opened));
    open_.emplace(grant.given.id, &grant);
    grant.said.lanes = static_cast<std::uint16_t>(lanes_.size());
    if (reach_ == reach::windows && pieces != 0) {
      bind_windows(grant, **registered);
    } else {
      tell_region_keys(grant, **registered);
    }
    if (auto ok = post_window_requests(); !ok) broken = ok.error();
    if (auto ok = flush(); !ok) broken = ok.error();
  }
  if (broken) {
    break_link(*broken);
    return fail(std::move(*broken));
  }
  return given;
}

std::vector<transfer_id> rdma_link::users_of(region_id region) const {
  std::set<transfer_id> users;
  const std::lock_guard lock{mutex_};
  for (const auto& [transfer, grants] : granted_) {
    const auto over = [region](const auto& grant) { return grant->given.region == region; };
    if (std::ranges::any_of(grants, over)) users.insert(transfer);
  }
  for (const auto& batch : active_) {
    const auto uses = [region](const piece& one) { return one.local == region; };
    if (std::ranges::any_of(batch->work.pieces, uses)) users.insert(batch->work.transfer);
  }
  return {users.begin(), users.end()};
}

/// Under the lock.
result<void> rdma_link::may_grant(std::uint64_t pieces) const {
  if (state_ != link_phase::up) return not_up(backend_kind::rdma, state_, why_ended_);
  if (grants_ >= max_grants) {
    return fail(errc::overloaded, std::to_string(grants_) +
                                      " grants are given on this link, the maximum; fence "
                                      "transfers that have ended");
  }
  if (pieces > grant_keys::max_keys / lanes_.size()) {
    return fail(errc::out_of_range, "the grant spans " + std::to_string(pieces) +
                                        " pieces of its region, too many for " +
                                        std::to_string(lanes_.size()) +
                                        " lanes; grant less at once");
  }
  return {};
}

/// Called with `lock` held; releases it while the device creates windows. Afterwards every lane has
/// `per_lane` free windows, or the link has ended. `overloaded`: the device has no more windows.
result<void> rdma_link::reserve_windows(std::size_t per_lane, std::unique_lock<std::mutex>& lock) {
  for (;;) {
    const auto poor = std::ranges::find_if(
        lanes_, [&](const data_lane& lane) { return lane.free_windows.size() < per_lane; });
    if (poor == lanes_.end()) return {};
    const auto index = poor - lanes_.begin();
    const auto& rail = *fabric_.rails[poor->rail];
    lock.unlock();
    owned_window made{::ibv_alloc_mw(rail.domain(), IBV_MW_TYPE_2)};
    const int why = errno;
    lock.lock();
    if (!made) {
      return fail(errc::overloaded, rail.name() + " gives no more memory windows (it has " +
                                        std::to_string(rail.limits().max_mw) + "): " +
                                        what_errno(why) + "; fence transfers that have ended");
    }
    if (lanes_.empty()) return {};
    // Other callers may have taken windows in the meantime, so start over.
    auto& lane = lanes_[static_cast<std::size_t>(index)];
    lane.free_windows.push_back(made.get());
    lane.windows.push_back(std::move(made));
  }
}

/// Under the lock; every lane must have enough free windows. The peer gets the keys once the NIC is
/// done.
void rdma_link::bind_windows(open_grant& grant, const registered_region& memory) {
  auto& said = grant.said;
  const auto first = memory.piece_at(said.begin);
  for (auto i = first; i < first + said.pieces(); ++i) {
    const auto begin = std::max(said.begin, i * said.piece_bytes);
    const auto end = std::min(said.end, (i + 1) * said.piece_bytes);
    for (std::size_t n = 0; n < lanes_.size(); ++n) {
      auto& lane = lanes_[n];
      auto* window = lane.free_windows.back();
      lane.free_windows.pop_back();
      const auto key = ::ibv_inc_rkey(window->rkey);
      lane.window_requests.push_back({.of = &grant,
                                      .window = window,
                                      .key = key,
                                      .memory = memory.memory(i, lane.rail),
                                      .address = said.address + begin,
                                      .bytes = end - begin});
      ++window_requests_;
      grant.windows.push_back({window, static_cast<std::uint8_t>(n), key});
      said.keys.push_back(key);
    }
  }
  grant.unanswered = static_cast<std::uint32_t>(grant.windows.size());
}

/// Under the lock, for links without windows: sends the region's own keys.
void rdma_link::tell_region_keys(open_grant& grant, const registered_region& memory) {
  const auto first = memory.piece_at(grant.said.begin);
  for (auto i = first; i < first + grant.said.pieces(); ++i) {
    for (const auto& lane : lanes_) grant.said.keys.push_back(memory.memory(i, lane.rail)->rkey);
  }
  tell_keys(grant);
}

/// Under the lock: requests that the grant's windows be invalidated. Windows still being bound are
/// bound first.
void rdma_link::close_grant(open_grant& grant) {
  if (grant.state != open_grant::phase::open) return;
  grant.state = open_grant::phase::closing;
  grant.unanswered = static_cast<std::uint32_t>(grant.windows.size());
  for (const auto& at : grant.windows) {
    lanes_[at.lane].window_requests.push_back({.of = &grant, .window = at.window, .key = at.key});
    ++window_requests_;
  }
}

/// Under the lock: posts the waiting window requests, as far as there is room.
result<void> rdma_link::post_window_requests() {
  if (window_requests_ == 0 || state_ != link_phase::up) return {};
  for (std::size_t i = 0; i < lanes_.size(); ++i) {
    if (auto ok = post_window_requests(lanes_[i], static_cast<std::uint8_t>(i)); !ok) return ok;
  }
  return {};
}

result<void> rdma_link::post_window_requests(data_lane& lane, std::uint8_t number) {
  while (!lane.window_requests.empty() && lane.posted.size() < lane.pair->depth()) {
    const auto room = lane.pair->depth() - lane.posted.size();
    const auto count =
        std::min<std::size_t>({room, lane.window_requests.size(), std::size_t{grants_at_once}});
    std::array<ibv_send_wr, grants_at_once> works{};
    for (std::size_t i = 0; i < count; ++i) {
      const auto& wanted = lane.window_requests[i];
      auto& work = works[i];
      work.wr_id = work_id(work_kind::data, number, lane.last_number + i + 1);
      if (wanted.memory != nullptr) {
        work.opcode = IBV_WR_BIND_MW;
        work.bind_mw.mw = wanted.window;
        work.bind_mw.rkey = wanted.key;
        work.bind_mw.bind_info = {
            .mr = wanted.memory,
            .addr = wanted.address,
            .length = wanted.bytes,
            .mw_access_flags = static_cast<unsigned>(rights_of(wanted.of->said.rights))};
      } else {
        work.opcode = IBV_WR_LOCAL_INV;
        work.invalidate_rkey = wanted.key;
      }
      if (i != 0) works[i - 1].next = &work;
    }
    works[count - 1].send_flags = IBV_SEND_SIGNALED;
    ibv_send_wr* bad = nullptr;
    if (const int why = ::ibv_post_send(lane.pair->get(), works.data(), &bad); why != 0) {
      fabric_.windows->store(false, std::memory_order_relaxed);
      return fail(errc::link_broken,
                  fabric_.rails[lane.rail]->name() + " refused a request about a memory window: " +
                      what_errno(why) + "; links that are opened from now on do without");
    }
    for (std::size_t i = 0; i < count; ++i) {
      const auto& done = lane.window_requests.front();
      if (done.memory != nullptr) done.window->rkey = done.key;  // the window's key from now on
      lane.posted.push_back({.number = ++lane.last_number, .window = done.of});
      lane.window_requests.pop_front();
      --window_requests_;
    }
  }
  return {};
}

/// Under the lock: the NIC has bound or invalidated one window of the grant.
void rdma_link::windows_answered(open_grant& grant) {
  if (--grant.unanswered != 0) return;
  if (grant.state == open_grant::phase::binding) {
    grant.state = open_grant::phase::open;
    if (!grant.fenced) {
      tell_keys(grant);
      return;
    }
    const auto fence = fences_.find(grant.said.transfer);
    if (fence != fences_.end() && !fence->second.peer_must_confirm) close_grant(grant);
    return;
  }
  for (const auto& at : grant.windows) lanes_[at.lane].free_windows.push_back(at.window);
  const auto transfer = grant.said.transfer;
  const auto fence = fences_.find(transfer);
  if (fence == fences_.end()) return;
  --grants_;
  std::erase_if(fence->second.grants, [&](const auto& known) { return known.get() == &grant; });
  after_drained(transfer);
}

/// Under the lock: opens the grant and sends its keys to the peer.
void rdma_link::tell_keys(open_grant& grant) {
  grant.state = open_grant::phase::open;
  messages_->put(message_kind::keys, grant.said.encode());
}

// -- the peer's

/// Within `reading_`, without the lock.
result<void> rdma_link::on_keys(std::span<const std::byte> payload) {
  auto said = grant_keys::decode(payload);
  if (!said) return fail(std::move(said).error());
  const std::lock_guard lock{mutex_};
  if (state_ != link_phase::up) return {};
  if (said->lanes != lanes_.size()) {
    return against_protocol("keys for " + std::to_string(said->lanes) + " lanes of " +
                            std::to_string(lanes_.size()));
  }
  if (peer_grants_.contains(said->grant)) return against_protocol("keys to a grant told twice");
  if (peer_grants_.size() >= max_grants || peer_keys_ + said->keys.size() > max_peer_keys) {
    return against_protocol("it has told " + std::to_string(peer_keys_) + " keys to " +
                            std::to_string(peer_grants_.size()) + " grants and takes none back");
  }
  peer_keys_ += said->keys.size();
  peer_grants_of_[said->transfer].grants.push_back(said->grant);
  const auto id = said->grant;
  peer_grants_.emplace(id, std::make_shared<const grant_keys>(std::move(*said)));
  start_those_with_keys();
  return {};
}

/// Under the lock. Returns whether the peer has sent all keys that the batch needs.
bool rdma_link::find_keys(batch_in_flight& batch) const {
  for (auto& place : batch.places) {
    if (place.remote) continue;
    const auto at = peer_grants_.find(place.grant);
    if (at == peer_grants_.end()) return false;
    place.remote = at->second;
  }
  return true;
}

/// Under the lock: queues an admitted batch, fails it if it leaves its grants, or waits for its
/// keys.
void rdma_link::start_or_wait(batch_in_flight& batch) {
  if (!find_keys(batch)) {
    unkeyed_.push_back({&batch, std::chrono::steady_clock::now()});
  } else if (batch.keeps_to_grants()) {
    queued_.push_back(&batch);
  } else {
    finish(batch);
  }
}

/// Under the lock.
void rdma_link::start_those_with_keys() {
  for (auto& waits : std::exchange(unkeyed_, {})) {
    if (find_keys(*waits.batch)) {
      start_or_wait(*waits.batch);
    } else {
      unkeyed_.push_back(waits);
    }
  }
}

/// Under the lock: fails batches whose keys have not arrived in time.
void rdma_link::give_up_without_keys(steady_time now) {
  for (auto& waits : std::exchange(unkeyed_, {})) {
    if (now - waits.since < fabric_.options.stall_limit) {
      unkeyed_.push_back(waits);
      continue;
    }
    waits.batch->give_up(
        {errc::grant_revoked, "the peer has not opened its grant within " +
                                  std::to_string(fabric_.options.stall_limit.count()) +
                                  " ms: it has fenced the transfer, or never gave the grant"});
    finish(*waits.batch);
  }
}

}  // namespace troupe::transport::rdma
