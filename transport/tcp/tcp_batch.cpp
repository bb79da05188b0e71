#include "troupe/transport/tcp/tcp_batch.hpp"

#include <algorithm>

#include "troupe/transport/batch_check.hpp"

namespace troupe::transport::tcp {

namespace {

// A segment with everything needed to send or receive it.
struct flat_segment {
  staging::memory_run local;
  remote_run remote;
};

// Calls `f` with every segment that is not empty.
template <class F>
void for_each_segment(const batch& work, std::span<const region_use> memory, F f) {
  std::uint32_t index = 0;
  for (std::size_t p = 0; p < work.pieces.size(); ++p) {
    const auto gpu = memory[p]->gpu().value_or(staging::memory_run::on_host);
    for (const auto& s : work.pieces[p].segments) {
      if (s.length != 0 && s.count != 0) {
        f(flat_segment{{memory[p]->data() + s.local_offset, s.length, s.local_stride, s.count, gpu},
                       {work.pieces[p].remote->id, s.remote_offset, s.remote_stride, index}});
      }
      ++index;
    }
  }
}

void add(outgoing& job, const flat_segment& s) {
  job.runs.push_back(s.local);
  job.remote.push_back(s.remote);
  job.bytes += s.local.length * s.local.count;
}

// Cuts off and returns the first `bytes` of `s`, in whole repetitions if it has several (at least
// one then, otherwise never more than `bytes`); `s` becomes the rest.
flat_segment cut(flat_segment& s, std::uint64_t bytes) {
  auto front = s;
  if (s.local.count > 1) {
    const auto repetitions = bytes / s.local.length;
    if (repetitions > 0) {
      front.local.count = static_cast<std::uint32_t>(repetitions);
      s.local.count -= front.local.count;
      s.local.at += repetitions * s.local.stride;
      s.remote.offset += repetitions * s.remote.stride;
      return front;
    }
    front.local.count = 1;  // fewer bytes than one repetition: take one anyway
    s.local.count -= 1;
    s.local.at += s.local.stride;
    s.remote.offset += s.remote.stride;
    return front;
  }
  front.local.length = bytes;
  s.local.at += bytes;
  s.local.length -= bytes;
  s.remote.offset += bytes;
  return front;
}

std::uint64_t size_of(const flat_segment& s) noexcept {
  return s.local.length * s.local.count;
}

// Divides in order, so that each lane's share is as contiguous as the whole was.
std::vector<std::vector<flat_segment>> stripe(std::vector<flat_segment> all, std::uint64_t total,
                                              std::size_t parts) {
  std::vector<std::vector<flat_segment>> shares(parts);
  std::size_t part = 0;
  std::uint64_t done = 0;
  for (auto& s : all) {
    while (true) {
      const auto end = part + 1 == parts ? total : total / parts * (part + 1);
      if (done >= end && part + 1 < parts) {
        ++part;
        continue;
      }
      if (done + size_of(s) <= end) {
        done += size_of(s);
        shares[part].push_back(s);
        break;
      }
      auto front = cut(s, end - done);
      done += size_of(front);
      shares[part].push_back(front);
      if (s.local.count == 0 || s.local.length == 0) break;
    }
  }
  // Repetitions are not divided, so a lane may have got nothing.
  std::erase_if(shares, [](const auto& share) { return share.empty(); });
  return shares;
}

}  // namespace

completion batch_in_flight::outcome() const {
  completion done{
      .id = id, .transfer = transfer, .failure = failure, .bytes = 0, .bad_segments = {}};
  for (const auto& part : parts()) {
    if (part.done) done.bytes += part.job.bytes;
  }
  if (failure) {
    done.bytes = 0;
    done.bad_segments.assign(bad.begin(), bad.end());
    for (const auto& part : parts()) {
      if (part.done && !part.all_bad) continue;
      for (const auto& run : part.job.remote) done.bad_segments.push_back(run.index);
    }
    auto& all = done.bad_segments;
    std::ranges::sort(all);
    all.erase(std::unique(all.begin(), all.end()), all.end());
  }
  return done;
}

void batch_in_flight::renew() noexcept {
  bytes = 0;
  segments = 0;
  parts_left = 1;
  frame.clear();
  failure.reset();
  bad.clear();
  memory.clear();
  guard.renew();
  auto& part = parts_[0];
  part.cursor.reset();
  part.left = 0;
  part.lane = 0;
  part.done = part.all_bad = part.staged = false;
  part.copies.reset();
  auto& job = part.job;
  job.runs.clear();
  job.remote.clear();
  job.session.clear();
  job.stage.reset();
  job.bytes = 0;
  job.given_up.store(false, std::memory_order_relaxed);
  job.cursor.reset();
}

std::size_t batch_in_flight::kept_bytes() const noexcept {
  const auto& job = parts_[0].job;
  return job.runs.capacity() * sizeof job.runs[0] + job.remote.capacity() * sizeof job.remote[0] +
         job.session.capacity() + frame.capacity();
}

result<bool> fill_prepared(batch_in_flight& batch, const prepared_batch& what, const posting& how,
                           std::uint64_t wire, const plan_context& with) {
  const auto count = how.count(what);
  std::uint64_t bytes = 0;
  for (std::uint32_t i = 0; i < count; ++i) {
    const auto& one = *what.at(how.index(i)).what;
    bytes += one.length * one.count;
  }
  if (with.lanes > 1 && bytes >= 2 * with.min_stripe) return false;
  for (const auto& one : what.pieces()) {
    auto used = with.regions.use_by_way_of_host(one.local, backend_kind::tcp);
    if (!used) return fail(std::move(used).error());
    const bool on_gpu = (*used)->gpu().has_value();
    batch.memory.push_back(std::move(*used));
    if (!on_gpu) continue;
    batch.memory.clear();
    return false;
  }
  auto& part = batch.parts()[0];
  auto& job = part.job;
  for (std::uint32_t i = 0; i < count; ++i) {
    const auto at = what.at(how.index(i));
    const auto& one = *at.what;
    if (one.length == 0 || one.count == 0) continue;
    add(job, {{batch.memory[at.piece]->data() + one.local_offset, one.length, one.local_stride,
               one.count, staging::memory_run::on_host},
              {what.pieces()[at.piece].remote->id, one.remote_offset, one.remote_stride, i}});
  }
  job.type = what.dir() == direction::write ? frame_type::write : frame_type::read_request;
  job.batch = wire;
  job.transfer = how.transfer.value;
  job.parts = 1;
  job.guard = &batch.guard;
  job.memory = batch.memory;
  part.left = job.bytes;
  batch.wire = wire;
  batch.id = how.id;
  batch.transfer = how.transfer;
  batch.dir = what.dir();
  batch.bytes = bytes;
  batch.segments = count;
  (batch.dir == direction::write ? job.session : batch.frame)
      .assign(how.frame.begin(), how.frame.end());
  return true;
}

result<std::shared_ptr<batch_in_flight>> plan_batch(batch&& work, std::uint64_t wire,
                                                    const plan_context& with) {
  if (auto ok = check_batch(work); !ok) return fail(std::move(ok).error());
  std::vector<region_use> memory;
  memory.reserve(work.pieces.size());
  std::uint64_t bytes = 0;
  std::uint64_t segments = 0;
  bool on_gpus = false;
  for (std::size_t i = 0; i < work.pieces.size(); ++i) {
    auto used = with.regions.use_by_way_of_host(work.pieces[i].local, backend_kind::tcp);
    if (!used) return in_piece(i, std::move(used).error());
    if (auto ok = check_piece(work, i, with.peer, **used); !ok) return fail(std::move(ok).error());
    on_gpus = on_gpus || (*used)->gpu().has_value();
    memory.push_back(std::move(*used));
    bytes += total_bytes(work.pieces[i].segments);
    segments += work.pieces[i].segments.size();
    if (segments > UINT32_MAX) return fail(errc::out_of_range, "the batch has too many segments");
  }

  std::vector<std::vector<flat_segment>> shares;
  if (const auto lanes = std::clamp<std::uint64_t>(bytes / with.min_stripe, 1, with.lanes);
      lanes > 1) {
    std::vector<flat_segment> all;
    all.reserve(segments);
    for_each_segment(work, memory, [&](const flat_segment& s) { all.push_back(s); });
    shares = stripe(std::move(all), bytes, lanes);
  }
  auto flying = std::make_shared<batch_in_flight>(std::max<std::size_t>(shares.size(), 1));
  const auto parts = flying->parts();
  if (shares.empty()) {
    parts[0].job.runs.reserve(segments);
    parts[0].job.remote.reserve(segments);
    for_each_segment(work, memory, [&](const flat_segment& s) { add(parts[0].job, s); });
  }
  for (std::size_t lane = 0; lane < shares.size(); ++lane) {
    for (const auto& s : shares[lane]) add(parts[lane].job, s);
  }
  for (std::size_t lane = 0; lane < parts.size(); ++lane) {
    auto& job = parts[lane].job;
    job.type = work.dir == direction::write ? frame_type::write : frame_type::read_request;
    job.batch = wire;
    job.transfer = work.transfer.value;
    job.parts = static_cast<std::uint8_t>(parts.size());
    job.guard = &flying->guard;
    parts[lane].left = job.bytes;
    parts[lane].lane = lane;
    parts[lane].staged =
        on_gpus && std::ranges::any_of(job.runs, [](const staging::memory_run& run) {
          return run.gpu != staging::memory_run::on_host;
        });
  }
  flying->wire = wire;
  flying->id = work.id;
  flying->transfer = work.transfer;
  flying->dir = work.dir;
  flying->bytes = bytes;
  flying->segments = static_cast<std::uint32_t>(segments);
  flying->memory = std::move(memory);
  for (auto& part : parts) part.job.memory = flying->memory;
  (work.dir == direction::write ? parts.back().job.session : flying->frame) = std::move(work.frame);
  return flying;
}

}  // namespace troupe::transport::tcp
