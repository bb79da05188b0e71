#include "xgmi_side.hpp"

#include <algorithm>
#include <random>
#include <utility>

namespace troupe::bench {

using namespace transport;

namespace {

constexpr transfer_id everything{1};
std::uint64_t last_batch = 0;

}  // namespace

// -- memory

gpu_memory gpu_memory::take(bool last) {
  gpu_memory made;
  made.site = xgmi::gpu_site::of_process();
  auto& runtime = *made.site->runtime;
  if (auto state = runtime.state(); !state.usable) die(state.reason);
  const auto count = static_cast<std::uint32_t>(runtime.devices().size());
  made.gpu = last ? count - 1 : 0;
  use_gpu(made.gpu);
  made.source = need(runtime.allocate(made.gpu, pool_bytes), "memory of the GPU");
  made.target = need(runtime.allocate(made.gpu, pool_bytes), "memory of the GPU");
  made.allocation = need(runtime.allocate(made.gpu, parts * part_distance), "memory of the GPU");
  return made;
}

void gpu_memory::prepare(std::uint64_t seed) const {
  use_gpu(gpu);
  fill_pattern(source, pool_bytes, 0, seed);
  fill_poison(target, pool_bytes);
  fill_poison(allocation, parts * part_distance);
}

// -- an end

void gpu_end::sink::on_completion(completion done) {
  if (done.failure) die("a batch failed: " + to_string(*done.failure));
  ++completed;
}

void gpu_end::sink::on_broken(troupe::error why) {
  if (!closing) die("the link broke: " + to_string(why));
}

gpu_end gpu_end::join(const control& peer, const gpu_memory& memory, bool dials,
                      const xgmi_options& wanted) {
  const incarnation self{dials ? 1U : 2U};
  const incarnation other{dials ? 2U : 1U};
  gpu_end made;
  endpoint_options options;
  options.self = self;
  options.num_workers = 0;
  options.xgmi = wanted;
  made.place = need(endpoint::create(std::move(options)), "endpoint");
  const auto add = [&](std::byte* at, std::uint64_t size, const char* name) {
    made.regions.push_back(need(made.place->register_memory({at, size}, name), "a region"));
  };
  add(memory.source, pool_bytes, "source");
  add(memory.target, pool_bytes, "target");
  for (std::uint32_t i = 0; i < parts; ++i) {
    add(memory.allocation + i * part_distance, part_bytes, "part");
  }
  made.said = std::make_shared<sink>();
  link_options with;
  with.role = dials ? link_role::initiator : link_role::acceptor;
  with.peer = other;
  with.connect_timeout = std::chrono::seconds{20};
  made.wire = need(made.place->open(backend_kind::xgmi, with, made.said), "link");
  peer.put_list(made.wire->offer().payload);
  const link_offer theirs{.kind = backend_kind::xgmi, .owner = other, .payload = peer.get_list()};
  need(made.wire->connect(theirs), "connect");
  while (!made.said->up) made.place->poll();
  for (std::size_t i = 0; i < made.regions.size(); ++i) {
    const auto size = i < static_cast<std::size_t>(which::first_part) ? pool_bytes : part_bytes;
    const auto given =
        need(made.wire->grant(made.regions[i], {{0, size, 0, 1}}, access::read_write, everything),
             "grant");
    peer.put(given.id);
    peer.put_list(given.key);
    auto mine = given;
    mine.owner = other;
    mine.id = peer.get<std::uint64_t>();
    mine.key = peer.get_list();  // both register in the same order: the numbers are the same
    made.theirs.push_back(std::make_shared<const remote_grant>(std::move(mine)));
    // A socket holds only a few messages about regions: read those that arrived.
    for (int round = 0; round < 100; ++round) made.place->poll();
  }
  return made;
}

double gpu_end::run(std::vector<batch> work, double* posting) {
  const auto until = said->completed + work.size();
  const auto start = clock_type::now();
  for (auto& one : work) need(wire->post(std::move(one)), "post");
  if (posting != nullptr) *posting = microseconds_since(start);
  while (said->completed < until) wire->poll();
  return microseconds_since(start);
}

void gpu_end::close() {
  said->closing = true;
  wire->close();
  for (int i = 0; i < 100; ++i) place->poll();
  wire.reset();
  place.reset();
}

// -- shapes

std::vector<segment> segments_of(const shape& of) {
  constexpr std::uint64_t unit = 64;
  // Each block has a place of its own on each side, followed by a gap that must not be touched.
  const auto rows = of.strided != 0 ? std::uint64_t{16} : 1;
  const auto row_distance = of.strided != 0 ? of.length * 3 : 0;
  const auto extent = (rows - 1) * row_distance + of.length + of.from_shift + of.to_shift;
  const auto gap = of.mixed != 0 || of.from_shift != 0 || of.to_shift != 0 || of.strided != 0
                       ? std::uint64_t{64}
                       : 0;
  const auto place = (extent + gap + unit - 1) / unit * unit;
  const auto places = pool_bytes / place;
  if (places < of.count) die("a shape of " + std::to_string(of.count) + " blocks does not fit");
  std::vector<std::uint64_t> from(places);
  for (std::uint64_t i = 0; i < places; ++i) from[i] = i * place;
  auto to = from;
  std::mt19937_64 random{of.seed * 1'000'003 + of.length};
  const auto shuffle = [&](std::vector<std::uint64_t>& places_of_side) {
    for (std::uint32_t i = 0; i < of.count; ++i) {
      std::swap(places_of_side[i], places_of_side[i + random() % (places - i)]);
    }
  };
  shuffle(from);
  shuffle(to);
  std::vector<segment> segments(of.count);
  for (std::uint32_t i = 0; i < of.count; ++i) {
    auto& s = segments[i];
    s.local_offset = from[i] + of.from_shift;
    s.remote_offset = to[i] + of.to_shift;
    s.length = of.mixed != 0 ? 1 + random() % of.length : of.length;
    if (of.strided != 0) {
      s.count = static_cast<std::uint32_t>(rows);
      s.local_stride = row_distance;
      s.remote_stride = of.length * 2;
    }
  }
  return segments;
}

std::vector<moved_range> moved_by(std::span<const segment> segments, direction dir) {
  std::vector<moved_range> moved;
  for (const auto& s : segments) {
    for (std::uint32_t i = 0; i < s.count; ++i) {
      const auto here = s.local_offset + i * s.local_stride;
      const auto there = s.remote_offset + i * s.remote_stride;
      moved.push_back(dir == direction::write ? moved_range{here, there, s.length}
                                              : moved_range{there, here, s.length});
    }
  }
  return moved;
}

std::vector<batch> batches_of(const gpu_end& end, std::span<const segment> segments,
                              std::uint32_t count, direction dir) {
  const auto here =
      static_cast<std::size_t>(dir == direction::write ? which::source : which::target);
  const auto there =
      static_cast<std::size_t>(dir == direction::write ? which::target : which::source);
  std::vector<batch> made(count);
  for (std::uint32_t i = 0; i < count; ++i) {
    auto& work = made[i];
    work.id = batch_id{++last_batch};
    work.transfer = everything;
    work.dir = dir;
    const auto first = segments.size() * i / count;
    const auto last = segments.size() * (i + 1) / count;
    work.pieces.push_back({end.regions[here],
                           end.theirs[there],
                           {segments.begin() + static_cast<std::ptrdiff_t>(first),
                            segments.begin() + static_cast<std::ptrdiff_t>(last)}});
  }
  return made;
}

}  // namespace troupe::bench
