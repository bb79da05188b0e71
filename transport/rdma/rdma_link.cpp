#include "troupe/transport/rdma/rdma_link.hpp"

#include <algorithm>
#include <span>
#include <string>
#include <thread>
#include <utility>

#include <sys/epoll.h>

#include "troupe/transport/batch_check.hpp"
#include "troupe/transport/random.hpp"

// How an `rdma` link begins and ends.

namespace troupe::transport::rdma {

namespace {

/// Requests and immediates of the peer for which a lane's queue pair has room, if the device allows
/// so many.
constexpr std::uint32_t lane_depth = 256;
/// Completion queue entries for the messages.
constexpr std::uint32_t message_completions = 2 * message_channel::buffers + 2;
constexpr std::uint32_t inline_wanted = 220;
/// How long an ending link tries to send its `bye`.
constexpr std::chrono::milliseconds goodbye{300};
constexpr std::chrono::milliseconds look_again{5};

std::uint32_t at_most(int limit, std::uint32_t wanted) {
  return std::min(wanted, static_cast<std::uint32_t>(std::max(limit, 1)));
}

/// The most local runs in a request of either direction.
std::uint32_t runs_of(const device& on) {
  const auto& limits = on.limits();
  const int reads = limits.max_sge_rd > 0 ? limits.max_sge_rd : limits.max_sge;
  return at_most(std::min(limits.max_sge, reads), max_runs);
}

}  // namespace

rdma_link::rdma_link(const backend_context& context, fabric on, const link_options& options,
                     std::shared_ptr<link_sink> sink)
    : fabric_{std::move(on)},
      options_{options},
      self_{context.options.self},
      regions_{context.regions},
      engine_{context.progress.next()},
      sink_{std::move(sink)},
      number_{random_id()},
      reach_{fabric_.windows->load(std::memory_order_relaxed) ? reach::windows : reach::key},
      ledger_{options.max_batches} {
  random_bytes(secret_);
  for (const auto& rail : fabric_.rails) retries_then_.push_back(rail->retries());
}

result<std::shared_ptr<rdma_link>> rdma_link::open(const backend_context& context, fabric on,
                                                   const link_options& options,
                                                   std::shared_ptr<link_sink> sink) {
  std::shared_ptr<rdma_link> made{new rdma_link{context, std::move(on), options, std::move(sink)}};
  if (auto ok = made->set_up(); !ok) return fail(std::move(ok).error());
  return made;
}

/// The depth of the lanes: all completions possible on a device must fit into its completion queue.
/// `overloaded`: the queue is too short for so many lanes.
result<std::uint32_t> rdma_link::depth_of_lanes(std::uint32_t lanes_per_rail) const {
  auto depth = lane_depth;
  for (const auto& rail : fabric_.rails) {
    const auto& limits = rail->limits();
    const auto entries = static_cast<std::uint32_t>(std::max(limits.max_cqe, 0));
    const auto room =
        entries < message_completions ? 0 : (entries - message_completions) / (2 * lanes_per_rail);
    if (room == 0) {
      return fail(errc::overloaded, rail->name() + " has completion queues of " +
                                        std::to_string(entries) + " entries, too few for " +
                                        std::to_string(lanes_per_rail) +
                                        " lanes of a link; ask for fewer (qp_per_transfer)");
    }
    depth = std::min({depth, room, at_most(limits.max_qp_wr, lane_depth)});
  }
  return depth;
}

/// Creates everything that the offer names. Nobody else has a reference to the link yet.
result<void> rdma_link::set_up() {
  const auto rails = fabric_.rails.size();
  const auto lanes_per_rail = static_cast<std::uint32_t>((options_.lanes + rails - 1) / rails);
  const auto depth = depth_of_lanes(lanes_per_rail);
  if (!depth) return fail(depth.error());
  depth_ = *depth;
  const auto entries = lanes_per_rail * 2 * depth_ + message_completions;
  for (const auto& rail : fabric_.rails) {
    auto queue = completion_queue::create(rail, entries, number_);
    if (!queue) return fail(std::move(queue).error());
    completions_.push_back(std::move(*queue));
  }
  auto channel = message_channel::create(fabric_.rails[0], *completions_[0]);
  if (!channel) return fail(std::move(channel).error());
  messages_ = std::move(*channel);
  for (std::size_t i = 0; i < options_.lanes; ++i) {
    const auto rail = i % rails;
    auto pair = queue_pair::create(fabric_.rails[rail], *completions_[rail],
                                   {.sends = depth_,
                                    .receives = depth_,
                                    .pieces = runs_of(*fabric_.rails[rail]),
                                    .inline_bytes = inline_wanted});
    if (!pair) return fail(std::move(pair).error());
    data_lane lane;
    lane.pair = std::move(*pair);
    lane.rail = static_cast<std::uint8_t>(rail);
    lanes_.push_back(std::move(lane));
  }
  return {};
}

// -- establishment

link_offer rdma_link::offer() const {
  offer_body body;
  const std::lock_guard lock{mutex_};
  body.secret = secret_;
  body.link = number_;
  body.message_buffers = message_channel::buffers;
  body.buffer_bytes = message_channel::buffer_bytes;
  body.notices = depth_;
  body.rails = static_cast<std::uint8_t>(fabric_.rails.size());
  body.lanes = static_cast<std::uint8_t>(options_.lanes);
  std::uint8_t reads = 255;
  for (std::size_t i = 0; i < fabric_.rails.size(); ++i) {
    const auto& rail = *fabric_.rails[i];
    body.rail[i] = offer_of(rail);
    reads = std::min(reads, outstanding_reads(rail));
  }
  body.outstanding_reads = reads;
  if (messages_) body.messages = messages_->pair().offer();
  for (std::size_t i = 0; i < lanes_.size(); ++i) {
    body.lane[i] = lanes_[i].pair->offer(lanes_[i].rail);
  }
  return {.kind = backend_kind::rdma, .owner = self_, .payload = body.encode()};
}

result<void> rdma_link::connect(const link_offer& peer) {
  if (auto ok = check_offer(backend_kind::rdma, options_.peer, peer); !ok) return ok;
  auto body = offer_body::decode(peer.payload);
  if (!body) return fail(std::move(body).error());
  const auto self = shared_from_this();
  std::unique_lock lock{mutex_};
  if (state_ == link_phase::closed || state_ == link_phase::broken)
    return not_up(backend_kind::rdma, state_, why_ended_);
  if (state_ != link_phase::opened) {
    return fail(errc::already_exists, "the rdma link was told to connect before");
  }
  for (const auto& queue : completions_) {
    auto watch = engine_.watch(queue->fd(), EPOLLIN, shared_from_this(), watches_.size());
    if (!watch) {
      // A watch that stays would hold this link, which nobody may ever end.
      for (const auto set : std::exchange(watches_, {})) engine_.unwatch(set);
      return fail(std::move(watch).error());
    }
    watches_.push_back(*watch);
  }
  peer_ = *body;
  // Both sides use the smaller of the offered numbers of lanes.
  while (lanes_.size() > body->lanes) lanes_.pop_back();
  state_ = link_phase::connecting;
  polled_ = true;
  joining_.store(true, std::memory_order_release);  // before anyone polls
  engine_.add_poller(shared_from_this());
  deadline_ = engine_.call_at(std::chrono::steady_clock::now() + options_.connect_timeout,
                              shared_from_this(), deadline_timer);
  if (auto ok = join(lock); !ok) {
    // The caller gets the error; the link reports nothing after this.
    if (state_ == link_phase::connecting) end(link_phase::broken, ok.error());
    lock.unlock();
    sink_.deliver();
    return ok;
  }
  lock.unlock();
  engine_.wake();  // to take what arrived in the meantime
  return {};
}

/// Called with `lock` held; releases it while the devices set the queue pairs up. Fails if they
/// could not, or if the link was closed in the meantime. (If it broke, the sink has been told.)
result<void> rdma_link::join(std::unique_lock<std::mutex>& lock) {
  lock.unlock();
  // Wait for a thread that began to take completions before `joining_` was set.
  while (reading_.exchange(true, std::memory_order_acq_rel)) std::this_thread::yield();
  reading_.store(false, std::memory_order_release);
  auto joined = join_lanes();
  if (joined) joined = start_messages();
  lock.lock();
  joining_.store(false, std::memory_order_release);
  if (state_ == link_phase::connecting) return joined ? say_hello() : joined;
  lanes_.clear();  // `end` leaves them to this function while joining
  if (state_ == link_phase::closed) return not_up(backend_kind::rdma, state_, why_ended_);
  return {};
}

/// Like `join`, for the message channel alone, after the peer was not ready. Within `reading_`.
result<void> rdma_link::begin_again(std::unique_lock<std::mutex>& lock) {
  joining_.store(true, std::memory_order_release);
  lock.unlock();
  auto started = start_messages();
  lock.lock();
  joining_.store(false, std::memory_order_release);
  if (state_ == link_phase::connecting) return started ? say_hello() : started;
  lanes_.clear();
  return {};
}

/// Without the lock; `joining_` stands for it.
result<void> rdma_link::join_lanes() {
  const auto& peer = *peer_;
  for (std::size_t i = 0; i < lanes_.size(); ++i) {
    auto& lane = lanes_[i];
    if (auto ok = lane.pair->reset(fabric_.options); !ok) return ok;
    for (std::uint32_t n = 0; n < depth_; ++n) {
      if (auto ok = lane.pair->expect_notice(
              work_id(work_kind::notice_receive, static_cast<std::uint8_t>(i), 0));
          !ok) {
        return ok;
      }
    }
    const auto& theirs = peer.lane[i];
    const queue_pair::far_end far{peer.rail[theirs.rail], theirs, peer.outstanding_reads};
    if (auto ok = lane.pair->join(far, fabric_.options); !ok) return ok;
  }
  return {};
}

/// Without the lock; `joining_` stands for it.
result<void> rdma_link::start_messages() {
  const queue_pair::far_end far{peer_->rail[peer_->messages.rail], peer_->messages,
                                peer_->outstanding_reads};
  return messages_->start(far, peer_->message_buffers, fabric_.options);
}

/// Under the lock, after the message channel has started. The dialer speaks first: the acceptor's
/// queue pairs are ready, since its offer came in answer to ours.
result<void> rdma_link::say_hello() {
  if (options_.role == link_role::acceptor) return {};
  messages_->put(message_kind::hello, peer_->secret);
  return messages_->flush(counts());
}

/// Under the lock.
void rdma_link::become_up() {
  if (deadline_) engine_.cancel(*std::exchange(deadline_, std::nullopt));
  state_ = link_phase::up;
  up_.store(true, std::memory_order_release);
  look_after_peer_at(std::chrono::steady_clock::now() + fabric_.options.probe_interval);
  sink_.put(up_event{});
}

// -- ending

/// Under the lock: destroys the lanes and fails their requests in flight.
void rdma_link::end_lanes(const troupe::error& why) {
  for (auto& lane : lanes_) {
    // Stop the queue pair before its windows are destroyed: requests of the peer in flight then
    // stay unanswered instead of being refused.
    if (!lane.windows.empty()) lane.pair->stop();
    lane.windows.clear();
    lane.pair.reset();
    for (const auto& request : lane.posted) {
      if (request.of == nullptr) continue;
      auto& batch = *request.of;
      --batch.outstanding;
      batch.give_up(why);
      for (auto s = request.first_segment; s <= request.last_segment; ++s) batch.bad.insert(s);
    }
  }
  lanes_.clear();
}

/// Under the lock: ends all access to memory on either side and gives everything that waits its
/// outcome.
void rdma_link::end(link_phase final_state, const troupe::error& why) {
  const bool joining = joining_.load(std::memory_order_relaxed);
  const bool was_joined =
      !joining && (state_ == link_phase::connecting || state_ == link_phase::up);
  state_ = final_state;
  if (!why_ended_) why_ended_ = why;
  up_.store(false, std::memory_order_release);
  // Lanes that are still being joined have carried nothing and no grant uses them. The thread that
  // joins them destroys them as soon as the device returns.
  if (!joining) end_lanes(why);
  queued_.clear();
  end_small(why);
  unkeyed_.clear();
  window_requests_ = 0;
  while (!active_.empty()) {
    auto& batch = *active_.back();
    batch.give_up(why);
    finish(batch);
  }
  answer_all_fences();
  for (auto* timer : {&deadline_, &probe_, &fence_check_}) {
    if (*timer) engine_.cancel(*std::exchange(*timer, std::nullopt));
  }
  const auto now = std::chrono::steady_clock::now();
  goodbye_until_ = now;
  if (was_joined && why.code != errc::peer_lost && messages_) {
    messages_->put(message_kind::bye, {});
    goodbye_due_ = messages_->flush(counts()).has_value();
    if (goodbye_due_) goodbye_until_ = now + goodbye;
  }
  if (polled_) {
    teardown_ =
        engine_.call_at(goodbye_due_ ? now + look_again : now, shared_from_this(), teardown_timer);
  }
}

/// "; rxe0a port 1 was down for 230 ms" for each port that may have broken the link.
std::string rdma_link::trouble_of_ports() const {
  std::string text;
  for (const auto& rail : fabric_.rails) {
    const auto said = rail->record().trouble_since(opened_, std::chrono::steady_clock::now());
    if (said.empty()) continue;
    text += "; " + rail->name() + " port " + std::to_string(rail->port()) + " was " + said;
  }
  return text;
}

void rdma_link::break_link(troupe::error why) {
  const auto self = shared_from_this();
  // A request may fail before the device reports that its port is down.
  for (const auto& rail : fabric_.rails) rail->record_if_down();
  {
    const std::lock_guard lock{mutex_};
    if (state_ == link_phase::broken || state_ == link_phase::closed) return;
    why.message += trouble_of_ports();
    end(link_phase::broken, why);
    sink_.put(broken_event{std::move(why)});
  }
  sink_.deliver();
}

void rdma_link::close() {
  const auto self = shared_from_this();
  sink_.mute_broken();
  {
    const std::lock_guard lock{mutex_};
    if (state_ == link_phase::closed) return;
    if (state_ == link_phase::broken) {
      state_ = link_phase::closed;
    } else {
      end(link_phase::closed, {errc::aborted, "the link was closed"});
    }
  }
  sink_.deliver();
}

void rdma_link::queue_failed(const device& which, const std::string& what) {
  break_link({errc::link_broken, "RDMA device " + which.name() + " " + what});
}

void rdma_link::device_failed(const device& which, const std::string& why) {
  const bool ours =
      std::ranges::any_of(fabric_.rails, [&](const auto& rail) { return rail.get() == &which; });
  if (ours) break_link({errc::link_broken, why});
}

/// Under the lock.
void rdma_link::look_after_peer_at(steady_time when) {
  if (probe_) engine_.cancel(*probe_);
  probe_ = engine_.call_at(when, shared_from_this(), probe_timer);
}

/// Under the lock: probes the peer, and checks that the NIC still completes requests.
result<void> rdma_link::look_after_peer(steady_time now) {
  const auto& options = fabric_.options;
  // Twice the time after which the NIC should give up by itself; some never do.
  const auto limit =
      2 * std::chrono::microseconds{static_cast<std::int64_t>(
              4.096 * static_cast<double>(1ULL << options.timeout) * (options.retry_count + 1))};
  const bool decide = refused_ && !verdict_due_;
  if (messages_->probing() && !decide) {
    if (now - asked_ >= limit) {
      return fail(errc::peer_lost,
                  "the peer's NIC has not answered for " +
                      std::to_string((now - asked_) / std::chrono::milliseconds{1}) +
                      " ms: its process ended, or its host, the wire or the port "
                      "of this host is down");
    }
  } else {
    auto asked = decide ? messages_->probe_again() : messages_->probe();
    if (!asked) return fail(std::move(asked).error());
    asked_ = now;
    verdict_due_ = verdict_due_ || decide;
  }
  look_after_peer_at(std::min(now + options.probe_interval, asked_ + limit));
  for (auto& lane : lanes_) {
    if (lane.posted.empty() || lane.posted.front().number != lane.stalled_number) {
      lane.stalled_number = lane.posted.empty() ? 0 : lane.posted.front().number;
      lane.stalled_since = now;
    } else if (const auto longest = std::max<std::chrono::nanoseconds>(options.stall_limit, limit);
               now - lane.stalled_since > longest) {
      return fail(errc::link_broken, fabric_.rails[lane.rail]->name() +
                                         " has completed nothing for " +
                                         std::to_string(longest / std::chrono::milliseconds{1}) +
                                         " ms; is its port down?");
    }
  }
  return {};
}

/// Detaches from the engine and destroys the message channel. Called only by a timer, so never from
/// within a callback of this link.
void rdma_link::tear_down() {
  if (reading_.exchange(true, std::memory_order_acquire)) {
    const std::lock_guard lock{mutex_};
    teardown_ = engine_.call_at(std::chrono::steady_clock::now() + look_again, shared_from_this(),
                                teardown_timer);
    return;
  }
  {
    const std::lock_guard lock{mutex_};
    const auto now = std::chrono::steady_clock::now();
    if (joining_.load(std::memory_order_relaxed)) {
      teardown_ = engine_.call_at(now + look_again, shared_from_this(), teardown_timer);
    } else if (goodbye_due_ && now < goodbye_until_) {
      static_cast<void>(messages_->flush(counts()));
      teardown_ = engine_.call_at(now + look_again, shared_from_this(), teardown_timer);
    } else if (!std::exchange(torn_down_, true)) {
      gone_.store(true, std::memory_order_release);
      for (const auto watch : watches_) engine_.unwatch(watch);
      if (polled_) engine_.remove_poller(this);
      messages_.reset();
      completions_.clear();
    }
  }
  reading_.store(false, std::memory_order_release);
}

void rdma_link::on_timer(std::uint64_t key, steady_time now) {
  const auto self = shared_from_this();
  switch (static_cast<timer_key>(key)) {
    case deadline_timer: {
      {
        const std::lock_guard lock{mutex_};
        deadline_.reset();
        if (state_ != link_phase::connecting) return;
      }
      break_link({errc::peer_unreachable,
                  "the rdma peer did not complete the handshake within " +
                      std::to_string(options_.connect_timeout.count()) +
                      " ms; are both ports in one network, with one MTU and no firewall between?"});
      return;
    }
    case probe_timer: {
      std::optional<troupe::error> why;
      {
        const std::lock_guard lock{mutex_};
        probe_.reset();
        if (state_ != link_phase::up) return;
        if (auto fine = look_after_peer(now); !fine) why = fine.error();
        give_up_without_keys(now);
      }
      sink_.deliver();
      if (why) break_link(std::move(*why));
      return;
    }
    case fence_timer: check_fences(now); return;
    case teardown_timer: tear_down(); return;
  }
}

link_stats rdma_link::stats() const {
  // Without the lock: the kernel may have to ask the device.
  std::vector<std::optional<std::uint64_t>> retries;
  for (std::size_t i = 0; i < fabric_.rails.size(); ++i) {
    retries.push_back(counted_since(retries_then_[i], fabric_.rails[i]->retries()));
  }
  const std::lock_guard lock{mutex_};
  auto now = ledger_.stats();
  now.lanes = static_cast<std::uint32_t>(lanes_.size());
  now.bytes_out = bytes_written_;
  now.bytes_in = bytes_read_;
  now.refused = refused_operations_;
  for (const auto& lane : lanes_) {
    const auto& rail = *fabric_.rails[lane.rail];
    const auto address = rail.address();
    const auto port = rail.record().now();
    now.by_lane.push_back({.device = rail.name(),
                           .port = rail.port(),
                           .gid_index = rail.gid_index(),
                           .gid = gid_text(std::span{address.gid.raw}),
                           .requests_posted = lane.last_number,
                           .requests_completed = lane.last_number - lane.posted.size(),
                           .bytes = lane.moved,
                           .port_up = port.up,
                           .port_downs = port.downs,
                           .port_changes = port.changes,
                           .port_retries = retries[lane.rail]});
  }
  return now;
}

}  // namespace troupe::transport::rdma
