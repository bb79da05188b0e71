#include <algorithm>
#include <string>

#include <sys/epoll.h>

#include "troupe/transport/tcp/tcp_link.hpp"

// Handles the frames received on one lane: the target's side of writes and reads, and the
// initiator's side of completions and read data.
namespace troupe::transport::tcp {

namespace {

unexpected against_protocol(const std::string& what) {
  return fail(errc::link_broken, "the peer broke the tcp protocol: " + what);
}

// Where one frame's entries lie in the granted region. Invalid if `failure` is set.
struct placed {
  std::vector<staging::memory_run> runs;
  std::optional<troupe::error> failure;
};

placed place(std::span<const std::byte> table, const given_grant& grant,
             std::vector<staging::memory_run> reused = {}) {
  placed out{.runs = std::move(reused), .failure = {}};
  out.runs.clear();
  out.runs.reserve(table.size() / entry_size);
  const auto gpu = grant.gpu.value_or(staging::memory_run::on_host);
  for (; !table.empty(); table = table.subspan(entry_size)) {
    const auto entry = decode_entry(table.first<entry_size>());
    const extent range{entry.offset, entry.length, entry.stride, entry.count};
    auto ok = entry.length == 0 || entry.count == 0
                  ? result<void>{fail(errc::out_of_range, "a segment of 0 bytes")}
                  : grant.check_place(range);
    if (!ok) {
      out.failure = std::move(ok).error();
      break;
    }
    out.runs.push_back({grant.base + entry.offset, entry.length, entry.stride, entry.count, gpu});
  }
  return out;
}

std::vector<std::uint32_t> indices(std::span<const std::byte> table) {
  std::vector<std::uint32_t> all;
  for (; !table.empty(); table = table.subspan(entry_size)) {
    all.push_back(decode_entry(table.first<entry_size>()).index);
  }
  return all;
}

// Why the peer did not send the data that we read. `status` comes from the peer and is not trusted.
troupe::error ended_by_peer(std::uint32_t status) {
  const auto code = static_cast<std::uint8_t>(std::min<std::uint32_t>(status, UINT8_MAX));
  const auto why = is_errc(code) ? static_cast<errc>(code) : errc::grant_revoked;
  if (why == errc::grant_revoked) {
    return {why, "the peer ended the transfer while it was read"};
  }
  return {why, "the peer could not read its memory (" + std::string{to_string(why)} + ")"};
}

bool ended(const std::shared_ptr<staging::copy_group>& copies) {
  return !copies || copies->idle();
}

// The guard is part of the grant, so the pointer keeps the grant alive.
std::shared_ptr<revocable> guard_of(const std::shared_ptr<given_grant>& grant) {
  return {grant, &grant->guard};
}

}  // namespace

tcp_lane::tcp_lane(tcp_link& owner, std::size_t number, owned_fd fd, watch_id watch)
    : owner_{owner},
      number_{number},
      fd_{std::move(fd)},
      watch_{watch},
      tx_{fd_.get(),
          owner.options_.post_batch_size > 0
              ? static_cast<std::size_t>(owner.options_.post_batch_size)
              : std::size_t{1024},
          [engine = &owner.engine_, watch](bool blocked) {
            engine->rearm(watch, blocked ? EPOLLIN | EPOLLOUT : EPOLLIN);
          }},
      rx_{fd_.get(), *this},
      stage_{owner.copies_} {}

result<landing> tcp_lane::on_begin(const frame_header& header, std::span<const std::byte> table) {
  if (!owner_.is_up()) return fail(errc::link_broken, "the link was closed");
  switch (header.type) {
    case frame_type::write: return begin_write(header, table);
    case frame_type::read_data: return begin_read_data(header);
    case frame_type::read_request:
      if (auto ok = serve_read(header, table); !ok) return fail(std::move(ok).error());
      return landing{};
    case frame_type::completion:
    case frame_type::session:
    case frame_type::cancel:
    case frame_type::goodbye: return landing{};
  }
  return against_protocol("unknown frame");
}

result<void> tcp_lane::on_end(const frame_header& header, std::span<const std::byte> session,
                              bool landed, const landing& where, std::uint32_t trailer_status) {
  switch (header.type) {
    case frame_type::write:
      // The table is no longer available. Segments refused at the frame's begin were named then.
      incoming_.unnamed = incoming_.unnamed || (where.guard && !landed);
      return end_write(header, session, landed, trailer_status);
    case frame_type::read_request: return {};
    case frame_type::read_data: {
      if (header.has(flag_end_of_request)) make_room_for_read();
      std::optional<troupe::error> failure;
      if (trailer_status != 0) {
        failure = ended_by_peer(trailer_status);
      }
      {
        const std::lock_guard lock{owner_.batch_mutex_};
        const auto at = owner_.batches_.find(header.batch);
        if (at == owner_.batches_.end()) return {};  // given up meanwhile
        auto* part = at->second->part_on(number_);
        if (part == nullptr) return {};
        part->cursor = where.cursor;
        tcp_link::add_failure(*at->second, *part, failure, {});
        if (!header.has(flag_last)) return {};
        if (part->left != 0 && !at->second->failure) {
          return against_protocol("a read ended before all its data came");
        }
      }
      return finish_part(header.batch, std::move(failure), {});
    }
    case frame_type::completion: return end_completion(header, session);
    case frame_type::session:
      owner_.ledger_.frame_received();
      owner_.sink_.frame(session);
      return {};
    case frame_type::cancel: tx_.give_up_replies(header.batch); return {};
    case frame_type::goodbye:
      said_goodbye_ = true;
      return fail(errc::link_broken, "the peer closed the link");
  }
  return against_protocol("unknown frame");
}

bool tcp_lane::must_flush() noexcept {
  const bool queued = std::exchange(acknowledged_, false);
  const bool at_once = std::exchange(urgent_, false) || deferring_ || !rx_.emptied();
  deferring_ = queued && !at_once;
  return at_once;
}

// -- target

result<void> tcp_lane::find_grant(const frame_header& header, access wanted) {
  if (!grant_ || grant_->id != header.grant) grant_ = owner_.grants_.find(header.grant);
  if (!grant_ || grant_->guard.revoked()) {
    grant_.reset();
    return fail(errc::grant_revoked, "the grant was revoked, or was never given on this link");
  }
  return grant_->check_use(wanted, transfer_id{header.transfer});
}

result<landing> tcp_lane::begin_write(const frame_header& header,
                                      std::span<const std::byte> table) {
  if (incoming_.batch != header.batch) {
    incoming_ = {.batch = header.batch, .failure = {}, .bad = {}, .unnamed = false, .copies = {}};
  }
  if (header.session_size > 0 && !header.has(flag_last)) {
    return against_protocol("a session frame before the end of its batch");
  }
  const auto refuse = [&](troupe::error why, std::vector<std::uint32_t> bad) {
    if (!incoming_.failure) incoming_.failure = std::move(why);
    const auto room = max_bad_listed - std::min(max_bad_listed, incoming_.bad.size());
    incoming_.unnamed = incoming_.unnamed || bad.size() > room;
    bad.resize(std::min(bad.size(), room));
    incoming_.bad.insert(incoming_.bad.end(), bad.begin(), bad.end());
    return landing{};
  };
  if (header.has(flag_aborted)) return refuse({errc::aborted, "the initiator gave it up"}, {});
  if (header.entries == 0) return landing{};
  if (auto ok = find_grant(header, access::write); !ok) {
    return refuse(std::move(ok).error(), indices(table));
  }
  auto where = place(table, *grant_, std::move(places_));
  places_ = std::move(where.runs);
  if (where.failure) return refuse(std::move(*where.failure), indices(table));
  auto there = landing{.guard = guard_of(grant_), .runs = places_, .cursor = {}};
  if (!grant_->gpu) return there;
  if (!incoming_.copies) incoming_.copies = std::make_shared<staging::copy_group>();
  there.stage = &stage_;
  there.group = incoming_.copies;
  there.memory = {&grant_->memory, 1};
  there.transfer = grant_->transfer;
  return there;
}

result<void> tcp_lane::end_write(const frame_header& header, std::span<const std::byte> session,
                                 bool landed, std::uint32_t trailer_status) {
  if (!landed && !incoming_.failure && incoming_.copies) {
    incoming_.failure = incoming_.copies->failure();
  }
  if (!landed && !incoming_.failure) {
    incoming_.failure =
        troupe::error{errc::grant_revoked, "the grant was revoked during the write"};
  }
  if (trailer_status != 0 && !incoming_.failure) {
    incoming_.failure = troupe::error{errc::aborted, "the initiator gave it up"};
  }
  if (!header.has(flag_last)) return {};
  auto part = std::exchange(incoming_, {});
  if (held_.empty() && ended(part.copies)) return finish_write(header, std::move(part), session);
  auto until = part.copies;
  hold(std::move(until), [this, header, part = std::move(part),
                          kept = std::vector<std::byte>{session.begin(), session.end()}]() mutable {
    return finish_write(header, std::move(part), kept);
  });
  return {};
}

// Ends a part whose data are all in place, or never will be.
result<void> tcp_lane::finish_write(const frame_header& header, incoming_part part,
                                    std::span<const std::byte> session) {
  if (part.copies) {
    if (auto why = part.copies->failure()) {
      part.unnamed = true;
      if (!part.failure) part.failure = std::move(why);
    }
  }
  if (part.unnamed) part.bad.clear();
  // Before delivering the session frame, so that its receiver's answer is sent together with this.
  if (auto ok = acknowledge(header, flag_last, part.failure, part.bad); !ok) return ok;
  const bool good = !part.failure.has_value();
  if (header.parts > 1) return owner_.gather(header, good, session);
  if (good && !session.empty()) {
    owner_.ledger_.frame_received();
    owner_.sink_.frame(session);
  }
  return {};
}

result<void> tcp_lane::serve_read(const frame_header& header, std::span<const std::byte> table) {
  const auto refuse = [&](const troupe::error& why, const std::vector<std::uint32_t>& bad) {
    const auto flags =
        static_cast<std::uint8_t>(flag_end_of_request | (header.has(flag_last) ? flag_last : 0));
    return acknowledge(header, flags, why, bad);
  };
  if (auto ok = find_grant(header, access::read); !ok) return refuse(ok.error(), indices(table));
  auto where = place(table, *grant_);
  if (where.failure) return refuse(*where.failure, indices(table));
  auto job = std::make_shared<outgoing>();
  job->type = frame_type::read_data;
  job->batch = header.batch;
  job->transfer = header.transfer;
  job->last = header.has(flag_last);
  job->bytes = staging::bytes_of(where.runs);
  job->grant = grant_;
  job->guard = &grant_->guard;
  job->memory = {&grant_->memory, 1};
  if (grant_->gpu) job->stage = std::make_unique<outgoing_stage>(owner_.copies_, reply_quota_);
  job->runs = std::move(where.runs);
  urgent_ = true;
  if (tx_.push_reply(std::move(job)) > max_open_reads) {
    return against_protocol("more reads wait than it may have open");
  }
  return {};
}

result<void> tcp_lane::acknowledge(const frame_header& about, std::uint8_t flags,
                                   const std::optional<troupe::error>& failure,
                                   const std::vector<std::uint32_t>& bad) {
  frame_header header{.type = frame_type::completion, .flags = flags, .batch = about.batch};
  std::vector<std::byte> body;
  if (failure) {
    owner_.refused_.fetch_add(1, std::memory_order_relaxed);
    header.status = static_cast<std::uint8_t>(failure->code);
    body = encode(completion_body{bad, failure->message});
    header.session_size = static_cast<std::uint32_t>(body.size());
  }
  std::array<std::byte, header_size> head{};
  encode(header, head.data());
  (failure ? urgent_ : acknowledged_) = true;
  if (tx_.push_control(head, body) > 2 * owner_.options_.max_queued_frame_bytes) {
    return against_protocol("it does not take its acknowledgements");
  }
  return {};
}

// -- initiator

void tcp_lane::make_room_for_read() {
  tx_.read_request_answered();
  urgent_ = true;  // another request may be sent
}

result<landing> tcp_lane::begin_read_data(const frame_header& header) {
  const std::lock_guard lock{owner_.batch_mutex_};
  const auto at = owner_.batches_.find(header.batch);
  if (at == owner_.batches_.end()) return landing{};  // given up meanwhile: drop the data
  auto* part = at->second->part_on(number_);
  if (part == nullptr || part->done || at->second->dir != direction::read) {
    return against_protocol("data for a batch that does not read on this lane");
  }
  if (header.data_size > part->left) return against_protocol("more data than was asked for");
  part->left -= header.data_size;
  // The guard is part of the batch, so the pointer keeps the runs alive.
  auto there = landing{
      .guard = {at->second, &at->second->guard}, .runs = part->job.runs, .cursor = part->cursor};
  if (!part->staged) return there;
  if (!part->copies) part->copies = std::make_shared<staging::copy_group>();
  there.stage = &stage_;
  there.group = part->copies;
  there.memory = at->second->memory;
  there.transfer = at->second->transfer;
  return there;
}

result<void> tcp_lane::end_completion(const frame_header& header,
                                      std::span<const std::byte> session) {
  if (header.has(flag_end_of_request)) make_room_for_read();
  auto body = decode_completion_body(session);
  if (!body) return against_protocol(body.error().message);
  std::optional<troupe::error> failure;
  if (header.status != 0) {
    failure =
        troupe::error{static_cast<errc>(header.status), "the peer refused: " + body->sentence};
  }
  if (header.has(flag_end_of_request) && !header.has(flag_last)) {
    // One of several requests of this batch failed; the last one's answer ends it.
    owner_.note_failure(header.batch, number_, failure, body->bad);
    return {};
  }
  return finish_part(header.batch, std::move(failure), std::move(body->bad));
}

// The peer has ended its part. Ours ends once the data that it sent are in place.
result<void> tcp_lane::finish_part(std::uint64_t batch, std::optional<troupe::error> failure,
                                   std::vector<std::uint32_t> bad) {
  std::shared_ptr<staging::copy_group> copies;
  if (held_.empty()) {
    auto waits = owner_.part_done(batch, number_, failure, bad);
    if (!waits) return fail(std::move(waits).error());
    copies = std::move(*waits);
    if (!copies) return {};
  } else {
    copies = owner_.copies_of(batch, number_);
  }
  hold(std::move(copies),
       [this, batch, failure = std::move(failure), bad = std::move(bad)]() -> result<void> {
         auto ended = owner_.part_done(batch, number_, failure, bad);
         return ended ? result<void>{} : fail(std::move(ended).error());
       });
  return {};
}

// -- memory of GPUs

std::unique_ptr<outgoing_stage> tcp_lane::stage_for_write() const {
  return std::make_unique<outgoing_stage>(owner_.copies_, write_quota_);
}

void tcp_lane::hold(std::shared_ptr<staging::copy_group> until,
                    std::function<result<void>()> then) {
  held_.push_back({std::move(until), std::move(then)});
}

result<bool> tcp_lane::finish_held_copies() {
  bool worked = false;
  while (!held_.empty() && ended(held_.front().until)) {
    const auto then = std::move(held_.front().then);
    held_.pop_front();
    if (auto ok = then(); !ok) return fail(std::move(ok).error());
    worked = true;
  }
  return worked;
}

}  // namespace troupe::transport::tcp
