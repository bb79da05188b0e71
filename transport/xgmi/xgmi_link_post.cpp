#include <algorithm>
#include <functional>
#include <numeric>
#include <string>
#include <utility>

#include "troupe/transport/batch_check.hpp"
#include "troupe/transport/xgmi/grant_key.hpp"
#include "troupe/transport/xgmi/xgmi_link.hpp"

// The initiator's side of a link: checking, launching and completing batches.

namespace troupe::transport::xgmi {

namespace {

/// The most unfinished batches that `advance` skips over in one pass.
constexpr std::size_t looked_at = 64;

/// Whether the processor copies the batch, as over shm. Decided by its grants, without the regions.
bool is_of_the_host(const batch& work) {
  const auto of_a_gpu = [](const piece& one) {
    return one.remote && decode_grant_key(one.remote->key);
  };
  const auto of_the_host = [](const piece& one) {
    return one.remote && shm::grant_key::decode(one.remote->key);
  };
  return !work.pieces.empty() && std::ranges::none_of(work.pieces, of_a_gpu) &&
         std::ranges::all_of(work.pieces, of_the_host);
}

/// The error for a piece with local host memory in a batch that GPUs copy.
troupe::error not_for_gpus(const remote_grant& grant) {
  const auto slot = decode_grant_key(grant.key);
  if (slot) {
    return {
        errc::backend_unavailable,
        "the local region is memory of the host and the peer's of a GPU, and xgmi moves neither "
        "into the other"};
  }
  if (!shm::grant_key::decode(grant.key)) return slot.error();
  return {errc::backend_unavailable,
          "a batch over xgmi moves memory of GPUs or of the host, this one has both: post them "
          "separately"};
}

/// The error for a piece from local GPU memory to the peer's host memory.
troupe::error not_to_the_host(const remote_grant& grant) {
  return {errc::backend_unavailable,
          "the peer's region " + std::to_string(grant.region.value) +
              " is memory of the host and ours of a GPU, and xgmi moves neither into the other"};
}

}  // namespace

// -- a job

void xgmi_job::release_memory() {
  for (auto& piece : pieces) {
    piece.local.release();
    // Destroyed, not assigned: the region's use must end after the opened allocation.
    const auto ended = std::exchange(piece.remote, {});
  }
}

bool xgmi_job::ended() const noexcept {
  return std::ranges::all_of(flights, [](const flight& one) { return one.ended(); });
}

std::vector<std::uint32_t> xgmi_job::unfinished() const {
  const auto count =
      std::accumulate(work.pieces.begin(), work.pieces.end(), std::size_t{0},
                      [](std::size_t sum, const piece& one) { return sum + one.segments.size(); });
  std::vector<std::uint32_t> bad(count);
  std::iota(bad.begin(), bad.end(), 0U);
  return bad;
}

// -- checking

result<xgmi_piece> xgmi_link::prepare_piece(const batch& work, std::size_t index) {
  const auto& piece = work.pieces[index];
  xgmi_piece made;
  auto local = regions_.use(piece.local);
  if (!local) return in_piece(index, std::move(local).error());
  made.local = std::move(*local);
  if (auto ok = check_piece(work, index, options_.peer, *made.local); !ok) return fail(ok.error());
  if (made.local->kind() == memory_kind::host) return in_piece(index, not_for_gpus(*piece.remote));
  const auto place = gpus_->place_of(*made.local);
  if (!place) return in_piece(index, place.error());
  made.device = place->device;
  if (auto ok = find_remote(*piece.remote, made); !ok) return in_piece(index, ok.error());
  return made;
}

/// Finds where the granted region lies for the GPU that copies.
result<void> xgmi_link::find_remote(const remote_grant& grant, xgmi_piece& made) {
  const auto slot = decode_grant_key(grant.key);
  if (!slot && shm::grant_key::decode(grant.key)) return fail(not_to_the_host(grant));
  if (!slot) return fail(slot.error());
  made.slot = {&outgoing_->slots[*slot], grant.id};
  if (!peer_regions_->knows(grant.region))
    drain_control();  // the region was announced before the grant was made
  auto remote = peer_regions_->reach(grant.region, made.device);
  if (!remote) return fail(std::move(remote).error());
  if (remote->size < grant.region_size) {
    return fail(errc::unauthorized, "its grant says that the region has " +
                                        std::to_string(grant.region_size) + " bytes, it has " +
                                        std::to_string(remote->size));
  }
  made.remote = std::move(*remote);
  return {};
}

result<void> xgmi_link::post(batch work) {
  if (is_of_the_host(work)) {
    for (std::size_t i = 0; i < work.pieces.size(); ++i) {
      const auto local = regions_.use(work.pieces[i].local);
      if (!local) return in_piece(i, local.error());
      if ((*local)->kind() != memory_kind::host) {
        return in_piece(i, not_to_the_host(*work.pieces[i].remote));
      }
    }
    return shm_link::post(std::move(work));
  }
  if (auto ok = check_batch(work); !ok) return ok;
  if (auto ok = need_up(); !ok) return ok;
  auto prepared = shm::make_job<xgmi_job>(work, std::bind_front(&xgmi_link::prepare_piece, this));
  if (!prepared) return refused(std::move(prepared).error());
  const auto& job = *prepared;
  {
    const std::lock_guard lock{mutex_};
    if (auto ok = take_in(job); !ok) return ok;
    if (!queued_.empty() || crowded(*job)) {
      queued_.push_back(job);
      in_work_.fetch_add(1, std::memory_order_seq_cst);
      if (engine_.asleep()) engine_.wake();
      return {};  // `start_waiting` starts it once batches in flight have ended
    }
    job->running = true;
    running_ += 1;
  }
  start(*job);
  end_running(job);
  return {};
}

// -- copying

bool xgmi_link::crowded(const xgmi_job& job) {
  return std::ranges::any_of(job.pieces, [&](const xgmi_piece& piece) {
    const auto lanes = gpus_->lanes.on(piece.device);
    return lanes && (*lanes)->crowded();
  });
}

/// Enters the slots of the pieces in order; fails at the first whose grant is gone.
result<void> xgmi_link::enter_slots(xgmi_job& job) const {
  for (auto& piece : job.pieces) {
    piece.slot.slot->busy.fetch_add(1, std::memory_order_seq_cst);
    job.entered += 1;
    if (piece.slot.slot->id.load(std::memory_order_seq_cst) != piece.slot.grant) {
      return fail(shm::revoked_by_peer(job.entered - 1));
    }
  }
  return {};
}

/// Returns whether an owner may be waiting for the job to leave.
bool xgmi_link::leave_slots(xgmi_job& job) const {
  bool waits = false;
  our_copies_->before_store();
  for (std::size_t i = 0; i < job.entered; ++i) {
    auto& [slot, grant] = job.pieces[i].slot;
    slot->busy.fetch_sub(1, std::memory_order_seq_cst);
    waits = waits || slot->id.load(std::memory_order_seq_cst) != grant;
  }
  job.entered = 0;
  return waits;
}

/// Without the lock; the job must be marked as running. Afterwards it is in flight, has failed, or
/// both.
void xgmi_link::start(xgmi_job& job) {
  if (job.cancelled.load(std::memory_order_acquire)) return;
  if (auto ok = enter_slots(job); !ok) {
    job.failure = std::move(ok).error();
    return;
  }
  // Launch the pieces of one GPU together; usually all pieces are on one.
  for (std::size_t first = 0; first < job.pieces.size(); ++first) {
    const auto device = job.pieces[first].device;
    const auto same = [&](const xgmi_piece& piece) { return piece.device == device; };
    const auto begin = job.pieces.begin();
    if (std::any_of(begin, begin + static_cast<std::ptrdiff_t>(first), same)) continue;
    auto lanes = gpus_->lanes.on(device);
    if (!lanes) {
      job.failure = std::move(lanes).error();
      return;
    }
    batch_launch::plan how;
    how.copy_blocks = gpus_->options.copy_blocks;
    how.engine_bytes = gpus_->options.engine_bytes;
    how.bulk = gpus_->options.bulk && gpus_->site->runtime->devices()[device].bulk_copies;
    how.total = job.total;
    for (const auto& piece : job.work.pieces) how.segments += piece.segments.size();
    batch_launch launch{**lanes, how};
    for (std::size_t i = first; i < job.pieces.size(); ++i) {
      const auto& piece = job.pieces[i];
      if (!same(piece)) continue;
      launch.add(job.work.dir, piece.local->data(), piece.remote.base, job.work.pieces[i].segments);
    }
    job.flights.push_back(launch.end());
    if (launch.failure()) {
      job.failure = launch.failure();
      return;
    }
  }
}

/// Adds a started job to those in flight, and finishes it if it has already ended.
void xgmi_link::end_running(const std::shared_ptr<xgmi_job>& job) {
  armed_.store(false, std::memory_order_release);  // the bell does not cover this job yet
  {
    const std::lock_guard lock{mutex_};
    flying_.push_back(job);
    in_work_.fetch_add(1, std::memory_order_seq_cst);
  }
  watch_over();
  if (job->ended()) advance();
  if (engine_.asleep()) engine_.wake();
}

/// Starts jobs that waited for tables. Returns whether one was started.
bool xgmi_link::start_waiting() {
  bool started = false;
  while (true) {
    std::shared_ptr<xgmi_job> job;
    {
      const std::lock_guard lock{mutex_};
      if (queued_.empty() || crowded(*queued_.front())) return started;
      job = queued_.front();
      // Still counted in `in_work_`: no thread may sleep before the job is in `flying_`.
      queued_.pop_front();
      job->running = true;
      running_ += 1;
    }
    start(*job);
    watch_over();  // other links may have had all tables, so this link may not be watched yet
    const std::lock_guard lock{mutex_};
    flying_.push_back(job);
    started = true;
  }
}

bool xgmi_link::advance() {
  const bool copied = shm_link::advance();
  if (looking_.exchange(true, std::memory_order_acquire)) return copied;
  gpus_->lanes.look();
  bool ended = false;
  bool owner_waits = false;
  std::optional<troupe::error> lost;
  {
    const std::lock_guard lock{mutex_};
    // Jobs usually end in the order of posting: those far behind need no check yet.
    for (std::size_t i = 0; i < flying_.size() && i < looked_at;) {
      const auto job = flying_[i];
      if (!job->ended()) {
        ++i;
        continue;
      }
      flying_.erase(flying_.begin() + static_cast<std::ptrdiff_t>(i));
      in_work_.fetch_sub(1, std::memory_order_release);
      for (auto& flown : job->flights) {
        if (auto why = flown.take_failure()) {
          if (flown.lost() && !lost) lost = why;
          job->failure = std::move(why);
        }
        flown.give_back_tables();
      }
      const bool whole = !job->failure && !job->flights.empty();
      job->moved = whole ? job->total : 0;
      owner_waits = leave_slots(*job) || owner_waits;
      job->running = false;
      running_ -= 1;
      finish(job);
      ended = true;
    }
  }
  const bool started = start_waiting();
  looking_.store(false, std::memory_order_release);
  if (owner_waits) {
    const std::lock_guard lock{mutex_};
    ring_peer();
  }
  if (ended) {
    sink_.deliver();
    if (lost) break_link(std::move(*lost), false);
    if (!up_.load(std::memory_order_acquire)) retire_when_quiescent();
  }
  return copied || ended || started;
}

/// Under the lock: also removes a job that was never started.
void xgmi_link::on_finished(shm::mapped_job& job) {
  const auto waits =
      std::ranges::find_if(queued_, [&](const auto& one) { return one.get() == &job; });
  if (waits == queued_.end()) {
    shm_link::on_finished(job);
    return;
  }
  queued_.erase(waits);
  in_work_.fetch_sub(1, std::memory_order_release);
}

}  // namespace troupe::transport::xgmi
