#include <algorithm>
#include <array>
#include <bit>
#include <string>
#include <utility>

#include <arpa/inet.h>

#include "troupe/transport/batch_check.hpp"
#include "troupe/transport/rdma/rdma_link.hpp"

// The initiator's side: turns batches into requests and their completions into outcomes.

namespace troupe::transport::rdma {

namespace {

constexpr std::uint32_t request_bytes = std::uint32_t{256} << 10;
/// Bytes posted to a lane in one call, before the next lane has its turn. The NIC works on the
/// first call while the second is prepared; larger calls bring no measurable gain.
constexpr std::uint64_t stripe_bytes = std::uint64_t{256} << 10;
constexpr std::uint32_t requests_at_once = 32;
/// One in this many requests is signalled, and the last of each call.
constexpr std::uint32_t signal_every = 16;

}  // namespace

// -- checking

/// Sets `refused` if the request is valid but its grant is not valid on this link.
result<placed_piece> rdma_link::place(const batch& work, std::size_t index,
                                      std::optional<troupe::error>& refused) {
  const auto& piece = work.pieces[index];
  placed_piece made;
  auto local = regions_.use(piece.local);
  if (!local) return in_piece(index, std::move(local).error());
  made.local = std::move(*local);
  if (auto ok = check_piece(work, index, options_.peer, *made.local); !ok) return fail(ok.error());
  auto key = grant_key::decode(piece.remote->key);
  if (!key) return in_piece(index, std::move(key).error());
  if (key->link != peer_->link || key->grant != piece.remote->id) {
    refused = troupe::error{errc::grant_revoked, "piece " + std::to_string(index) +
                                                     ": its grant was not given on this link"};
  }
  made.grant = key->grant;
  made.remote_is_host = key->host == 1;
  return made;
}

result<std::unique_ptr<batch_in_flight>> rdma_link::prepare(batch work,
                                                            std::optional<troupe::error>& refused) {
  auto made = std::make_unique<batch_in_flight>();
  made->places.reserve(work.pieces.size());
  std::uint32_t segments = 0;
  for (std::size_t i = 0; i < work.pieces.size(); ++i) {
    auto placed = place(work, i, refused);
    if (!placed) return fail(std::move(placed).error());
    placed->first_segment = segments;
    segments += static_cast<std::uint32_t>(work.pieces[i].segments.size());
    made->places.push_back(std::move(*placed));
  }
  made->work = std::move(work);
  for (std::size_t i = 0; i < made->places.size(); ++i) {
    auto& place = made->places[i];
    auto registered = fabric_.keys->of(*place.local, reach_);
    if (!registered) return in_piece(i, std::move(registered).error());
    place.registered = *registered;
  }
  return made;
}

result<std::shared_ptr<const prepared_batch>> rdma_link::prepare(direction dir,
                                                                 std::vector<piece> pieces) {
  return prepare_checked(dir, std::move(pieces), options_.peer, regions_);
}

/// Under the lock. Sets `refused` if the peer has revoked the batch's grants.
result<void> rdma_link::admit(const batch& work, std::optional<troupe::error>& refused) {
  if (state_ != link_phase::up) return not_up(backend_kind::rdma, state_, why_ended_);
  const auto waiting = messages_->waiting_bytes() + reserved_frame_bytes_;
  if (!work.frame.empty() && waiting + work.frame.size() > options_.max_queued_frame_bytes) {
    return fail(errc::overloaded,
                "the peer does not take frames: " + std::to_string(waiting) + " bytes wait");
  }
  if (auto ok = ledger_.admit(work.transfer); !ok) return ok;
  const auto revoked = [&](const piece& one) { return revoked_.contains(one.remote->transfer); };
  if (!refused && (revoked_.contains(work.transfer) || std::ranges::any_of(work.pieces, revoked))) {
    refused =
        troupe::error{errc::grant_revoked, "the peer has revoked its grants for this transfer"};
  }
  return {};
}

result<void> rdma_link::post(batch work) {
  if (auto ok = check_batch(work); !ok) return ok;
  if (!up_.load(std::memory_order_acquire)) {
    const std::lock_guard lock{mutex_};
    if (state_ != link_phase::up) return not_up(backend_kind::rdma, state_, why_ended_);
  }
  if (const auto bytes = small_bytes_of(work, message_channel::max_payload); bytes != 0) {
    const auto went = post_small(work, bytes);
    if (!went) return fail(went.error());
    if (*went) return {};
  }
  std::optional<troupe::error> refused;
  auto prepared = prepare(std::move(work), refused);
  if (!prepared) return fail(std::move(prepared).error());
  std::optional<troupe::error> broken;
  {
    const std::lock_guard lock{mutex_};
    auto& batch = **prepared;
    if (auto ok = admit(batch.work, refused); !ok) return ok;
    batch.sequence = ++last_sequence_;
    reserved_frame_bytes_ += batch.work.frame.size();
    auto* at = &batch;
    batch.slot = active_.size();
    active_.push_back(std::move(*prepared));
    if (refused) {
      at->give_up(std::move(*refused));
      finish(*at);
    } else {
      start_or_wait(*at);
      if (auto ok = pump(); !ok) broken = ok.error();
    }
  }
  sink_.deliver();
  if (broken) break_link(std::move(*broken));
  return {};
}

result<void> rdma_link::send_frame(std::span<const std::byte> frame) {
  if (auto ok = check_frame(frame.size()); !ok) return ok;
  std::optional<troupe::error> broken;
  {
    const std::lock_guard lock{mutex_};
    if (state_ != link_phase::up) return not_up(backend_kind::rdma, state_, why_ended_);
    const auto waiting = messages_->waiting_bytes() + reserved_frame_bytes_;
    if (waiting > 0 && waiting + frame.size() > options_.max_queued_frame_bytes) {
      return fail(errc::overloaded,
                  "the peer does not take frames: " + std::to_string(waiting) + " bytes wait");
    }
    ledger_.frame_sent();
    auto sent = messages_->send(message_kind::frame, frame, counts());
    if (!sent) broken = sent.error();
  }
  if (broken) break_link(std::move(*broken));
  return {};
}

// -- requests

/// Under the lock: posts everything that waits, as far as there is room.
result<void> rdma_link::pump() {
  if (auto ok = post_window_requests(); !ok) return ok;
  // Before the batches, which could take all room.
  if (auto ok = settle_reads(); !ok) return ok;
  if (auto ok = send_waiting_small(); !ok) return ok;
  while (!queued_.empty()) {
    auto& batch = *queued_.front();
    auto all = post_requests(batch);
    if (!all) return fail(std::move(all).error());
    if (!*all) break;
    queued_.pop_front();
    if (batch.ended()) finish_drained(batch);
  }
  if (auto ok = settle_reads(); !ok) return ok;
  return flush();
}

/// Under the lock. Returns whether the whole batch is posted.
result<bool> rdma_link::post_requests(batch_in_flight& batch) {
  while (!batch.cut) {
    const auto lane = lane_with_room();
    if (!lane) return false;
    auto posted = post_chain(*lane, batch);
    if (!posted) return fail(std::move(posted).error());
  }
  return post_notices(batch);
}

std::optional<std::size_t> rdma_link::lane_with_room() const noexcept {
  if (bytes_on_the_way_ >= fabric_.options.window_bytes) return std::nullopt;
  std::optional<std::size_t> best;
  for (std::size_t i = 0; i < lanes_.size(); ++i) {
    if (lanes_[i].posted.size() >= lanes_[i].pair->depth()) continue;
    if (!best || lanes_[i].bytes < lanes_[*best].bytes) best = i;
  }
  return best;
}

/// Whether the target has room for the notice of one more batch.
bool rdma_link::may_notify() const noexcept {
  return notices_sent_ - notices_taken_ < peer_->notices;
}

/// Under the lock: posts the batch's next requests in one call, on a lane that has room, and
/// records them in `lane.posted`. Returns their number.
result<std::uint32_t> rdma_link::post_chain(std::size_t lane_number, batch_in_flight& batch) {
  auto& lane = lanes_[lane_number];
  const auto& rail = *fabric_.rails[lane.rail];
  const bool write = batch.work.dir == direction::write;
  const auto window = fabric_.options.window_bytes;
  const work_cursor::limits within{
      .bytes = std::min({request_bytes, rail.port_limits().max_msg_sz,
                         static_cast<std::uint32_t>(std::max<std::uint64_t>(window / 4, 4096))}),
      .runs = static_cast<std::uint32_t>(std::min<std::size_t>(max_runs, lane.pair->pieces()))};
  const auto at_once = std::min<std::uint32_t>(
      options_.post_batch_size > 0 ? static_cast<std::uint32_t>(options_.post_batch_size)
                                   : requests_at_once,
      requests_at_once);
  // 12 KiB, of which little is used; do not clear it each time.
  // NOLINTBEGIN(cppcoreguidelines-pro-type-member-init)
  std::array<ibv_send_wr, requests_at_once> works;
  std::array<std::array<ibv_sge, max_runs>, requests_at_once> runs;
  // NOLINTEND(cppcoreguidelines-pro-type-member-init)
  std::uint32_t count = 0;
  std::uint64_t bytes = 0;
  const auto first = lane.posted.size();
  while (count < at_once && lane.posted.size() < lane.pair->depth() && bytes < stripe_bytes &&
         bytes_on_the_way_ + bytes < window) {
    remote_run run;
    const placed_piece* place = nullptr;
    if (!batch.next(within, run, place)) {
      batch.cut = true;
      break;
    }
    auto& work = works[count];
    work = {};
    const auto& here = *place->registered;
    for (std::uint32_t i = 0; i < run.runs; ++i) {
      const auto piece = here.piece_at(run.local[i].address - here.address());
      runs[count][i] = {run.local[i].address, run.local[i].bytes, here.local_key(piece, lane.rail)};
    }
    work.wr_id =
        work_id(work_kind::data, static_cast<std::uint8_t>(lane_number), ++lane.last_number);
    work.sg_list = runs[count].data();
    work.num_sge = static_cast<int>(run.runs);
    work.opcode = write ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ;
    work.wr.rdma.remote_addr = run.address;
    work.wr.rdma.rkey = place->remote->key_at(run.address - place->remote->address, lane_number);
    // The processor copies inline data, and cannot read device memory.
    if (write && run.bytes <= lane.pair->inline_bytes() &&
        place->local->kind() == memory_kind::host) {
      work.send_flags |= IBV_SEND_INLINE;
    }
    if (lane.last_number % signal_every == 0) work.send_flags |= IBV_SEND_SIGNALED;
    if (count != 0) works[count - 1].next = &work;
    lane.posted.push_back({lane.last_number, &batch, nullptr, run.bytes,
                           place->first_segment + run.first_segment,
                           place->first_segment + run.last_segment});
    bytes += run.bytes;
    ++count;
  }
  if (!batch.cut && batch.at_end()) batch.cut = true;
  if (count == 0) {
    if (batch.cut && batch.has_notice()) batch.notices_left = batch.lanes;
    return 0;
  }
  batch.lanes |= std::uint64_t{1} << lane_number;
  works[count - 1].send_flags |= IBV_SEND_SIGNALED;
  if (batch.cut && batch.has_notice()) {
    batch.notices_left = batch.lanes;
    if (batch.lanes == std::uint64_t{1} << lane_number && may_notify()) {
      works[count - 1].opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
      works[count - 1].imm_data = htonl(batch.sequence);
      batch.notices_left = 0;
      batch.notified = true;
      ++notices_sent_;
    }
  }
  ibv_send_wr* bad = nullptr;
  if (const int why = ::ibv_post_send(lane.pair->get(), works.data(), &bad); why != 0) {
    // How many requests the NIC accepted is unknown: the link ends, and with it all of them.
    batch.outstanding += static_cast<std::uint32_t>(lane.posted.size() - first);
    return refused_by_nic(why);
  }
  batch.outstanding += count;
  lane.bytes += bytes;
  bytes_on_the_way_ += bytes;
  return count;
}

/// Under the lock. Returns whether the notice, if the batch has one, is posted completely.
result<bool> rdma_link::post_notices(batch_in_flight& batch) {
  if (!batch.has_notice() || batch.told) return true;
  if (batch.lanes == 0) {
    messages_->put(message_kind::frame, batch.work.frame);
    ledger_.frame_sent();
    batch.told = true;
    return true;
  }
  if (!batch.notified) {
    if (!may_notify()) return false;
    batch.notified = true;
    ++notices_sent_;
  }
  for (std::size_t i = 0; i < lanes_.size(); ++i) {
    const auto bit = std::uint64_t{1} << i;
    auto& lane = lanes_[i];
    if ((batch.notices_left & bit) == 0) continue;
    if (lane.posted.size() >= lane.pair->depth()) return false;
    ibv_send_wr work{};
    work.wr_id = work_id(work_kind::data, static_cast<std::uint8_t>(i), ++lane.last_number);
    work.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
    work.imm_data = htonl(batch.sequence);
    work.send_flags = IBV_SEND_SIGNALED;
    ibv_send_wr* bad = nullptr;
    if (const int why = ::ibv_post_send(lane.pair->get(), &work, &bad); why != 0) {
      return refused_by_nic(why);
    }
    lane.posted.push_back({lane.last_number, &batch, nullptr, 0, 1, 0});
    ++batch.outstanding;
    batch.notices_left &= ~bit;
  }
  messages_->put(message_kind::notice, batch.work.frame, batch.sequence,
                 static_cast<std::uint16_t>(std::popcount(batch.lanes)));
  ledger_.frame_sent();
  batch.told = true;
  return true;
}

/// Under the lock: removes the batch and queues its outcome for the sink.
void rdma_link::finish(batch_in_flight& batch) {
  const auto slot = batch.slot;
  const auto ended = std::move(active_[slot]);
  if (slot + 1 != active_.size()) {
    active_[slot] = std::move(active_.back());
    active_[slot]->slot = slot;
  }
  active_.pop_back();
  reserved_frame_bytes_ -= ended->work.frame.size();
  if (!ended->failure && ended->work.dir == direction::read && !ended->work.frame.empty()) {
    messages_->put(message_kind::frame, ended->work.frame);
    ledger_.frame_sent();
  }
  (ended->work.dir == direction::write ? bytes_written_ : bytes_read_) += ended->done;
  if (ended->work.dir == direction::read) {
    note_reads(ended->work.transfer, ended->lanes);
    for (const auto& one : ended->work.pieces) note_reads(one.remote->transfer, ended->lanes);
  }
  ledger_.ended(!ended->failure);
  ended->places.clear();
  sink_.put(ended->outcome());
}

}  // namespace troupe::transport::rdma
