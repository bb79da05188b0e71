#include "troupe/transport/tcp/outgoing_stage.hpp"

#include <algorithm>

#include "troupe/transport/tcp/outgoing.hpp"

namespace troupe::transport::tcp {

namespace {

/// Limits the runs per chunk: short runs use more of a GPU's tables than of a chunk.
constexpr std::size_t most_runs_in_chunk = 8192;

/// How many bytes of the job go into the next chunk.
std::uint64_t share_of(const outgoing& job, const staging::run_cursor& from) noexcept {
  std::uint64_t bytes = 0;
  std::uint64_t done = job.runs[from.run()].length * from.repetition() + from.offset();
  const auto end = std::min(job.runs.size(), from.run() + most_runs_in_chunk);
  for (auto i = from.run(); i < end && bytes < staging::staging_pool::chunk_size; ++i) {
    bytes += job.runs[i].length * job.runs[i].count - std::exchange(done, 0);
  }
  return std::min<std::uint64_t>(bytes, staging::staging_pool::chunk_size);
}

}  // namespace

bool outgoing_stage::fill(outgoing& job) {
  while (asked_ < job.bytes && !job.withdrawn() && failure() == nullptr) {
    auto chunk = copies_.lend(quota_);
    if (chunk && !*chunk) return false;
    staging::staged_copies::order what{.dir = direction::write,
                                       .runs = job.runs,
                                       .from = cursor_,
                                       .bytes = share_of(job, cursor_),
                                       .memory = job.memory,
                                       .transfer = job.copies_for(),
                                       .batch = job.type == frame_type::write ? job.batch : 0,
                                       .group = {}};
    if (!chunk) {
      copies_of_job_.push_back(copies_.refuse(what, std::move(chunk).error()));
    } else {
      const scoped_pin pin{*job.guard};
      if (!pin) return true;
      copies_of_job_.push_back(copies_.start(std::move(*chunk), what));
    }
    cursor_.advance(job.runs, what.bytes);
    asked_ += what.bytes;
  }
  return true;
}

std::size_t outgoing_stage::ready() const noexcept {
  if (copies_of_job_.empty()) return 0;
  const auto& first = *copies_of_job_.front();
  if (!first.ended.load(std::memory_order_acquire) || first.failure) return 0;
  return first.bytes - taken_;
}

const troupe::error* outgoing_stage::failure() const noexcept {
  if (copies_of_job_.empty()) return nullptr;
  const auto& first = *copies_of_job_.front();
  if (!first.ended.load(std::memory_order_acquire) || !first.failure) return nullptr;
  return &*first.failure;
}

std::pair<std::byte*, std::shared_ptr<staging::staged_copy>> outgoing_stage::take(
    std::size_t bytes) {
  auto first = copies_of_job_.front();
  auto* const at = first->chunk.bytes().data() + taken_;
  taken_ += bytes;
  if (taken_ == first->bytes) {
    copies_of_job_.pop_front();
    taken_ = 0;
  }
  return {at, std::move(first)};
}

}  // namespace troupe::transport::tcp
