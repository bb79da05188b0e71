#include <utility>

#include "troupe/transport/batch_check.hpp"
#include "troupe/transport/shm/shm_link.hpp"

// Prepared batches: checked when they are prepared, and copied by the posting thread, in jobs that
// are reused from one posting to the next.

namespace troupe::transport::shm {

namespace {

/// How much the posting thread copies itself, without and with waiting for the end; more goes the
/// way of other batches. Handing a batch over takes some 60 us, and a second batch on the link
/// waits there for the first. But a caller wants its time-out and its signals served within some
/// milliseconds, and many small runs take that long as well.
constexpr std::uint64_t most_bytes = std::uint64_t{256} << 10;
constexpr std::uint64_t most_bytes_of_waiting = std::uint64_t{16} << 20;
constexpr std::uint64_t most_runs = 16'384;
constexpr std::size_t most_spare = 16;

}  // namespace

result<std::shared_ptr<const prepared_batch>> shm_link::prepare(direction dir,
                                                                std::vector<piece> pieces) {
  return prepare_checked(dir, std::move(pieces), options_.peer, regions_);
}

result<void> shm_link::post_prepared(const prepared_batch& what, const posting& how) {
  if (auto ok = check_posting(what, how); !ok) return ok;
  if (auto ok = need_up(); !ok) return ok;
  const auto job = take_spare();
  const auto filled = fill(*job, what, how);
  auto posted = filled && *filled ? run_inline(job) : result<void>{};
  job->pieces.clear();  // the job has ended: keep nothing mapped or registered for it
  if (!filled) return refused(filled.error());
  return *filled ? posted : link::post_prepared(what, how);
}

/// Returns false if it is too much, or not host memory on both sides. The content of the job is
/// unused then, and after an error.
result<bool> shm_link::fill(copy_job& job, const prepared_batch& what, const posting& how) {
  std::uint64_t bytes = 0, runs = 0;
  const auto most = how.caller_waits ? most_bytes_of_waiting : most_bytes;
  const auto count = how.count(what);
  for (std::uint32_t i = 0; i < count && bytes <= most && runs <= most_runs; ++i) {
    const auto& one = *what.at(how.index(i)).what;
    bytes += one.length * one.count;
    runs += one.count;
  }
  if (bytes > most || runs > most_runs) return false;
  // One piece of the job for each group of consecutive segments of the same piece.
  auto last = SIZE_MAX;
  auto& pieces = job.work.pieces;
  std::size_t used = 0;
  for (std::uint32_t i = 0; i < count; ++i) {
    const auto at = what.at(how.index(i));
    if (at.piece != last) {
      const auto& from = what.pieces()[at.piece];
      job_piece made;
      auto local = regions_.use(from.local);
      if (!local) return in_piece(at.piece, local.error());
      const auto key = grant_key::decode(from.remote->key);
      if ((*local)->kind() != memory_kind::host || !key || key->how == grant_key::memory::asked) {
        return false;
      }
      made.local = std::move(*local);
      if (auto ok = find_remote(*from.remote, made); !ok) return in_piece(at.piece, ok.error());
      job.pieces.push_back(std::move(made));
      if (used == pieces.size()) pieces.emplace_back();
      pieces[used].local = from.local;
      pieces[used].remote = from.remote;
      ++used;
      last = at.piece;
    }
    pieces[used - 1].segments.push_back(*at.what);
  }
  pieces.resize(used);
  job.work.id = how.id;
  job.work.transfer = how.transfer;
  job.work.dir = what.dir();
  job.work.frame.assign(how.frame.begin(), how.frame.end());
  job.total = bytes;
  return true;
}

/// A job that nobody else holds, empty except for memory to reuse.
std::shared_ptr<copy_job> shm_link::take_spare() {
  const std::lock_guard lock{mutex_};
  for (auto& one : spare_) {
    if (one.use_count() != 1) continue;
    // Orders the last release of the job before its new use.
    static_cast<void>(std::shared_ptr<copy_job>{one});
    auto found = one;
    for (auto& piece : found->work.pieces) piece.segments.clear();
    found->pieces.clear();
    found->at = {};
    found->total = found->moved = 0;
    found->failure.reset();
    found->running = false;
    found->cancelled.store(false, std::memory_order_relaxed);
    return found;
  }
  auto made = std::make_shared<copy_job>();
  if (spare_.size() < most_spare) spare_.push_back(made);
  return made;
}

}  // namespace troupe::transport::shm
