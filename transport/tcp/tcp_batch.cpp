#include "troupe/transport/tcp/tcp_batch.hpp"

#include <algorithm>
#include <string>

namespace troupe::transport::tcp {

namespace {

// A segment with everything that is needed to send or receive it.
struct flat_segment {
  memory_run local;
  remote_run remote;
};

std::string name_of(std::size_t piece, std::size_t segment) {
  return "piece " + std::to_string(piece) + ", segment " + std::to_string(segment) + ": ";
}

result<void> check_piece(const piece& p, std::size_t number, const batch& work,
                         const plan_context& with, const region& local) {
  const auto where = "piece " + std::to_string(number) + ": ";
  if (!p.remote) return fail(errc::invalid_config, where + "it names no grant");
  if (p.remote->owner != with.peer) {
    return fail(errc::stale_incarnation, where + "the grant belongs to another life of the peer");
  }
  if (p.remote->transfer != work.transfer) {
    return fail(errc::unauthorized, where + "the grant was given for another transfer");
  }
  const auto wanted = work.dir == direction::write ? access::write : access::read;
  if (!permits(p.remote->rights, wanted)) {
    return fail(errc::unauthorized, where + "the grant does not permit to " +
                                        (wanted == access::write ? "write" : "read"));
  }
  if (auto ok = check_local(p.segments, local.size()); !ok) {
    return fail(errc::out_of_range, where + ok.error().message + " (local region " +
                                        std::to_string(p.local.value) + ")");
  }
  if (auto ok = check_remote(p.segments, p.remote->region_size); !ok) {
    return fail(errc::out_of_range, where + ok.error().message + " (remote region)");
  }
  for (std::size_t i = 0; i < p.segments.size(); ++i) {
    const auto& s = p.segments[i];
    if (s.length == 0 || s.count == 0) continue;
    if (!covered({s.remote_offset, s.length, s.remote_stride, s.count}, p.remote->extents)) {
      return fail(errc::out_of_range,
                  name_of(number, i) + "it is not within what the grant permits");
    }
  }
  return {};
}

void flatten(const piece& p, const region& local, std::uint32_t first_index,
             std::vector<flat_segment>& out) {
  for (std::size_t i = 0; i < p.segments.size(); ++i) {
    const auto& s = p.segments[i];
    if (s.length == 0 || s.count == 0) continue;
    out.push_back({{local.data() + s.local_offset, s.length, s.local_stride, s.count},
                   {p.remote->id, s.remote_offset, s.remote_stride,
                    first_index + static_cast<std::uint32_t>(i)}});
  }
}

// The first `bytes` of `s`, at most and as whole repetitions where that is possible; `s` becomes
// the rest.
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
    front.local.count = 1;  // the share is smaller than one repetition: take that one
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
  if (parts == 1) {
    shares[0] = std::move(all);
    return shares;
  }
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
  // Large repetitions are not divided: a lane may have got nothing.
  std::erase_if(shares, [](const auto& share) { return share.empty(); });
  return shares;
}

}  // namespace

completion flying_batch::outcome() const {
  completion done{
      .id = id, .transfer = transfer, .failure = failure, .bytes = 0, .bad_segments = {}};
  for (const auto& part : parts) {
    if (part.done) done.bytes += part.bytes;
  }
  if (failure) {
    done.bytes = 0;
    done.bad_segments.assign(bad.begin(), bad.end());
  }
  return done;
}

result<planned_batch> plan_batch(batch&& work, std::uint64_t wire, const plan_context& with) {
  auto flying = std::make_shared<flying_batch>();
  flying->wire = wire;
  flying->id = work.id;
  flying->transfer = work.transfer;
  flying->dir = work.dir;
  std::vector<flat_segment> all;
  std::uint64_t segments = 0;
  for (std::size_t i = 0; i < work.pieces.size(); ++i) {
    const auto& p = work.pieces[i];
    auto memory = with.regions.use(p.local);
    if (!memory) {
      return fail(memory.error().code,
                  "piece " + std::to_string(i) + ": " + memory.error().message);
    }
    if (auto ok = check_piece(p, i, work, with, **memory); !ok) return fail(std::move(ok).error());
    if (segments + p.segments.size() > UINT32_MAX) {
      return fail(errc::out_of_range, "the batch has too many segments");
    }
    if (all.empty()) all.reserve(p.segments.size());
    flatten(p, **memory, static_cast<std::uint32_t>(segments), all);
    segments += p.segments.size();
    flying->bytes += total_bytes(p.segments);
    flying->memory.push_back(std::move(*memory));
  }
  flying->segments = static_cast<std::uint32_t>(segments);

  const auto parts = std::clamp<std::uint64_t>(flying->bytes / with.min_stripe, 1, with.lanes);
  planned_batch plan{.batch = flying, .jobs = {}};
  auto shares = stripe(std::move(all), flying->bytes, parts);
  for (std::size_t lane = 0; lane < shares.size(); ++lane) {
    auto runs = std::make_shared<std::vector<memory_run>>();
    auto job = std::make_shared<outgoing>();
    runs->reserve(shares[lane].size());
    job->remote.reserve(shares[lane].size());
    for (const auto& s : shares[lane]) {
      runs->push_back(s.local);
      job->remote.push_back(s.remote);
      job->bytes += size_of(s);
    }
    job->type = work.dir == direction::write ? frame_type::write : frame_type::read_request;
    job->batch = wire;
    job->transfer = work.transfer.value;
    job->parts = static_cast<std::uint8_t>(shares.size());
    job->guard = flying->guard;
    job->runs = runs;
    flying->parts.push_back(
        {.runs = runs, .cursor = {}, .bytes = job->bytes, .left = job->bytes, .lane = lane});
    plan.jobs.push_back(std::move(job));
  }
  flying->parts_left = flying->parts.size();
  if (work.dir == direction::write) {
    plan.jobs.back()->session = std::move(work.frame);
  } else {
    flying->frame = std::move(work.frame);
  }
  return plan;
}

}  // namespace troupe::transport::tcp
