#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "troupe/transport/shm/staged_link.hpp"

// How bytes move through chunks: ours for the batches that we initiate, the peer's for its
// requests.

namespace troupe::transport::shm {

namespace {

using step = chunk_use::step;

/// Bytes that the CPU copies for one link before the others have their turn.
constexpr std::uint64_t host_bytes_per_round = std::uint64_t{4} << 20;

/// Calls `move` with the copies between the chunk and the runs, a group at a time. `write` means
/// into the runs.
template <class Move>
result<void> copy_runs(direction dir, std::span<const staging::memory_run> runs, std::byte* chunk,
                       Move move) {
  // Filled before it is read.
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-member-init)
  std::array<copy_run, job_runner::chunk_runs> some;
  std::size_t count = 0;
  for (const auto& run : runs) {
    for (std::uint32_t i = 0; i < run.count; ++i) {
      auto* const there = run.at + i * run.stride;
      some[count++] = dir == direction::write ? copy_run{there, chunk, run.length}
                                              : copy_run{chunk, there, run.length};
      chunk += run.length;
      if (count < some.size()) continue;
      if (auto ok = move(std::span<const copy_run>{some}); !ok) return ok;
      count = 0;
    }
  }
  return count == 0 ? result<void>{} : move(std::span<const copy_run>{some.data(), count});
}

/// The peer's failure, with its sentence made safe for logs.
troupe::error failure_of(const chunk_answer& said) {
  const auto status = said.status;
  const auto code = status <= UINT8_MAX && is_errc(static_cast<std::uint8_t>(status))
                        ? static_cast<errc>(status)
                        : errc::internal;
  std::string sentence{said.sentence.begin(), std::ranges::find(said.sentence, '\0')};
  std::ranges::replace_if(
      sentence, [](char c) { return c < ' ' || c > '~'; }, '?');
  return {code, "the peer refused: " + sentence};
}

}  // namespace

bool staged_link::advance() {
  const bool copied = shm_link::advance();
  if (!used_.load(std::memory_order_acquire)) return copied;
  return move_chunks() || copied;
}

bool staged_link::move_chunks() {
  if (moving_.exchange(true, std::memory_order_acquire)) return false;
  due_.store(false, std::memory_order_seq_cst);
  std::shared_ptr<chunk_area> ours;
  std::shared_ptr<chunk_area> theirs;
  {
    const std::lock_guard lock{mutex_};
    ours = area_;
    theirs = peer_area_;
    jobs_.insert(jobs_.end(), fresh_.begin(), fresh_.end());
    fresh_.clear();
  }
  round now{.area = ours.get(), .host_bytes = host_bytes_per_round, .nonsense = {}};
  if (copies_.any()) now.worked = copies_.look().ended;
  if (theirs) {
    auto served = server_.serve(*theirs);
    if (served) {
      now.worked = now.worked || served->worked;
      now.tell = served->answered;
    } else {
      now.nonsense = std::move(served).error();
    }
  }
  if (!jobs_.empty() || ours) use_chunks(now);
  if (now.tell) {
    const std::lock_guard lock{mutex_};
    if (producer_ && producer_->must_wake_consumer()) ring_peer();
  }
  moving_.store(false, std::memory_order_release);
  if (now.worked) sink_.deliver();
  if (now.nonsense) break_link(std::move(*now.nonsense), false);
  // An ended copy may complete a fence, and a thread that posts does not call `attend` otherwise.
  if (now.worked && attention_.load(std::memory_order_acquire)) attend();
  if (now.worked && !up_.load(std::memory_order_acquire)) retire_when_quiescent();
  return now.worked;
}

void staged_link::use_chunks(round& now) {
  for (std::size_t i = 0; now.area != nullptr && i < chunk_count; ++i) go_on(now, i);
  if (now.area != nullptr) start_chunks(now);
  if (!jobs_.empty()) end_jobs(now);
}

/// Under no lock: from now on the job's memory is touched, and its fence waits. Returns false if
/// the job has ended.
bool staged_link::begin_touch(staged_job& job) {
  if (job.touching == 0) {
    const std::lock_guard lock{mutex_};
    if (job.over || job.cancelled.load(std::memory_order_acquire)) return false;
    if (!std::exchange(job.running, true)) running_ += 1;
  } else if (job.cancelled.load(std::memory_order_acquire)) {
    return false;
  }
  job.touching += 1;
  return true;
}

/// The chunk's bytes have arrived at their destination.
void staged_link::arrive(round& now, std::size_t index) {
  const auto& use = uses_[index];
  {
    const std::lock_guard lock{mutex_};
    use.job->arrived.push_back({use.first, use.first + use.bytes});
  }
  leave(now, index);
}

/// The chunk is done with its work, or has failed with `why`.
void staged_link::leave(round& now, std::size_t index, std::optional<troupe::error> why) {
  auto& use = uses_[index];
  if (why && !use.job->why) use.job->why = std::move(why);
  use.job->chunks -= 1;
  use.job.reset();
  use.copy.reset();
  use.now = step::free;
  now.worked = true;
}

// -- one chunk

void staged_link::go_on(round& now, std::size_t index) {
  auto& use = uses_[index];
  switch (use.now) {
    case step::free: return;
    case step::filling: {
      if (use.copy && !use.copy->ended.load(std::memory_order_acquire)) return;
      auto& job = *use.job;
      const bool by_hand = !job.pieces[use.piece].asks;
      auto why = use.copy ? use.copy->failure : std::nullopt;
      if (!by_hand) end_touch(job);
      if (!why && !job.cancelled.load(std::memory_order_acquire)) {
        if (!by_hand) return ask(now, index);
        if (auto ok = copy_by_hand(now, index)) {
          end_touch(job);
          return arrive(now, index);
        } else {
          why = std::move(ok).error();
        }
      }
      if (by_hand) end_touch(job);
      return leave(now, index, std::move(why));
    }
    case step::asked: {
      auto& state = now.area->state(index);
      const auto answered = state.answered.load(std::memory_order_acquire);
      if (answered == use.number - 1) return;
      if (answered != use.number) {
        now.nonsense = {errc::unauthorized, "the shm peer answered request " +
                                                std::to_string(answered) + ", it was asked " +
                                                std::to_string(use.number) +
                                                "; our chunks were overwritten"};
        return;
      }
      thread_order{now.area->number(), static_cast<unsigned>(index)}.after_load();
      const auto said = taken_answer(state);
      if (said.status != 0) return leave(now, index, failure_of(said));
      if (use.job->work.dir == direction::write) return arrive(now, index);
      if (!begin_touch(*use.job)) return leave(now, index);
      return copy_local(now, index, direction::read);
    }
    case step::emptying: {
      if (use.copy && !use.copy->ended.load(std::memory_order_acquire)) return;
      end_touch(*use.job);
      if (!use.copy || !use.copy->failure) return arrive(now, index);
      return leave(now, index, use.copy->failure);
    }
  }
}

/// Copies between the local region and the chunk, after `begin_touch`. `write` means into the
/// chunk.
void staged_link::copy_local(round& now, std::size_t index, direction dir) {
  auto& use = uses_[index];
  const auto& piece = use.job->pieces[use.piece];
  now.worked = true;
  use.now = dir == direction::write ? step::filling : step::emptying;
  if (piece.gpu == staging::memory_run::on_host) {
    const copier copy;
    static_cast<void>(copy_runs(dir == direction::write ? direction::read : direction::write,
                                use.local, now.area->bytes(index), [&](auto runs) {
                                  copy.copy(runs);
                                  return result<void>{};
                                }));
    now.host_bytes -= std::min(now.host_bytes, use.bytes);
    return go_on(now, index);
  }
  use.copy = copies_.start(staging::staging_chunk::somebody_elses(now.area->pinned(index)),
                           {.dir = dir,
                            .runs = use.local,
                            .from = {},
                            .bytes = use.bytes,
                            .memory = {&piece.local, 1},
                            .transfer = use.job->work.transfer,
                            .batch = 0,
                            .group = {}});
}

/// Copies between the chunk and memory of the peer that we can access, after `begin_touch`.
result<void> staged_link::copy_by_hand(round& now, std::size_t index) {
  const auto& use = uses_[index];
  const auto& piece = use.job->pieces[use.piece];
  slot_visit visit{*piece.by_hand.slot, piece.grant};
  if (!visit) {
    ring_peer();
    return fail(revoked_by_peer(use.piece));
  }
  const auto dir = use.job->work.dir;
  auto copied = copy_runs(dir, use.remote, now.area->bytes(index),
                          [&](auto runs) { return runner().carry(piece.by_hand, dir, runs); });
  if (visit.leave()) ring_peer();
  now.host_bytes -= std::min(now.host_bytes, use.bytes);
  return copied;
}

void staged_link::ask(round& now, std::size_t index) {
  auto& use = uses_[index];
  auto& state = now.area->state(index);
  for (std::size_t i = 0; i < use.remote.size(); ++i) {
    const auto& run = use.remote[i];
    state.runs[i] = {reinterpret_cast<std::uintptr_t>(run.at), run.length, run.stride, run.count,
                     0};
  }
  const auto& job = *use.job;
  state.request = {job.pieces[use.piece].grant, job.work.transfer.value,
                   static_cast<std::uint32_t>(job.work.dir),
                   static_cast<std::uint32_t>(use.remote.size())};
  use.number += 1;
  use.now = step::asked;
  use.copy.reset();
  thread_order{now.area->number(), static_cast<unsigned>(index)}.before_store();
  state.asked.store(use.number, std::memory_order_release);
  now.worked = now.tell = true;
}

// -- all of them

/// Assigns free chunks to the jobs in the order in which they were posted.
void staged_link::start_chunks(round& now) {
  std::size_t index = 0;
  for (const auto& job : jobs_) {
    while (job->given < job->total && !job->why &&
           !job->cancelled.load(std::memory_order_acquire)) {
      while (index < chunk_count && uses_[index].now != step::free) ++index;
      if (index == chunk_count) return;
      if (now.host_bytes == 0) {
        due_.store(true, std::memory_order_seq_cst);
        return;
      }
      start_chunk(now, index, job);
    }
  }
}

void staged_link::start_chunk(round& now, std::size_t index,
                              const std::shared_ptr<staged_job>& job) {
  auto& use = uses_[index];
  cut_chunk(*job, use);
  use.job = job;
  use.copy.reset();
  job->chunks += 1;
  const bool reads = job->work.dir == direction::read;
  const bool asks = job->pieces[use.piece].asks;
  if (reads && asks) return ask(now, index);
  if (!begin_touch(*job)) return leave(now, index);
  if (!reads) return copy_local(now, index, direction::write);
  if (auto ok = copy_by_hand(now, index); !ok) {
    end_touch(*job);
    return leave(now, index, std::move(ok).error());
  }
  copy_local(now, index, direction::read);
}

/// Ends the jobs that are complete or have failed, and drops those that were ended elsewhere.
void staged_link::end_jobs(round& now) {
  const std::lock_guard lock{mutex_};
  std::erase_if(jobs_, [&](const std::shared_ptr<staged_job>& job) {
    if (job->over) return true;
    if (job->touching != 0) return false;
    if (std::exchange(job->running, false)) running_ -= 1;
    const bool cancelled = job->cancelled.load(std::memory_order_acquire);
    if (!job->why && !cancelled && !job->complete()) return false;
    if (job->why && !cancelled) job->failure = std::move(job->why);
    job->moved = job->failure || cancelled ? 0 : job->total;
    finish(job);
    now.worked = true;
    return true;
  });
}

}  // namespace troupe::transport::shm
