#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "troupe/transport/rdma/rdma_link.hpp"
#include "troupe/transport/rdma/small_batch.hpp"

// Small batches (small_batch.hpp), on both sides.

namespace troupe::transport::rdma {

// -- ours

namespace {

/// Releases the regions on every exit path.
struct emptied_later {
  explicit emptied_later(std::vector<placed_piece>& of) : places{of} {}
  ~emptied_later() { places.clear(); }
  emptied_later(const emptied_later&) = delete;
  emptied_later& operator=(const emptied_later&) = delete;
  std::vector<placed_piece>& places;
};

}  // namespace

/// Returns false if this is no small batch: a processor does not reach all of its memory.
result<bool> rdma_link::post_small(const batch& work, std::uint32_t bytes) {
  // Usually only a few dozen bytes are used; do not clear it.
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-member-init)
  std::array<std::byte, message_channel::max_payload> buffer;
  std::optional<troupe::error> broken;
  {
    // A fence either waits for the lock until the local memory was read, or comes first.
    const std::lock_guard lock{mutex_};
    const emptied_later places{small_places_};
    std::optional<troupe::error> refused;
    small_flight flight{.id = work.id, .transfer = work.transfer, .bytes = bytes};
    for (std::size_t i = 0; i < work.pieces.size(); ++i) {
      auto placed = place(work, i, refused);
      if (!placed) return fail(std::move(placed).error());
      if (!placed->remote_is_host || placed->local->kind() != memory_kind::host) return false;
      flight.segments += static_cast<std::uint32_t>(work.pieces[i].segments.size());
      small_places_.push_back(std::move(*placed));
    }
    if (auto ok = admit(work, refused); !ok) return fail(std::move(ok).error());
    small_writer writer{bytes, buffer};
    for (std::size_t i = 0; i < work.pieces.size(); ++i) {
      const auto& from = small_places_[i];
      writer.add(work.pieces[i].segments, from.local->data(), from.grant);
    }
    const auto message = writer.end(work.transfer, work.frame);
    if (refused) {
      put_outcome(flight, std::move(refused));
    } else if (small_sent_.size() >= max_small_unanswered || !small_waiting_.empty()) {
      reserved_frame_bytes_ += message.size();
      small_waiting_.push_back({flight, {message.begin(), message.end()}});
    } else if (auto ok = send_small(flight, message); !ok) {
      broken = std::move(ok).error();
    }
  }
  if (broken) {
    break_link(std::move(*broken));
  } else {
    sink_.deliver();
  }
  return true;
}

/// Under the lock.
result<void> rdma_link::send_small(const small_flight& flight, std::span<const std::byte> message) {
  small_sent_.push_back(flight);
  ledger_.frame_sent();
  return messages_->send(message_kind::small, message, counts());
}

/// Under the lock.
result<void> rdma_link::send_waiting_small() {
  while (!small_waiting_.empty() && small_sent_.size() < max_small_unanswered) {
    const auto next = std::move(small_waiting_.front());
    small_waiting_.pop_front();
    reserved_frame_bytes_ -= next.message.size();
    if (auto ok = send_small(next.flight, next.message); !ok) return ok;
  }
  return {};
}

/// Under the lock.
completion rdma_link::conclude(const small_flight& flight, std::optional<troupe::error> why) {
  ledger_.ended(!why);
  if (!why) bytes_written_ += flight.bytes;
  return flight.outcome(std::move(why));
}

/// Under the lock.
void rdma_link::put_outcome(const small_flight& flight, std::optional<troupe::error> why) {
  sink_.put(conclude(flight, std::move(why)));
}

/// Under the lock: handles a message's answers to our small batches. Sets `first` to an outcome
/// that the caller must pass to `sink_queue::end`. `unauthorized`: more answers than small batches.
result<void> rdma_link::take_answers(const arrival& message, std::optional<completion>& first) {
  const auto answered = message.header.landed - small_answered_;
  const bool refused = message.header.kind == static_cast<std::uint8_t>(message_kind::refused);
  if (answered > small_sent_.size() || (refused && answered == 0)) {
    return against_protocol("it answered small writes that were not sent");
  }
  std::optional<troupe::error> why;
  if (refused) {
    auto said = decode_refusal(message.payload);
    if (!said) return fail(std::move(said).error());
    why = std::move(*said);
  }
  small_answered_ = message.header.landed;
  for (auto left = answered; left != 0; --left) {
    const auto flight = small_sent_.front();
    small_sent_.pop_front();
    if (flight.given_up) continue;
    auto outcome = conclude(flight, left == 1 ? std::exchange(why, std::nullopt) : std::nullopt);
    // With nothing queued before it, an outcome needs no place in the queue, nor the queue's lock.
    if (!first && sink_.try_begin()) {
      first = std::move(outcome);
    } else {
      sink_.put(std::move(outcome));
    }
    after_drained(flight.transfer);
  }
  return {};
}

/// Under the lock: ends the transfer's small batches that were not sent.
void rdma_link::cancel_small(transfer_id transfer, const troupe::error& why) {
  std::erase_if(small_waiting_, [&](const waiting_small& one) {
    if (one.flight.transfer != transfer) return false;
    reserved_frame_bytes_ -= one.message.size();
    put_outcome(one.flight, why);
    return true;
  });
}

/// Under the lock: ends the transfer's small batches that the target has not answered.
void rdma_link::abandon_small(transfer_id transfer, const troupe::error& why) {
  for (auto& flight : small_sent_) {
    if (flight.given_up || flight.transfer != transfer) continue;
    flight.given_up = true;
    put_outcome(flight, why);
  }
}

/// Under the lock: ends all small batches, since the link ends.
void rdma_link::end_small(const troupe::error& why) {
  for (const auto& flight : std::exchange(small_sent_, {})) {
    if (!flight.given_up) put_outcome(flight, why);
  }
  for (const auto& one : std::exchange(small_waiting_, {})) {
    reserved_frame_bytes_ -= one.message.size();
    put_outcome(one.flight, why);
  }
}

/// Under the lock: whether the transfer has small batches that the peer has not answered.
bool rdma_link::small_under_way(transfer_id transfer) const {
  return std::ranges::any_of(small_sent_, [&](const small_flight& flight) {
    return flight.transfer == transfer && !flight.given_up;
  });
}

// -- the peer's

/// Within `reading_` and under the lock, which a fence takes as well: small batches handled after
/// the fence are refused, also those already in the buffers. Returns the frame to deliver, or an
/// empty one.
result<std::span<const std::byte>> rdma_link::take_small(std::span<const std::byte> payload) {
  auto batch = small_batch::decode(payload);
  if (!batch) return fail(std::move(batch).error());
  const std::span<const std::byte> none;
  if (state_ != link_phase::up) return none;
  auto done = land(*batch);
  ++landed_;
  answers_due_.store(true, std::memory_order_relaxed);
  if (done) return batch->frame();
  ++refused_operations_;
  if (messages_->put_refusal(encode_refusal(done.error()), landed_)) return none;
  return against_protocol("it goes on with small writes and takes no answers");
}

/// Under the lock: lands all bytes of the batch, or none.
result<void> rdma_link::land(const small_batch& batch) {
  const given_grant* grant = nullptr;
  for (std::size_t i = 0; i < batch.runs(); ++i) {
    const auto run = batch.run(i);
    if (grant == nullptr || grant->id != run.grant) {
      const auto known = open_.find(run.grant);
      if (known == open_.end()) {
        return fail(errc::grant_revoked, "the target's grant is not, or no longer, given");
      }
      grant = &known->second->given;
      if (grant->memory->kind() != memory_kind::host) {
        return fail(errc::out_of_range, "the target's processor does not reach its memory");
      }
    }
    if (auto ok = grant->check_use(access::write, batch.transfer()); !ok) return ok;
    if (!grant->permitted.covers({run.offset, run.bytes, 0, 1})) {
      return fail(errc::out_of_range,
                  "offset " + std::to_string(run.offset) + ", length " + std::to_string(run.bytes) +
                      ", count 1, stride 0 is not within what the grant permits");
    }
  }
  const auto* from = batch.bytes().data();
  for (std::size_t i = 0; i < batch.runs(); ++i) {
    const auto run = batch.run(i);
    if (grant->id != run.grant) grant = &open_.find(run.grant)->second->given;
    std::memcpy(grant->base + run.offset, from, run.bytes);
    from += run.bytes;
  }
  return {};
}

}  // namespace troupe::transport::rdma
