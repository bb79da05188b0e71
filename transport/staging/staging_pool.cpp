#include "troupe/transport/staging/staging_pool.hpp"

#include <algorithm>
#include <cstring>

#include "troupe/transport/wire_access.hpp"

namespace troupe::transport::staging {

namespace {

constexpr std::size_t chunks_at_once = 8;
/// Runs of at least so many bytes use the copy engine: at this size it costs no more to start than
/// a kernel, and it leaves the GPU's compute units alone.
constexpr std::uint64_t least_engine_bytes = std::uint64_t{256} << 10;

/// Appends a segment for the bytes at the cursor, at most `bytes`, between the run's memory and
/// offset `at` of the chunk. Contiguous runs are merged into one segment. Returns the number of
/// bytes.
std::uint64_t add_segment(std::vector<segment>& segments, const memory_run& run,
                          const run_cursor& here, std::uint64_t at, std::uint64_t bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(run.at) + here.repetition() * run.stride;
  if (here.offset() == 0 && run.length <= bytes && run.count - here.repetition() > 1) {
    const auto count = static_cast<std::uint32_t>(
        std::min<std::uint64_t>(run.count - here.repetition(), bytes / run.length));
    if (count > 1) {
      segments.push_back({address, at, run.length, run.stride, run.length, count});
      return run.length * count;
    }
  }
  const auto length = std::min(run.length - here.offset(), bytes);
  const auto begin = address + here.offset();
  if (!segments.empty()) {
    auto& last = segments.back();
    if (last.count == 1 && last.local_offset + last.length == begin) {
      last.length += length;
      return length;
    }
  }
  segments.push_back({begin, at, length, 0, 0, 1});
  return length;
}

}  // namespace

void staging_chunk::release() noexcept {
  if (!from_) return;
  from_->take_back(memory_);
  quota_->give_back();
  quota_.reset();
  from_.reset();
}

staging_pool::staging_pool(std::shared_ptr<xgmi::gpu_site> site, xgmi_options options)
    : site_{std::move(site)},
      options_{std::move(options)},
      lanes_{std::make_unique<xgmi::copy_lanes>(*site_->runtime)} {}

staging_pool::~staging_pool() {
  lanes_.reset();  // first: they wait for the copies that use the chunks
  for (const auto& slab : slabs_) site_->runtime->release_pinned(slab);
}

result<void> staging_pool::prepare_streams(std::uint32_t gpu) {
  if (auto here = site_->runtime->state(); !here.usable) {
    return fail(errc::backend_unavailable, std::move(here.reason));
  }
  if (auto lanes = lanes_->on(gpu); !lanes) return fail(std::move(lanes).error());
  return {};
}

result<void> staging_pool::prepare(std::uint32_t gpu) {
  if (auto ok = prepare_streams(gpu); !ok) return ok;
  const std::lock_guard lock{mutex_};
  gpu_ = gpu;
  return slabs_.empty() ? add_chunks(gpu) : result<void>{};
}

/// Under the lock.
result<void> staging_pool::add_chunks(std::uint32_t gpu) {
  auto slab = site_->runtime->allocate_pinned(gpu, chunk_size * chunks_at_once);
  if (!slab) return fail(std::move(slab).error());
  slabs_.push_back(*slab);
  free_.reserve(slabs_.size() * chunks_at_once);  // so that `take_back` needs no memory
  for (std::size_t i = 0; i < chunks_at_once; ++i) {
    free_.push_back(
        {slab->host + i * chunk_size, slab->device_address + i * chunk_size, chunk_size});
  }
  return {};
}

result<staging_chunk> staging_pool::lend(const std::shared_ptr<chunk_quota>& quota, bool& starved) {
  if (!quota->take()) return staging_chunk{};
  const std::lock_guard lock{mutex_};
  if (free_.empty()) {
    if (auto ok = add_chunks(gpu_); !ok) {
      quota->give_back();
      if (lent_ == 0) return fail(std::move(ok).error());
      starved = true;
      return staging_chunk{};
    }
  }
  const auto memory = free_.back();
  free_.pop_back();
  ++lent_;
  return staging_chunk{shared_from_this(), quota, memory};
}

void staging_pool::take_back(const xgmi::pinned_memory& memory) noexcept {
  const std::lock_guard lock{mutex_};
  free_.push_back(memory);
  --lent_;
}

staging_pool::started staging_pool::copy(direction dir, std::span<const memory_run> runs,
                                         run_cursor from, std::uint64_t bytes,
                                         const staging_chunk& chunk) {
  started made;
  std::vector<segment> segments;
  std::uint64_t at = 0;
  while (at < bytes && from.run() < runs.size()) {
    const auto gpu = runs[from.run()].gpu;
    const auto first = at;
    segments.clear();
    while (at < bytes && from.run() < runs.size() && runs[from.run()].gpu == gpu) {
      const auto step = add_segment(segments, runs[from.run()], from, at, bytes - at);
      from.advance(runs, step);
      at += step;
    }
    if (gpu == memory_run::on_host) {
      const wire_access access;
      for (const auto& s : segments) {
        for (std::uint32_t i = 0; i < s.count; ++i) {
          auto* const memory = reinterpret_cast<std::byte*>(s.local_offset + i * s.local_stride);
          auto* const staged = chunk.bytes().data() + s.remote_offset + i * s.remote_stride;
          dir == direction::write ? std::memcpy(staged, memory, s.length)
                                  : std::memcpy(memory, staged, s.length);
        }
      }
      continue;
    }
    auto flown = launch(dir, gpu, segments, at - first, chunk, made.flights);
    if (flown) continue;
    made.failure = std::move(flown).error();
    return made;
  }
  return made;
}

result<void> staging_pool::launch(direction dir, std::uint32_t gpu,
                                  std::span<const segment> segments, std::uint64_t bytes,
                                  const staging_chunk& chunk, std::vector<xgmi::flight>& flights) {
  auto lanes = lanes_->on(gpu);
  if (!lanes) return fail(std::move(lanes).error());
  xgmi::batch_launch::plan how;
  how.copy_blocks = options_.copy_blocks;
  how.engine_bytes = std::min(options_.engine_bytes, least_engine_bytes);
  how.bulk = options_.bulk && site_->runtime->devices()[gpu].bulk_copies;
  how.total = bytes;
  how.segments = segments.size();
  xgmi::batch_launch launch{**lanes, how};
  // Run addresses in the segments are absolute (base 0); chunk offsets count from its GPU address.
  launch.add(dir, nullptr, reinterpret_cast<const std::byte*>(chunk.device_address()), segments);
  flights.push_back(launch.end());  // also after a failure: earlier launches are in flight
  if (launch.failure()) return fail(*launch.failure());
  return {};
}

}  // namespace troupe::transport::staging
