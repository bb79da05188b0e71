#include <string>
#include <utility>

#include "troupe/transport/batch_check.hpp"
#include "troupe/transport/tcp/tcp_link.hpp"

// The initiator's batches: admitting them, handing them to lanes, ending them part by part.
namespace troupe::transport::tcp {

namespace {

/// The most batches, and map nodes of batches, kept for reuse.
constexpr std::size_t most_spare = 64;
/// The most bytes of a kept batch: many times what 64 segments need.
constexpr std::size_t most_spare_bytes = std::size_t{64} << 10;

}  // namespace

result<void> tcp_link::post(batch work) {
  if (!is_up()) return fail(errc::link_broken, "the link is not up");
  auto planned = plan_batch(std::move(work), last_wire_.fetch_add(1, std::memory_order_relaxed) + 1,
                            {.regions = regions_, .peer = options_.peer, .lanes = lanes_.size()});
  if (!planned) return fail(std::move(planned).error());
  const auto& batch = *planned;
  if (batch->parts().size() == 1) batch->parts()[0].lane = emptiest_lane();
  for (std::size_t i = 0; i < batch->memory.size(); ++i) {
    if (auto ok = prepare_copies(*batch->memory[i]); !ok) return in_piece(i, ok.error());
  }
  return start(batch);
}

result<std::shared_ptr<const prepared_batch>> tcp_link::prepare(direction dir,
                                                                std::vector<piece> pieces) {
  if (auto ok = check_to_prepare(dir, pieces); !ok) return fail(std::move(ok).error());
  const batch work{.id = {}, .transfer = {}, .dir = dir, .pieces = std::move(pieces), .frame = {}};
  for (std::size_t i = 0; i < work.pieces.size(); ++i) {
    auto used = regions_.use_by_way_of_host(work.pieces[i].local, backend_kind::tcp);
    if (!used) return in_piece(i, std::move(used).error());
    if (auto ok = check_piece(work, i, options_.peer, **used); !ok) return fail(ok.error());
    if (auto ok = prepare_copies(**used); !ok) return in_piece(i, ok.error());
  }
  return std::make_shared<const prepared_batch>(dir, work.pieces);
}

result<void> tcp_link::post_prepared(const prepared_batch& what, const posting& how) {
  if (!is_up()) return fail(errc::link_broken, "the link is not up");
  if (auto ok = check_posting(what, how); !ok) return ok;
  auto made = take_spare();
  const auto wire = last_wire_.fetch_add(1, std::memory_order_relaxed) + 1;
  const auto filled = fill_prepared(
      *made, what, how, wire, {.regions = regions_, .peer = options_.peer, .lanes = lanes_.size()});
  if (!filled) return fail(filled.error());
  if (!*filled) return link::post_prepared(what, how);
  made->parts()[0].lane = emptiest_lane();
  return start(made);
}

std::shared_ptr<batch_in_flight> tcp_link::take_spare() {
  {
    const std::lock_guard lock{batch_mutex_};
    for (auto at = spare_batches_.rbegin(); at != spare_batches_.rend(); ++at) {
      if (at->use_count() != 1) continue;  // its lane still has a reference
      // This copy synchronises with the last release of the other references.
      static_cast<void>(std::shared_ptr<batch_in_flight>{*at});
      std::swap(*at, spare_batches_.back());
      auto found = std::move(spare_batches_.back());
      spare_batches_.pop_back();
      found->renew();
      return found;
    }
  }
  auto made = std::make_shared<batch_in_flight>(1);
  made->reusable = true;
  return made;
}

void tcp_link::keep_spare(std::shared_ptr<batch_in_flight> batch) {
  if (batch->kept_bytes() > most_spare_bytes) return;
  const std::lock_guard lock{batch_mutex_};
  if (spare_batches_.size() < most_spare) spare_batches_.push_back(std::move(batch));
}

void tcp_link::take_in(std::shared_ptr<batch_in_flight> batch) {
  const auto wire = batch->wire;
  if (spare_nodes_.empty()) {
    batches_.emplace(wire, std::move(batch));
    return;
  }
  auto node = std::move(spare_nodes_.back());
  spare_nodes_.pop_back();
  node.key() = wire;
  node.mapped() = std::move(batch);
  batches_.insert(std::move(node));
}

std::shared_ptr<batch_in_flight> tcp_link::take_out(batch_map::iterator at) {
  auto node = batches_.extract(at);
  auto batch = std::move(node.mapped());
  if (spare_nodes_.size() < most_spare) spare_nodes_.push_back(std::move(node));
  return batch;
}

/// Admits the batch and hands it to its lanes.
result<void> tcp_link::start(const std::shared_ptr<batch_in_flight>& batch) {
  {
    const std::lock_guard lock{batch_mutex_};
    // Check again under the lock: `end` changes the state before it takes this lock to fail all
    // batches.
    if (!is_up()) return fail(errc::link_broken, "the link is not up");
    if (auto ok = ledger_.admit(batch->transfer); !ok) return ok;
    take_in(batch);
  }
  touch();
  if (batch->dir == direction::read && batch->bytes == 0) {
    static_cast<void>(part_done(batch->wire, batch->parts()[0].lane, std::nullopt, {}));
    return {};
  }
  for (auto& part : batch->parts()) {
    auto& lane = *lanes_[part.lane];
    std::shared_ptr<outgoing> job{batch, &part.job};
    if (batch->dir == direction::write) {
      if (part.staged) job->stage = lane.stage_for_write();
      lane.tx().push_write(std::move(job));
    } else {
      lane.tx().push_read_request(std::move(job));
    }
    flush(lane);
  }
  return {};
}

std::size_t tcp_link::emptiest_lane() const noexcept {
  std::size_t best = 0;
  for (std::size_t i = 1; i < lanes_.size(); ++i) {
    if (lanes_[i]->tx().queued_bytes() < lanes_[best]->tx().queued_bytes()) best = i;
  }
  return best;
}

void tcp_link::note_failure(std::uint64_t wire, std::size_t lane,
                            const std::optional<troupe::error>& failure,
                            std::span<const std::uint32_t> bad) {
  const std::lock_guard lock{batch_mutex_};
  const auto at = batches_.find(wire);
  if (at == batches_.end()) return;
  if (auto* part = at->second->part_on(lane)) add_failure(*at->second, *part, failure, bad);
}

void tcp_link::add_failure(batch_in_flight& batch, batch_part& part,
                           const std::optional<troupe::error>& failure,
                           std::span<const std::uint32_t> bad) {
  if (!failure) return;
  if (!batch.failure) batch.failure = failure;
  // A refused read may overtake data of other requests, so any segment of a read may be bad.
  const bool named_all =
      batch.dir == direction::write && !bad.empty() && bad.size() < max_bad_listed;
  if (!named_all) part.all_bad = true;
  for (const auto index : bad) {
    if (index < batch.segments) batch.bad.insert(index);  // comes from the peer, so check it
  }
}

result<std::shared_ptr<staging::copy_group>> tcp_link::part_done(
    std::uint64_t wire, std::size_t lane, const std::optional<troupe::error>& failure,
    std::span<const std::uint32_t> bad) {
  std::shared_ptr<batch_in_flight> batch;
  {
    const std::lock_guard lock{batch_mutex_};
    const auto at = batches_.find(wire);
    if (at == batches_.end()) return nullptr;  // already fenced
    auto* part = at->second->part_on(lane);
    if (part == nullptr || part->done) {
      return fail(errc::link_broken, "the peer broke the tcp protocol: it completed a part twice");
    }
    if (part->copies && !part->copies->idle()) return part->copies;
    add_failure(*at->second, *part, failure, bad);
    if (part->copies) add_failure(*at->second, *part, part->copies->failure(), {});
    part->done = true;
    if (--at->second->parts_left > 0) return nullptr;
    batch = take_out(at);
    close_books(*batch);
  }
  if (batch->dir == direction::read && !batch->failure && !batch->frame.empty()) {
    push_session(batch->frame);
  }
  auto done = batch->outcome();
  // Before its owner is told of its end and posts again.
  if (batch->reusable) keep_spare(std::move(batch));
  sink_.deliver(std::move(done));
  return nullptr;
}

std::shared_ptr<staging::copy_group> tcp_link::copies_of(std::uint64_t wire,
                                                         std::size_t lane) const {
  const std::lock_guard lock{batch_mutex_};
  const auto at = batches_.find(wire);
  const auto* part = at == batches_.end() ? nullptr : at->second->part_on(lane);
  return part == nullptr ? nullptr : part->copies;
}

void tcp_link::close_books(batch_in_flight& batch) {
  // A peer that reports the end too early finds the memory withdrawn. `revoke` may wait for pins
  // here: no thread that holds one waits for the batch lock.
  batch.guard.revoke();
  batch.memory.clear();
  ledger_.ended(!batch.failure);
}

}  // namespace troupe::transport::tcp
