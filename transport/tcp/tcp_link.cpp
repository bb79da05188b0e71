#include "troupe/transport/tcp/tcp_link.hpp"

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include <sys/epoll.h>

#include "troupe/transport/batch_check.hpp"
#include "troupe/transport/os_error.hpp"
#include "troupe/transport/random.hpp"

namespace troupe::transport::tcp {

namespace {

constexpr std::size_t receive_budget = std::size_t{4} << 20;  // per lane and turn
/// How often to check for ended copies, in case a GPU is lost and no bell rings.
constexpr std::chrono::milliseconds between_guards{200};
constexpr std::size_t max_gathered = 65'536;
constexpr std::size_t max_gathered_bytes = std::size_t{64} << 20;
constexpr std::uint32_t polls_per_round = 64;  // own polls between two rounds of the whole engine
constexpr std::uint32_t polls_per_word = 8;    // own polls between two `caller_polls`, 3 us apart

}  // namespace

tcp_link::tcp_link(backend_context& context, std::shared_ptr<listener> door,
                   std::shared_ptr<staging::staging_pool> staging, const link_options& options,
                   std::shared_ptr<link_sink> sink)
    : context_{context},
      engine_{context.progress.next()},
      door_{std::move(door)},
      options_{options},
      number_{random_id()},
      sink_{std::move(sink)},
      regions_{context.regions},
      grants_{context.options.self},
      copies_{std::move(staging), engine_},
      ledger_{options.max_batches} {
  random_bytes(secret_);
}

link_offer tcp_link::offer() const {
  return {.kind = backend_kind::tcp,
          .owner = context_.options.self,
          .payload = encode(offer_payload{.host = door_->address(),
                                          .port = door_->port(),
                                          .lanes = static_cast<std::uint16_t>(options_.lanes),
                                          .link = number_,
                                          .secret = secret_})};
}

// -- target

result<remote_grant> tcp_link::grant(region_id region, byte_set permitted, access rights,
                                     grant_scope scope) {
  auto memory = regions_.use_by_way_of_host(region, backend_kind::tcp);
  if (!memory) return fail(std::move(memory).error());
  if (auto ok = prepare_copies(**memory); !ok) return fail(std::move(ok).error());
  return grants_.give(std::move(*memory), permitted, rights, scope);
}

std::vector<transfer_id> tcp_link::users_of(region_id region) const {
  std::set<transfer_id> users;
  grants_.add_users_of(region, users);
  const std::lock_guard lock{batch_mutex_};
  for (const auto& [wire, batch] : batches_) {
    const auto uses = [region](const region_use& one) { return one->id() == region; };
    if (std::ranges::any_of(batch->memory, uses)) users.insert(batch->transfer);
  }
  return {users.begin(), users.end()};
}

result<void> tcp_link::gather(const frame_header& header, bool ok,
                              std::span<const std::byte> session) {
  std::vector<std::byte> frame;
  {
    const std::lock_guard lock{gather_mutex_};
    auto [at, fresh] = gathered_.try_emplace(header.batch);
    auto& batch = at->second;
    if (fresh) batch.parts_left = header.parts;
    if (!ok) batch.failed = true;
    if (!session.empty()) {
      gathered_bytes_ += session.size();
      batch.frame.assign(session.begin(), session.end());
    }
    if (gathered_.size() > max_gathered || gathered_bytes_ > max_gathered_bytes) {
      return fail(errc::link_broken, "the peer left too many batches incomplete");
    }
    if (--batch.parts_left > 0) return {};
    gathered_bytes_ -= batch.frame.size();
    if (!batch.failed) frame = std::move(batch.frame);
    gathered_.erase(at);
  }
  if (!frame.empty()) {
    ledger_.frame_received();
    sink_.frame(frame);
  }
  return {};
}

// -- session frames

result<void> tcp_link::send_frame(std::span<const std::byte> frame) {
  if (auto ok = may_send(frame); !ok) return ok;
  touch();
  push_session(frame);
  return {};
}

result<void> tcp_link::send_soon(std::span<const std::byte> frame) {
  if (auto ok = may_send(frame); !ok) return ok;
  touch();
  queue_session(frame);
  soon_.store(true, std::memory_order_seq_cst);
  if (engine_.asleep()) flush_soon();  // no round is coming by itself
  return {};
}

result<void> tcp_link::may_send(std::span<const std::byte> frame) {
  if (!is_up()) return fail(errc::link_broken, "the link is not up");
  if (auto ok = check_frame(frame.size()); !ok) return ok;
  const auto waiting = lanes_[0]->tx().control_bytes();
  if (waiting > 0 && waiting + frame.size() > options_.max_queued_frame_bytes) {
    return fail(errc::overloaded,
                std::to_string(waiting) + " bytes of frames wait for the peer already");
  }
  return {};
}

void tcp_link::flush_soon() {
  if (soon_.exchange(false, std::memory_order_seq_cst)) flush(*lanes_[0]);
}

void tcp_link::push_session(std::span<const std::byte> frame) {
  queue_session(frame);
  flush(*lanes_[0]);
}

void tcp_link::queue_session(std::span<const std::byte> frame) {
  std::array<std::byte, header_size> head{};
  encode(frame_header{.type = frame_type::session,
                      .session_size = static_cast<std::uint32_t>(frame.size())},
         head.data());
  ledger_.frame_sent();
  lanes_[0]->tx().push_control(head, frame);
}

// -- both

fence_state tcp_link::fence(transfer_id transfer) {
  std::vector<std::shared_ptr<batch_in_flight>> cancelled;
  {
    const std::lock_guard lock{batch_mutex_};
    ledger_.fence(transfer);
    for (auto at = batches_.begin(); at != batches_.end();) {
      if (at->second->transfer != transfer) {
        ++at;
        continue;
      }
      at->second->failure = troupe::error{errc::aborted, "the transfer was fenced"};
      close_books(*at->second);
      cancelled.push_back(std::move(at->second));
      at = batches_.erase(at);
    }
  }
  grants_.revoke(transfer);
  // From here on no new copy of the transfer starts.
  const bool copied = copies_.fence(transfer);
  if (copied && !is_up())
    engine_.add_poller(shared_from_this());  // polls the copies until they end
  for (const auto& batch : cancelled) {
    if (batch->dir == direction::read) tell_cancelled(*batch);
    sink_.deliver(batch->outcome());
  }
  return copied ? fence_state::pending : fence_state::quiescent;
}

// Tells the peer not to send data that nobody takes any more.
void tcp_link::tell_cancelled(const batch_in_flight& batch) {
  if (!is_up()) return;
  std::array<std::byte, header_size> head{};
  encode(frame_header{.type = frame_type::cancel, .batch = batch.wire}, head.data());
  for (const auto& part : batch.parts()) {
    lanes_[part.lane]->tx().push_control(head);
    flush(*lanes_[part.lane]);
  }
}

// -- memory of GPUs

// Prepares a GPU for copies ahead of time, since the first time takes long.
result<void> tcp_link::prepare_copies(const region& memory) {
  const auto gpu = memory.gpu();
  return gpu ? copies_.prepare(*gpu) : result<void>{};
}

// Returns whether some copy has ended.
bool tcp_link::look_at_copies() {
  if (!copies_.any()) return false;
  const auto news = copies_.look();
  for (const auto& [wire, why] : news.failed) fail_batch(wire, why);
  for (const auto transfer : news.quiescent) sink_.deliver(quiescent_event{transfer});
  if (news.ended && is_up()) {
    for (const auto& lane : lanes_) {
      if (lane->tx().waits_for_gpus() && !lane->tx().blocked()) flush(*lane);
    }
  }
  return news.ended || !news.quiescent.empty();
}

// Fails a batch whose local memory could not be read. The link stays up: the peer sees an aborted
// batch.
void tcp_link::fail_batch(std::uint64_t wire, troupe::error why) {
  std::shared_ptr<batch_in_flight> batch;
  {
    const std::lock_guard lock{batch_mutex_};
    const auto at = batches_.find(wire);
    if (at == batches_.end()) return;  // it has already ended
    batch = std::move(at->second);
    batches_.erase(at);
    batch->failure = std::move(why);
    close_books(*batch);
  }
  sink_.deliver(batch->outcome());
}

// For a link that has ended. A lane that is filling a chunk releases it itself.
void tcp_link::release_chunks() {
  for (const auto& lane : lanes_) {
    lane->tx().stop();
    if (!lane->take_rx()) continue;
    lane->rx().drop_chunk();
    lane->leave_rx();
  }
}

link_stats tcp_link::stats() const {
  std::unique_lock lock{batch_mutex_};
  auto now = ledger_.stats();
  lock.unlock();
  now.bytes_in = bytes_in_.load(std::memory_order_relaxed);
  now.refused = refused_.load(std::memory_order_relaxed);
  if (announced_.load(std::memory_order_acquire)) {
    now.lanes = static_cast<std::uint32_t>(lanes_.size());
    for (const auto& lane : lanes_) now.bytes_out += lane->tx().payload_sent();
  }
  return now;
}

// -- lanes

bool tcp_link::receive(tcp_lane& lane) {
  if (!announced_.load(std::memory_order_acquire) || !is_up() || !lane.take_rx()) return false;
  const bool slow = sink_.waiting_bytes() > options_.max_queued_frame_bytes;
  if (lane.has_ended() || slow) {
    lane.leave_rx();  // a callback is slow, so let the peer wait
    return false;
  }
  // Read the flag before the socket: everything that was in it when the peer vanished is then read.
  const bool last_words =
      &lane == lanes_[0].get() && ending_.load(std::memory_order_acquire) == ending::until_empty;
  const auto before = lane.rx().payload_received();
  auto finished = lane.finish_held_copies();
  auto outcome = lane_receiver::outcome::failed;
  const bool reads = finished && !lane.holds_much();
  if (finished) outcome = reads ? lane.rx().run(receive_budget) : lane_receiver::outcome::nothing;
  bytes_in_.fetch_add(lane.rx().payload_received() - before, std::memory_order_relaxed);
  const bool emptied = reads && lane.rx().emptied();
  const bool flush_now = lane.must_flush();
  if (lane.defers()) deferred_.store(true, std::memory_order_relaxed);
  std::optional<troupe::error> why;
  if (!finished) {
    why = finished.error();
  } else if (outcome == lane_receiver::outcome::failed) {
    why = lane.rx().error();
  } else if (outcome == lane_receiver::outcome::ended) {
    why = troupe::error{errc::peer_lost, "the peer is gone: it closed the connection"};
  }
  const bool is_gone = why && (why->code == errc::peer_lost || lane.said_goodbye());
  if (why) lane.set_ended();  // the stream may be out of step, so never read on
  if (!is_up()) lane.rx().drop_chunk();
  lane.leave_rx();
  if (flush_now && !lane.tx().blocked()) {
    flush(lane);  // all acknowledgements and replies of this turn at once
  }
  if (why) {
    touch();
    if (is_gone && &lane != lanes_[0].get()) {
      end_after_frames(std::move(*why), lane.said_goodbye());
    } else {
      break_link(std::move(*why));
    }
    return true;
  }
  if (last_words && emptied) {
    end_now();
    return true;
  }
  if (outcome == lane_receiver::outcome::nothing) return *finished;
  touch();
  return true;
}

void tcp_link::flush(tcp_lane& lane) {
  if (lane.tx().flush() != lane_sender::outcome::failed || !is_up()) return;
  end_after_frames(
      {errc::peer_lost, "the connection to the peer failed: " + what_errno(lane.tx().last_errno())},
      false);
}

bool tcp_link::on_ready(std::uint64_t key, std::uint32_t events) {
  switch (state_.load(std::memory_order_acquire)) {
    case state::connecting: return handshake_ready(key);
    case state::up: break;
    case state::idle:
    case state::broken:
    case state::closed: return false;
  }
  auto& lane = *lanes_[key];
  if ((events & EPOLLOUT) != 0) {
    flush(lane);
    if (!is_up()) return true;  // the link broke: count it as progress, so that its effects run
  }
  if ((events & ~static_cast<std::uint32_t>(EPOLLOUT)) != 0) return receive(lane);
  return true;
}

bool tcp_link::on_poll(steady_time now) {
  if (touched_.load(std::memory_order_relaxed)) {
    touched_.store(false, std::memory_order_relaxed);
    active_ns_.store(now.time_since_epoch().count(), std::memory_order_relaxed);
  }
  if (!is_up()) {
    const bool worked = look_at_copies();
    if (!copies_.any()) engine_.remove_poller(this);
    return worked;
  }
  const bool ends = ending_.load(std::memory_order_acquire) != ending::no;
  if (ends && heard_out(now)) {
    end_now();
    return true;
  }
  const auto idle = now.time_since_epoch().count() - active_ns_.load(std::memory_order_relaxed);
  if (!ends && idle > std::chrono::nanoseconds{context_.options.spin}.count() &&
      !deferred_.load(std::memory_order_relaxed) && !soon_.load(std::memory_order_relaxed) &&
      !copies_.any()) {
    return false;
  }
  return receive_all();
}

bool tcp_link::before_sleep() {
  if (ending_.load(std::memory_order_acquire) != ending::no && is_up()) return false;
  if (soon_.load(std::memory_order_seq_cst)) {
    flush_soon();
    return false;
  }
  if (copies_.any()) {
    if (!copies_.may_sleep()) return false;
    watch_over();
  }
  return !deferred_.load(std::memory_order_relaxed) || !receive_all();
}

/// Starts a timer that checks the copies: a lost GPU rings no bell.
void tcp_link::watch_over() {
  if (watched_.exchange(true, std::memory_order_acq_rel)) return;
  engine_.call_at(std::chrono::steady_clock::now() + between_guards, shared_from_this(), guard_key);
}

bool tcp_link::receive_all() {
  if (!announced_.load(std::memory_order_acquire) || !is_up()) return false;
  deferred_.store(false, std::memory_order_relaxed);
  bool worked = look_at_copies();
  for (const auto& lane : lanes_) {
    if (lane->tx().blocked()) flush(*lane);
    worked = receive(*lane) || worked;
    if (!is_up()) return true;
  }
  flush_soon();
  return worked;
}

bool tcp_link::poll() {
  switch (state_.load(std::memory_order_acquire)) {
    case state::broken:
    case state::closed: return look_at_copies();  // endpoint and engine may be gone
    case state::idle:
    case state::connecting: return engine_.poll_once();
    case state::up: break;
  }
  // No atomic increment: losing a count between two concurrent pollers does no harm.
  const auto calls = polls_.load(std::memory_order_relaxed) + 1;
  polls_.store(calls, std::memory_order_relaxed);
  if (calls % polls_per_word == 1) engine_.caller_polls();
  bool worked = receive_all();
  if (calls % polls_per_round == 0 && is_up()) worked = engine_.poll_once() || worked;
  return worked;
}

}  // namespace troupe::transport::tcp
