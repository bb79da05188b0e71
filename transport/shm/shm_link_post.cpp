#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <utility>

#include "troupe/transport/batch_check.hpp"
#include "troupe/transport/shm/shm_link.hpp"
#include "troupe/transport/shm/tracing.hpp"

// The initiator's side of a link: checking, copying and completing batches.

namespace troupe::transport::shm {

namespace {

/// Batches up to this size are copied by the thread that posts them: handing them over would take
/// longer.
constexpr std::uint64_t inline_bytes = std::uint64_t{256} << 10;
/// Bytes that one round of the progress engine copies for one link before the others have their
/// turn.
constexpr std::uint64_t slice_bytes = std::uint64_t{4} << 20;
/// Batches up to this size are copied in one hold of the link's lock. Others may wait for it as
/// long as a copy out of cold memory takes: about 3 us.
constexpr std::uint64_t small_bytes = std::uint64_t{16} << 10;

/// Without the set-up of streaming copies, which pays off for larger copies only.
void copy_plainly(direction dir, std::span<const segment> segments, std::byte* local,
                  std::byte* remote) noexcept {
  for (const auto& s : segments) {
    for (std::uint32_t i = 0; i < s.count; ++i) {
      auto* here = local + s.local_offset + i * s.local_stride;
      auto* there = remote + s.remote_offset + i * s.remote_stride;
      std::memcpy(dir == direction::write ? there : here, dir == direction::write ? here : there,
                  s.length);
    }
  }
}

}  // namespace

// -- checking

result<job_piece> shm_link::prepare_piece(const batch& work, std::size_t index) {
  const auto& piece = work.pieces[index];
  job_piece made;
  auto local = regions_.use_on_host(piece.local, kind_);
  if (!local) return in_piece(index, std::move(local).error());
  made.local = std::move(*local);
  if (auto ok = check_piece(work, index, options_.peer, *made.local); !ok) return fail(ok.error());
  if (auto ok = find_remote(*piece.remote, made); !ok) return in_piece(index, ok.error());
  return made;
}

result<void> shm_link::find_remote(const remote_grant& grant, job_piece& made) {
  const auto key = grant_key::decode(grant.key);
  if (!key) return fail(key.error());

  if (key->how == grant_key::memory::asked) {
    return fail(errc::backend_unavailable,
                "region " + std::to_string(grant.region.value) +
                    " of the peer is memory of a GPU, which the processor does not reach");
  }
  made.grant = grant.id;
  made.slot = &outgoing_->slots[key->slot];
  if (key->how == grant_key::memory::process) {
    if (!we_reach_peer_memory_) {
      return fail(errc::backend_unavailable,
                  "the kernel does not let this process reach the peer's memory (" +
                      why_not_traced(ptrace_scope()) + ")");
    }
    made.remote_address = key->address;
    return {};
  }
  made.mapped = peer_regions_.find(grant.region);
  if (!made.mapped) {
    drain_control();  // the mapping was sent before the grant was made
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
  return {};
}

/// Under the lock. Null if the peer has not shared the region, or if its message is still unread.
const mapped_region* shm_link::mapped_now(region_id region) {
  if (last_mapped_ && last_region_ == region) return last_mapped_.get();
  auto found = peer_regions_.find(region);
  if (!found) return nullptr;
  last_region_ = region;
  last_mapped_ = std::move(found);
  return last_mapped_.get();
}

/// The common case, a few blocks in one piece of mapped memory: done in one hold of the lock, so
/// that no job is needed. Returns false, with nothing done, if the batch is not such a case or is
/// invalid; the general path then words the error.
bool shm_link::post_small(batch& work) {
  if (work.pieces.size() != 1 || total_bytes(work.pieces.front().segments) > small_bytes) {
    return false;
  }
  const auto& piece = work.pieces.front();
  auto local = regions_.use_on_host(piece.local, kind_);
  if (!local || !check_batch(work) || !check_piece(work, 0, options_.peer, **local)) return false;
  const auto key = grant_key::decode(piece.remote->key);
  if (!key || key->how != grant_key::memory::mapped) return false;
  completion done{
      .id = work.id, .transfer = work.transfer, .failure = {}, .bytes = 0, .bad_segments = {}};
  bool our_turn = false;
  {
    const std::lock_guard lock{mutex_};
    if (state_ != link_phase::up) return false;
    const auto* there = mapped_now(piece.remote->region);
    if (there == nullptr || there->size() < piece.remote->region_size ||
        !admit(work.transfer, work.frame.size())) {
      return false;
    }
    if (slot_visit visit{outgoing_->slots[key->slot], piece.remote->id}) {
      copy_plainly(work.dir, piece.segments, (*local)->data(), there->base());
      done.bytes = total_bytes(piece.segments);
      if (visit.leave()) ring_peer();
    } else {
      ring_peer();  // it may have seen us in the slot when it revoked the grant, and wait for us
      done.failure = revoked_by_peer(0);
      done.bad_segments.resize(piece.segments.size());
      std::iota(done.bad_segments.begin(), done.bad_segments.end(), 0U);
    }
    conclude(work.dir, work.frame, done);
    local->release();
    our_turn = sink_.try_begin();
    if (!our_turn) sink_.put(done);
  }
  if (our_turn) {
    sink_.end(std::move(done));
  } else {
    sink_.deliver();
  }
  return true;
}

result<void> shm_link::post_of_device(batch& /*work*/, troupe::error why) {
  return refused(std::move(why));
}

result<void> shm_link::post(batch work) {
  if (post_small(work)) return {};
  if (auto ok = check_batch(work); !ok) return ok;
  if (auto ok = need_up(); !ok) return ok;
  auto made = make_job<copy_job>(work, std::bind_front(&shm_link::prepare_piece, this));
  if (!made) return post_of_device(work, std::move(made).error());
  const auto& job = *made;
  if (job->total <= inline_bytes) return run_inline(job);
  {
    const std::lock_guard lock{mutex_};
    if (auto ok = take_in(job); !ok) return ok;
    queued_.push_back(job);
    in_work_.fetch_add(1, std::memory_order_release);
  }
  engine_.wake();
  return {};
}

/// Runs the job on the thread that posts it.
result<void> shm_link::run_inline(const std::shared_ptr<copy_job>& job) {
  {
    const std::lock_guard lock{mutex_};
    if (auto ok = take_in(job); !ok) return ok;
    job->running = true;
    running_ += 1;
  }
  run(*job, UINT64_MAX);
  bool last_of_broken = false;
  {
    const std::lock_guard lock{mutex_};
    job->running = false;
    running_ -= 1;
    finish(job);
    last_of_broken = state_ != link_phase::up;
  }
  sink_.deliver();
  if (last_of_broken) retire_when_quiescent();
  return {};
}

// -- copying

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

bool shm_link::advance() {
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
    sink_.deliver();
    if (!up_.load(std::memory_order_acquire)) retire_when_quiescent();
  }
  return job != nullptr;
}

}  // namespace troupe::transport::shm
