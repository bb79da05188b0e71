#include "troupe/transport/rdma/message_channel.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <numeric>
#include <utility>

#include <sys/mman.h>

#include "troupe/transport/os_error.hpp"
#include "troupe/transport/rdma/small_batch.hpp"

namespace troupe::transport::rdma {

namespace {

constexpr std::size_t memory_bytes =
    std::size_t{2} * message_channel::buffers * message_channel::buffer_bytes;
constexpr std::uint32_t inline_message = 220;
/// One in this many sends is signalled, so that their buffers come back in time.
constexpr std::uint64_t signal_frames_every = message_channel::buffers / 4;
/// The last credit is reserved for a message that returns credits.
constexpr std::uint32_t reserved_credits = 1;

/// Whether the message is neither frame nor notice: the link does not count its bytes.
bool is_word(const message_header& header) {
  return header.kind != static_cast<std::uint8_t>(message_kind::frame) &&
         header.kind != static_cast<std::uint8_t>(message_kind::notice);
}

unexpected refused(const char* what, int why) {
  return fail(errc::link_broken,
              std::string{"the NIC refused to "} + what + ": " + what_errno(why));
}

}  // namespace

result<std::unique_ptr<message_channel>> message_channel::create(const std::shared_ptr<device>& on,
                                                                 completion_queue& completions) {
  std::unique_ptr<message_channel> made{new message_channel};
  made->device_ = on;
  auto* memory =
      ::mmap(nullptr, memory_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return refused("find memory for messages", errno);
  made->memory_ = memory;
  constexpr int rights = IBV_ACCESS_LOCAL_WRITE;  // no remote access
  made->registered_.reset(::ibv_reg_mr(on->domain(), memory, memory_bytes, rights));
  if (!made->registered_) return refused("register memory for messages", errno);
  auto pair = queue_pair::create(
      on, completions,
      {.sends = buffers + 1, .receives = buffers, .pieces = 1, .inline_bytes = inline_message});
  if (!pair) return fail(std::move(pair).error());
  made->pair_ = std::move(*pair);
  return made;
}

message_channel::~message_channel() {
  pair_.reset();  // nothing is sent from or received into the memory any more
  registered_.reset();
  if (memory_ != nullptr) ::munmap(memory_, memory_bytes);
}

result<void> message_channel::start(const queue_pair::far_end& peer, std::uint32_t credits,
                                    const rdma_options& options) {
  if (auto ok = pair_->reset(options); !ok) return ok;
  waiting_.clear();
  waiting_bytes_ = 0;
  waiting_words_ = 0;
  sent_ = completed_ = 0;
  owed_ = 0;
  probing_ = false;
  credits_ = credits;
  told_ = {};
  refusals_.clear();
  refused_.reset();
  std::array<std::uint32_t, buffers> all{};
  std::iota(all.begin(), all.end(), 0U);
  if (auto ok = release(all); !ok) return ok;
  owed_ = 0;
  return pair_->join(peer, options);
}

std::byte* message_channel::send_buffer(std::uint64_t number) const noexcept {
  return static_cast<std::byte*>(memory_) + (buffers + number % buffers) * buffer_bytes;
}

std::byte* message_channel::receive_buffer(std::uint32_t index) const noexcept {
  return static_cast<std::byte*>(memory_) + std::size_t{index} * buffer_bytes;
}

result<void> message_channel::release(std::span<const std::uint32_t> indices) {
  // Usually only one entry is used; do not clear them all.
  // NOLINTBEGIN(cppcoreguidelines-pro-type-member-init)
  std::array<ibv_recv_wr, buffers> works;
  std::array<ibv_sge, buffers> pieces;
  // NOLINTEND(cppcoreguidelines-pro-type-member-init)
  std::size_t count = 0;
  for (const auto index : indices.first(std::min<std::size_t>(indices.size(), buffers))) {
    pieces[count] = {reinterpret_cast<std::uintptr_t>(receive_buffer(index)), buffer_bytes,
                     registered_->lkey};
    works[count] = {.wr_id = work_id(work_kind::message_receive, 0, index),
                    .next = nullptr,
                    .sg_list = &pieces[count],
                    .num_sge = 1};
    if (count != 0) works[count - 1].next = &works[count];
    ++count;
  }
  if (count == 0) return {};
  ibv_recv_wr* bad = nullptr;
  if (const int why = ::ibv_post_recv(pair_->get(), works.data(), &bad); why != 0) {
    return refused("take buffers for messages", why);
  }
  owed_ += static_cast<std::uint32_t>(count);
  return {};
}

void message_channel::put(message_kind kind, std::span<const std::byte> payload,
                          std::uint32_t sequence, std::uint16_t parts) {
  outgoing made;
  made.header.kind = static_cast<std::uint8_t>(kind);
  made.header.sequence = sequence;
  made.header.parts = parts;
  made.payload.assign(payload.begin(), payload.end());
  waiting_bytes_ += payload.size();
  if (is_word(made.header)) ++waiting_words_;
  waiting_.push_back(std::move(made));
}

result<void> message_channel::send(message_kind kind, std::span<const std::byte> payload,
                                   const message_counts& counts) {
  if (!waiting_.empty() || payload.size() > max_payload || !room() ||
      credits_ <= reserved_credits) {
    put(kind, payload);
    return flush(counts);
  }
  message_header header;
  header.kind = static_cast<std::uint8_t>(kind);
  return send_part(header, payload, counts, false);
}

bool message_channel::put_refusal(std::span<const std::byte> why, std::uint32_t landed) {
  if (refusals_.size() >= max_small_unanswered) return false;
  put(message_kind::refused, why);
  refusals_.push_back(landed);
  return true;
}

result<void> message_channel::send_part(message_header header, std::span<const std::byte> payload,
                                        const message_counts& counts, bool signalled) {
  if (refused_) return fail(*refused_);
  header.bytes = static_cast<std::uint16_t>(payload.size());
  header.credits = static_cast<std::uint16_t>(owed_);
  header.taken = counts.taken;
  header.landed = counts.landed;
  if (!refusals_.empty()) {
    header.landed = refusals_.front();
    if (header.kind == static_cast<std::uint8_t>(message_kind::refused)) {
      refusals_.pop_front();
    } else {
      --header.landed;
    }
  }
  auto* at = send_buffer(sent_);
  std::memcpy(at, &header, sizeof header);
  if (!payload.empty()) std::memcpy(at + sizeof header, payload.data(), payload.size());
  ibv_sge piece{reinterpret_cast<std::uintptr_t>(at),
                static_cast<std::uint32_t>(sizeof header + payload.size()), registered_->lkey};
  ibv_send_wr work{};
  work.wr_id = work_id(work_kind::message_send, 0, sent_);
  work.sg_list = &piece;
  work.num_sge = 1;
  work.opcode = IBV_WR_SEND;
  if (signalled || sent_ % signal_frames_every == signal_frames_every - 1)
    work.send_flags = IBV_SEND_SIGNALED;
  if (piece.length <= pair_->inline_bytes()) work.send_flags |= IBV_SEND_INLINE;
  ibv_send_wr* bad = nullptr;
  if (const int why = ::ibv_post_send(pair_->get(), &work, &bad); why != 0) {
    refused_ = refused("send a message", why).value;
    return fail(*refused_);
  }
  ++sent_;
  --credits_;
  owed_ = 0;
  told_ = {header.taken, header.landed};
  return {};
}

result<void> message_channel::flush(const message_counts& counts) {
  while (!waiting_.empty() && room() && credits_ > reserved_credits) {
    auto& front = waiting_.front();
    const auto left = front.payload.size() - front.done;
    const auto bytes = std::min<std::size_t>(left, max_payload);
    auto header = front.header;
    if (bytes < left) header.flags |= flag_more;
    const bool last_word = header.kind == static_cast<std::uint8_t>(message_kind::bye);
    if (auto ok = send_part(header, std::span{front.payload}.subspan(front.done, bytes), counts,
                            last_word);
        !ok) {
      return ok;
    }
    front.done += bytes;
    if (front.done < front.payload.size()) continue;
    waiting_bytes_ -= front.payload.size();
    if (is_word(front.header)) --waiting_words_;
    waiting_.pop_front();
  }
  if (waiting_words_ > max_waiting) {
    return fail(errc::link_broken, "the peer takes no messages: " + std::to_string(waiting_words_) +
                                       " wait for it to make room");
  }
  if (owed_ >= buffers / 2 && room() && credits_ > 0) {
    message_header header;
    header.kind = static_cast<std::uint8_t>(message_kind::credit);
    return send_part(header, {}, counts, false);
  }
  return {};
}

result<bool> message_channel::probe() {
  if (probing_) return true;
  if (sent_ - completed_ > buffers) return false;
  ibv_send_wr work{};
  work.wr_id = work_id(work_kind::message_send, 0, sent_);
  work.opcode = IBV_WR_RDMA_WRITE;  // of zero bytes: no key is checked (C9-88)
  work.send_flags = IBV_SEND_SIGNALED;
  ibv_send_wr* bad = nullptr;
  if (const int why = ::ibv_post_send(pair_->get(), &work, &bad); why != 0) {
    return refused("ask whether the peer is there", why);
  }
  probing_ = true;
  probe_number_ = sent_++;
  return true;
}

void message_channel::sent_until(std::uint64_t number) noexcept {
  completed_ = number + 1;
  if (probing_ && completed_ > probe_number_) probing_ = false;
}

result<arrival> message_channel::received(std::uint32_t index, std::uint32_t bytes) const {
  arrival made;
  const auto* at = receive_buffer(index);
  if (bytes < sizeof made.header) {
    return fail(errc::unauthorized, "the rdma peer sent a message of " + std::to_string(bytes) +
                                        " bytes, a header has " +
                                        std::to_string(sizeof made.header));
  }
  std::memcpy(&made.header, at, sizeof made.header);
  if (made.header.bytes != bytes - sizeof made.header) {
    return fail(errc::unauthorized, "the rdma peer says " + std::to_string(made.header.bytes) +
                                        " bytes of payload and sent " +
                                        std::to_string(bytes - sizeof made.header));
  }
  made.payload = {at + sizeof made.header, made.header.bytes};
  return made;
}

}  // namespace troupe::transport::rdma
