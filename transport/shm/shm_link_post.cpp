#include <algorithm>
#include <string>
#include <utility>

#include <sys/eventfd.h>

#include "troupe/transport/shm/shm_link.hpp"

// The initiator's side of a link: checking, copying and completing batches; and session frames,
// both ways.

namespace troupe::transport::shm {

namespace {

/// Batches up to this size are copied by the thread that posts them: handing them over would take
/// longer.
constexpr std::uint64_t inline_bytes = std::uint64_t{256} << 10;
/// What one round of the progress engine copies for one link before the others have their turn.
constexpr std::uint64_t slice_bytes = std::uint64_t{4} << 20;
/// Frames taken out of the ring in one round, and frames that may wait for a slow sink.
constexpr int frames_per_round = 64;
constexpr std::size_t max_waiting_events = 1024;

/// Finds out whether segments lie in the granted extents. Extents come sorted, and segments mostly
/// in the order of the extents: the last hit and the one after it are tried first. A peer that did
/// not sort them costs time, not safety.
class extent_check {
 public:
  explicit extent_check(std::span<const extent> permitted) noexcept : permitted_{permitted} {}

  [[nodiscard]] bool contains(const segment& s) noexcept {
    const extent range{s.remote_offset, s.length, s.remote_stride, s.count};
    if (s.count == 1) {
      if (holds(hint_, range)) return true;
      if (holds(hint_ + 1, range)) {
        ++hint_;
        return true;
      }
      const auto after = std::ranges::upper_bound(permitted_, range.offset, {}, &extent::offset);
      const auto index = static_cast<std::size_t>(after - permitted_.begin());
      if (index != 0 && holds(index - 1, range)) {
        hint_ = index - 1;
        return true;
      }
    }
    return covered(range, permitted_);
  }

 private:
  [[nodiscard]] bool holds(std::size_t index, const extent& range) const noexcept {
    if (index >= permitted_.size()) return false;
    const auto& e = permitted_[index];
    return e.count == 1 && range.offset >= e.offset && range.offset - e.offset <= e.length &&
           range.length <= e.length - (range.offset - e.offset);
  }

  std::span<const extent> permitted_;
  std::size_t hint_{0};
};

/// Whether every segment surely lies in its local region and in its remote one. The common case in
/// a few instructions; what is false here goes through the checks that find the words for it.
bool plainly_inside(std::span<const segment> segments, std::uint64_t local_size,
                    std::uint64_t remote_size) noexcept {
  return std::ranges::all_of(segments, [&](const segment& s) {
    return s.count == 1 && s.local_offset <= local_size &&
           s.length <= local_size - s.local_offset && s.remote_offset <= remote_size &&
           s.length <= remote_size - s.remote_offset;
  });
}

unexpected at_piece(const troupe::error& e, std::size_t index) {
  return fail(e.code, "piece " + std::to_string(index) + ": " + e.message);
}

}  // namespace

// -- checking
// ---------------------------------------------------------------------------------------------

result<job_piece> shm_link::prepare_piece(const batch& work, std::size_t index) {
  const auto& piece = work.pieces[index];
  if (!piece.remote) return fail(errc::invalid_config, "it has no grant");
  const auto& grant = *piece.remote;
  if (grant.owner != options_.peer) {
    return fail(errc::stale_incarnation,
                "its grant is of incarnation " + std::to_string(grant.owner.value) +
                    ", this link's peer is " + std::to_string(options_.peer.value));
  }
  if (grant.transfer != work.transfer) {
    return fail(errc::unauthorized, "its grant was given for transfer " +
                                        std::to_string(grant.transfer.value) + ", not " +
                                        std::to_string(work.transfer.value));
  }
  const auto wanted = work.dir == direction::write ? access::write : access::read;
  if (!permits(grant.rights, wanted)) {
    return fail(errc::unauthorized, wanted == access::write ? "its grant does not permit to write"
                                                            : "its grant does not permit to read");
  }
  const auto key = grant_key::decode(grant.key);
  if (!key) return fail(key.error());

  job_piece made;
  auto local = regions_.use(piece.local);
  if (!local) return fail(std::move(local).error());
  made.local = std::move(*local);
  if (!plainly_inside(piece.segments, made.local->size(), grant.region_size)) {
    if (auto ok = check_local(piece.segments, made.local->size()); !ok) return fail(ok.error());
    if (auto ok = check_remote(piece.segments, grant.region_size); !ok) return fail(ok.error());
  }
  extent_check permitted{grant.extents};
  for (std::size_t i = 0; i < piece.segments.size(); ++i) {
    if (permitted.contains(piece.segments[i])) continue;
    return fail(errc::out_of_range, "segment " + std::to_string(i) + ": remote offset " +
                                        std::to_string(piece.segments[i].remote_offset) +
                                        ", length " + std::to_string(piece.segments[i].length) +
                                        " is not within what the grant permits");
  }

  made.grant = grant.id;
  made.slot = &outgoing_->slots[key->slot];
  if (key->how == grant_key::memory::process) {
    if (!we_reach_peer_memory_) {
      return fail(errc::backend_unavailable,
                  "the kernel does not permit process_vm_* on the peer's process; see "
                  "/proc/sys/kernel/yama/ptrace_scope");
    }
    made.remote_address = key->address;
    return made;
  }
  made.mapped = peer_regions_.find(grant.region);
  if (!made.mapped) {
    drain_control();  // it was sent before the grant was made
    made.mapped = peer_regions_.find(grant.region);
  }
  if (!made.mapped) {
    return fail(errc::grant_revoked, "region " + std::to_string(grant.region.value) +
                                         " of the peer is not, or no longer, shared with us");
  }
  if (made.mapped->size() < grant.region_size) {
    return fail(errc::unauthorized, "its grant says that the region has " +
                                        std::to_string(grant.region_size) + " bytes, it has " +
                                        std::to_string(made.mapped->size()));
  }
  made.remote_address = reinterpret_cast<std::uintptr_t>(made.mapped->base());
  return made;
}

result<std::shared_ptr<copy_job>> shm_link::prepare(batch work) {
  if (work.frame.size() > max_frame) {
    return fail(errc::out_of_range, "a frame has at most " + std::to_string(max_frame) +
                                        " bytes, found " + std::to_string(work.frame.size()));
  }
  if (work.dir != direction::write && work.dir != direction::read) {
    return fail(errc::invalid_config, "a batch writes or reads");
  }
  auto job = std::make_shared<copy_job>();
  job->pieces.reserve(work.pieces.size());
  for (std::size_t i = 0; i < work.pieces.size(); ++i) {
    auto piece = prepare_piece(work, i);
    if (!piece) return at_piece(piece.error(), i);
    job->pieces.push_back(std::move(*piece));
    job->total += total_bytes(work.pieces[i].segments);
  }
  job->work = std::move(work);
  return job;
}

/// Under the lock: takes the batch in, or says why not.
result<void> shm_link::admit(const std::shared_ptr<copy_job>& job) {
  if (state_ != state::up) return not_up();
  const auto& work = job->work;
  if (fenced_.contains(work.transfer)) {
    return fail(errc::grant_revoked,
                "transfer " + std::to_string(work.transfer.value) + " was fenced on this link");
  }
  if (active_.size() >= options_.max_batches) {
    return fail(errc::overloaded, std::to_string(active_.size()) +
                                      " batches are in flight on this link, the maximum");
  }
  const auto frames = waiting_bytes_ + reserved_bytes_ + work.frame.size();
  if (!work.frame.empty() && frames > options_.max_queued_frame_bytes) {
    return fail(errc::overloaded, "the peer does not take frames: " +
                                      std::to_string(waiting_bytes_ + reserved_bytes_) +
                                      " bytes wait");
  }
  reserved_bytes_ += work.frame.size();
  active_.push_back(job);
  stats_.batches_posted += 1;
  return {};
}

result<void> shm_link::post(batch work) {
  {
    std::unique_lock lock{mutex_};
    if (state_ == state::connecting) {
      lock.unlock();
      drain_control();  // the peer may be up already, and what it said is here
      lock.lock();
    }
    if (state_ != state::up) return not_up();
  }
  auto prepared = prepare(std::move(work));
  if (!prepared) return fail(std::move(prepared).error());
  const auto& job = *prepared;
  const bool at_once = job->total <= inline_bytes;
  {
    const std::lock_guard lock{mutex_};
    if (auto ok = admit(job); !ok) return ok;
    if (at_once) {
      job->running = true;
      running_ += 1;
    } else {
      queued_.push_back(job);
      queued_count_.fetch_add(1, std::memory_order_release);
    }
  }
  if (!at_once) {
    engine_.wake();
    return {};
  }
  run(*job, UINT64_MAX);
  bool last_of_broken = false;
  {
    const std::lock_guard lock{mutex_};
    job->running = false;
    running_ -= 1;
    finish(job);
    last_of_broken = state_ != state::up;
  }
  events_.deliver();
  if (last_of_broken) settle();
  return {};
}

// -- copying
// ------------------------------------------------------------------------------------------------

/// Without the lock; the job is marked as running.
void shm_link::run(copy_job& job, std::uint64_t most_bytes) {
  const std::uint64_t end = most_bytes > job.total - job.moved ? job.total : job.moved + most_bytes;
  while (!job.cancelled.load(std::memory_order_acquire)) {
    const auto outcome = runner_->step(job);
    if (outcome.owner_waits) ring_peer();
    if (outcome.state == job_runner::progress::done) return;
    if (job.moved >= end && end != job.total) return;
  }
}

bool shm_link::run_slice() {
  if (slicing_.exchange(true, std::memory_order_acquire)) return false;
  std::shared_ptr<copy_job> job;
  {
    const std::lock_guard lock{mutex_};
    if (!queued_.empty()) {
      job = queued_.front();
      job->running = true;
      running_ += 1;
    }
  }
  bool ended = false;
  if (job) {
    run(*job, slice_bytes);
    const std::lock_guard lock{mutex_};
    job->running = false;
    running_ -= 1;
    ended =
        job->failure || job->moved == job->total || job->cancelled.load(std::memory_order_acquire);
    if (ended) finish(job);
  }
  slicing_.store(false, std::memory_order_release);
  if (ended) {
    events_.deliver();
    const bool up = up_.load(std::memory_order_acquire);
    if (!up) settle();
  }
  return job != nullptr;
}

/// Under the lock: takes the batch out and puts its completion (and its frame) on the way.
void shm_link::finish(const std::shared_ptr<copy_job>& job) {
  const auto at = std::ranges::find(active_, job);
  *at = std::move(active_.back());
  active_.pop_back();
  if (const auto queued = std::ranges::find(queued_, job); queued != queued_.end()) {
    queued_.erase(queued);
    queued_count_.fetch_sub(1, std::memory_order_release);
  }
  reserved_bytes_ -= job->work.frame.size();
  if (!job->failure) {
    if (state_ == state::broken) {
      job->failure = why_broken_;
    } else if (state_ == state::closed) {
      job->failure = troupe::error{errc::aborted, "the link was closed"};
    } else if (job->cancelled.load(std::memory_order_acquire)) {
      job->failure = troupe::error{errc::aborted, "the transfer was fenced here"};
    }
  }
  if (outgoing_ != nullptr) {
    auto& counters = outgoing_->counters;
    (job->work.dir == direction::write ? counters.bytes_written : counters.bytes_read)
        .fetch_add(job->moved, std::memory_order_relaxed);
    if (job->failure && job->failure->code == errc::grant_revoked) {
      counters.refused.fetch_add(1, std::memory_order_relaxed);
    }
  }
  events_.put(conclude(*job));
  if (!pending_fences_.empty()) collect_quiescent();
  if (broken_event_due_ && running_ == 0) {
    broken_event_due_ = false;
    events_.put(broken_event{*why_broken_});
  }
}

completion shm_link::conclude(copy_job& job) {
  completion done{.id = job.work.id,
                  .transfer = job.work.transfer,
                  .failure = {},
                  .bytes = job.moved,
                  .bad_segments = {}};
  for (auto& piece : job.pieces) piece.local.release();
  if (job.failure) {
    stats_.batches_failed += 1;
    done.bad_segments = unfinished_segments(job);
    done.failure = std::move(job.failure);
  } else {
    stats_.batches_completed += 1;
    if (!job.work.frame.empty()) put_frame(std::move(job.work.frame));
  }
  return done;
}

// -- frames
// ---------------------------------------------------------------------------------------------------

result<void> shm_link::send_frame(std::span<const std::byte> frame) {
  if (frame.size() > max_frame) {
    return fail(errc::out_of_range, "a frame has at most " + std::to_string(max_frame) +
                                        " bytes, found " + std::to_string(frame.size()));
  }
  const std::lock_guard lock{mutex_};
  if (state_ != state::up) return not_up();
  if (waiting_bytes_ + reserved_bytes_ + frame.size() > options_.max_queued_frame_bytes) {
    return fail(errc::overloaded, "the peer does not take frames: " +
                                      std::to_string(waiting_bytes_ + reserved_bytes_) +
                                      " bytes wait");
  }
  put_frame({frame.begin(), frame.end()});
  return {};
}

/// Under the lock: into the ring, or behind those that wait for room in it.
void shm_link::put_frame(std::vector<std::byte> frame) {
  stats_.frames_out += 1;
  if (waiting_frames_.empty()) {
    const auto pushed = producer_->push(frame);
    if (pushed && *pushed) {
      if (producer_->must_wake_consumer()) ring_peer();
      return;
    }
  }
  waiting_bytes_ += frame.size();
  waiting_frames_.push_back(std::move(frame));
  flush_frames();
}

/// Under the lock: fills the ring from the frames that wait.
void shm_link::flush_frames() {
  if (waiting_frames_.empty()) return;
  bool wake = false;
  while (!waiting_frames_.empty()) {
    auto& front = waiting_frames_.front();
    const auto before = front_done_;
    auto done = front.empty() ? result<std::size_t>{0} : producer_->push_part(front, front_done_);
    if (front.empty()) {
      const auto pushed = producer_->push(front);
      if (!pushed) done = fail(pushed.error());
      if (pushed && !*pushed) {
        if (producer_->wait_for_room()) continue;
        break;
      }
      wake = true;
    }
    if (!done) {
      if (!ending_) ending_ = ending{done.error(), false};
      break;
    }
    front_done_ = *done;
    wake = wake || front_done_ != before;
    if (front_done_ < front.size()) {
      if (producer_->wait_for_room()) continue;
      break;
    }
    waiting_bytes_ -= front.size();
    front_done_ = 0;
    waiting_frames_.pop_front();
  }
  if (wake && producer_->must_wake_consumer()) ring_peer();
  if (!waiting_frames_.empty()) attention_.store(true, std::memory_order_release);
}

/// True: something was delivered.
bool shm_link::drain_frames() {
  if (!consumer_->ready() || reading_.exchange(true, std::memory_order_acquire)) return false;
  int taken = 0;
  std::optional<troupe::error> nonsense;
  while (taken < frames_per_round && up_.load(std::memory_order_acquire) &&
         events_.waiting() < max_waiting_events) {
    std::vector<std::byte> frame;
    auto popped = consumer_->pop(frame);
    if (!popped) {
      nonsense = std::move(popped).error();
      break;
    }
    if (!*popped) break;
    ++taken;
    events_.deliver(frame_event{std::move(frame)});
  }
  const bool room_wanted = consumer_->must_wake_producer();
  reading_.store(false, std::memory_order_release);
  if (taken != 0 || room_wanted) {  // parts of a long frame make room without a frame
    const std::lock_guard lock{mutex_};
    if (room_wanted) ring_peer();
    stats_.frames_in += static_cast<std::uint64_t>(taken);
  }
  if (nonsense) break_link(std::move(*nonsense), false);
  return taken != 0 || room_wanted || nonsense;
}

/// Under the lock, or while a job of this link runs: the descriptor is not closed then.
void shm_link::ring_peer() noexcept {
  if (peer_doorbell_) [[maybe_unused]]
    const auto written = ::eventfd_write(peer_doorbell_.get(), 1);
}

}  // namespace troupe::transport::shm
