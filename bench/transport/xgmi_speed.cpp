#include "xgmi_speed.hpp"

#include <cstdio>
#include <utility>
#include <vector>

#include <unistd.h>

#include "troupe/transport/xgmi/batch_launch.hpp"

namespace troupe::bench {

using namespace transport;

// -- pools

namespace {

struct exported_pool {
  std::uint32_t pid{0};
  std::uint64_t id{0};
  std::uint64_t size{0};
  xgmi::memory_handle handle{};
};

void export_pool(const control& to, const gpu_memory& mine, const std::byte* at) {
  const auto found = mine.site->runtime->find(at);
  if (!found) die("the pool is in no allocation");
  to.put(exported_pool{static_cast<std::uint32_t>(::getpid()), found->id, found->size,
                       need(mine.site->runtime->export_memory(*found), "export")});
}

std::shared_ptr<const xgmi::opened_allocation> open_pool(const control& from,
                                                         const gpu_memory& mine) {
  const auto said = from.get<exported_pool>();
  return need(
      mine.site->opened.open(
          {.pid = said.pid, .device = mine.gpu, .id = said.id, .handle = said.handle}, said.size),
      "open");
}

}  // namespace

void export_pools(const control& to, const gpu_memory& mine) {
  export_pool(to, mine, mine.source);
  export_pool(to, mine, mine.target);
}

opened_pools open_pools(const control& from, const gpu_memory& mine) {
  opened_pools made;
  made.keep_source = open_pool(from, mine);
  made.keep_target = open_pool(from, mine);
  made.source = made.keep_source->base();
  made.target = made.keep_target->base();
  return made;
}

bare_copies bare_copies_of(const gpu_memory& mine, const opened_pools& theirs) {
  return {
      *mine.site->runtime, mine.gpu, {mine.source, mine.target}, {theirs.source, theirs.target}};
}

// -- the sweep

namespace {

struct setting {
  std::uint64_t block;
  std::uint32_t blocks;
  bool bulk;
  std::uint64_t chunk;
};

/// One launch of everything: microseconds in all, and those that the host was busy.
std::pair<double, double> launch_once(xgmi::device_lanes& lanes, const gpu_memory& mine,
                                      const opened_pools& theirs, std::span<const segment> segments,
                                      direction dir, const setting& with) {
  xgmi::batch_launch::plan how;
  how.copy_blocks = with.blocks;
  how.bulk = with.bulk;
  how.chunk = with.chunk;
  how.total = total_bytes(segments);
  how.segments = segments.size();
  const bool writes = dir == direction::write;
  const auto start = clock_type::now();
  xgmi::batch_launch launch{lanes, how};
  launch.add(dir, writes ? mine.source : mine.target, writes ? theirs.target : theirs.source,
             segments);
  auto flight = launch.end();
  const auto busy = microseconds_since(start);
  if (launch.failure()) die(to_string(*launch.failure()));
  while (!flight.ended()) {
    for (std::size_t i = 0; i < xgmi::device_lanes::lane_count; ++i) lanes.lane(i).look();
  }
  const auto all = microseconds_since(start);
  flight.give_back_tables();
  return {all, busy};
}

}  // namespace

void sweep(const gpu_memory& mine, const opened_pools& theirs) {
  xgmi::copy_lanes all{*mine.site->runtime};
  auto& lanes = *need(all.on(mine.gpu), "lanes");
  auto bare = bare_copies_of(mine, theirs);
  for (const auto dir : {direction::write, direction::read}) {
    std::vector<double> best;
    for (int i = 0; i < 5; ++i) best.push_back(bare.contiguous(pool_bytes, dir));
    std::fprintf(stderr, "sweep %s: contiguous %.1f GB/s\n",
                 dir == direction::write ? "write" : "read",
                 static_cast<double>(pool_bytes) / median(best) / 1e3);
    for (const std::uint64_t block :
         {std::uint64_t{4} << 10, std::uint64_t{16} << 10, std::uint64_t{64} << 10}) {
      const shape of{.length = block, .count = static_cast<std::uint32_t>((1ULL << 28) / block)};
      const auto segments = segments_of(of);
      for (const bool bulk : {true, false}) {
        for (const std::uint64_t chunk : {4096U, 8192U, 16'384U}) {
          if (chunk > block && chunk != 8192) continue;
          for (const std::uint32_t blocks : {8U, 16U, 24U, 32U, 48U, 64U, 128U}) {
            std::vector<double> times;
            std::vector<double> busy;
            for (int i = 0; i < 4; ++i) {
              const auto [time, host] =
                  launch_once(lanes, mine, theirs, segments, dir, {block, blocks, bulk, chunk});
              if (i == 0) continue;  // the first one warms up
              times.push_back(time);
              busy.push_back(host);
            }
            std::fprintf(stderr, "%s %lluK %s c%llu b%u %.1f (host %.0f/%.0f us)\n",
                         dir == direction::write ? "w" : "r",
                         static_cast<unsigned long long>(block >> 10), bulk ? "bulk" : "vec",
                         static_cast<unsigned long long>(chunk >> 10), blocks,
                         static_cast<double>(total_bytes(segments)) / median(times) / 1e3,
                         median(busy), median(times));
          }
        }
      }
    }
  }
}

}  // namespace troupe::bench
