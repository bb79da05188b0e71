// Rows of the `xgmi` backend: two processes on two GPUs (on one GPU twice where there is only one).
// First every byte of many shapes is checked, targets poisoned before; then ours and the rivals in
// turns, medians.
//
//   xgmi_bench [check|speed|sweep]...     what of it; check and speed without a word
//
// Prints what was checked, and what the kernels do with other settings (sweep), to standard error, and
// the rows for bench/run to standard output. Exit 1: a byte was wrong.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "rows.hpp"
#include "xgmi_speed.hpp"

namespace {

using namespace troupe;
using namespace troupe::bench;
using namespace troupe::transport;

constexpr std::uint64_t seed_of_parent = 11;
constexpr std::uint64_t seed_of_child = 22;
constexpr int rounds = 9;
constexpr std::uint64_t kib = 1024;
constexpr std::uint64_t mib = 1024 * kib;

// -- orders from the parent to the child

enum class task : std::uint32_t { join, drop, prepare, check, check_parts, write, pools, leave };

struct order {
  task what{task::leave};
  shape of{};
  std::uint32_t copy_blocks{0};
};

struct verdict {
  std::uint64_t wrong{0};
  std::uint64_t touched{0};
  std::uint64_t first{0};
};

/// Checks the result of moving `of` into the target here.
verdict judge(const gpu_memory& memory, const shape& of, direction dir, std::uint64_t seed) {
  use_gpu(memory.gpu);
  verdict said;
  const auto moved = moved_by(segments_of(of), dir);
  said.wrong = wrong_bytes(memory.target, moved.data(), moved.size(), seed);
  said.touched = touched_bytes(memory.target, pool_bytes, &said.first);
  if (said.touched != 0) fill_poison(memory.target, pool_bytes);
  return said;
}

/// Part `i` gets bytes `i * 4096` on of the source, `4096 + i` of them, at offset `i`.
segment of_part(std::uint32_t i) {
  return {i * std::uint64_t{4096}, i, 4096 + i, 0, 0, 1};
}

verdict judge_parts(const gpu_memory& memory, std::uint64_t seed) {
  use_gpu(memory.gpu);
  verdict said;
  std::vector<moved_range> moved;
  for (std::uint32_t i = 0; i < parts; ++i) {
    const auto s = of_part(i);
    moved.push_back({s.local_offset, i * part_distance + s.remote_offset, s.length});
  }
  said.wrong = wrong_bytes(memory.allocation, moved.data(), moved.size(), seed);
  said.touched = touched_bytes(memory.allocation, parts * part_distance, &said.first);
  return said;
}

void child(const control& parent) {
  const auto memory = gpu_memory::take(true);
  std::vector<gpu_end> ends;
  while (true) {
    while (!parent.readable()) {
      for (auto& end : ends) end.wire->poll();
    }
    const auto told = parent.get<order>();
    switch (told.what) {
      case task::join: {
        xgmi_options options;
        if (told.copy_blocks != 0) options.copy_blocks = told.copy_blocks;
        ends.push_back(gpu_end::join(parent, memory, false, options));
        break;
      }
      case task::drop:
        ends.back().close();
        ends.pop_back();
        break;
      case task::prepare: memory.prepare(seed_of_child); break;
      case task::check:
        parent.put(judge(memory, told.of, direction::write, seed_of_parent));
        continue;
      case task::check_parts: parent.put(judge_parts(memory, seed_of_parent)); continue;
      case task::write: {
        auto work =
            batches_of(ends.back(), segments_of(told.of), told.of.batches, direction::write);
        parent.put('r');
        parent.get<char>();
        parent.put(ends.back().run(std::move(work)));
        continue;
      }
      case task::pools: export_pools(parent, memory); continue;
      case task::leave: std::_Exit(0);
    }
    parent.put('d');
  }
}

// -- the parent

struct bench_run {
  const control& other;
  gpu_memory memory{gpu_memory::take(false)};
  std::vector<gpu_end> ends{};
  std::vector<row> rows{};
  std::uint64_t bad{0};
  std::uint64_t checked{0};

  void tell(const order& what) const {
    other.put(what);
    other.get<char>();
  }
  void join(std::uint32_t copy_blocks) {
    other.put(order{task::join, {}, copy_blocks});
    xgmi_options options;
    if (copy_blocks != 0) options.copy_blocks = copy_blocks;
    ends.push_back(gpu_end::join(other, memory, true, options));
    other.get<char>();
  }
  void drop() {
    tell({task::drop, {}, 0});
    ends.back().close();
    ends.pop_back();
  }

  void note(const std::string& what, const verdict& said, const char* way) {
    ++checked;
    if (said.wrong == 0 && said.touched == 0) return;
    ++bad;
    std::fprintf(stderr, "WRONG %s %s: %llu bytes wrong, %llu beside touched, first at %llu\n",
                 what.c_str(), way, static_cast<unsigned long long>(said.wrong),
                 static_cast<unsigned long long>(said.touched),
                 static_cast<unsigned long long>(said.first));
  }
  void check(const shape& of);
  void check_parts();
  void check_all();

  double ours(const shape& of, std::span<const segment> segments, direction dir,
              double* posting = nullptr) {
    return ends.back().run(batches_of(ends.back(), segments, of.batches, dir), posting);
  }
  void bandwidth(bare_copies& bare, const shape& of, direction dir, const std::string& name,
                 std::optional<double> wanted);
  void both_directions();
  void small(bare_copies& bare);
  void speed(bare_copies& bare);
};

void bench_run::check(const shape& of) {
  const auto segments = segments_of(of);
  const auto name = std::to_string(of.count) + " x " + std::to_string(of.length) + " B +" +
                    std::to_string(of.from_shift) + "/+" + std::to_string(of.to_shift) +
                    (of.mixed != 0 ? " mixed" : "") + (of.strided != 0 ? " strided" : "") + " in " +
                    std::to_string(of.batches);
  ours(of, segments, direction::write);
  other.put(order{task::check, of, 0});
  note(name, other.get<verdict>(), "write");
  ours(of, segments, direction::read);
  note(name, judge(memory, of, direction::read, seed_of_child), "read");
}

/// All parts in one batch, each by its own grant.
void bench_run::check_parts() {
  auto& end = ends.back();
  auto work = batches_of(end, {}, 1, direction::write);
  work[0].pieces.clear();
  for (std::uint32_t i = 0; i < parts; ++i) {
    const auto at = static_cast<std::size_t>(which::first_part) + i;
    work[0].pieces.push_back({end.regions[0], end.theirs[at], {of_part(i)}});
  }
  end.run(std::move(work));
  other.put(order{task::check_parts, {}, 0});
  note(std::to_string(parts) + " regions at 64 MiB offsets", other.get<verdict>(), "write");
}

void bench_run::check_all() {
  memory.prepare(seed_of_parent);
  tell({task::prepare, {}, 0});
  const auto start = clock_type::now();
  for (const std::uint64_t length :
       {512UL, 1024UL, 4096UL, 16 * kib, 64 * kib, 256 * kib, mib, 4 * mib}) {
    const auto most = static_cast<std::uint32_t>(
        std::min<std::uint64_t>(32'768, std::min(pool_bytes / (length + 192), 512 * mib / length)));
    for (const std::uint32_t count : {1U, 33U, most}) {
      if (count > most) continue;
      check({.length = length, .count = count, .seed = count});
      // Odd tails, starts that are alike modulo 16, alike modulo 8, 4, 2, and unlike.
      check({.length = length + 7, .count = count, .seed = count + 1});
      if (count == most) continue;
      for (const auto& [from, to] : std::vector<std::pair<std::uint32_t, std::uint32_t>>{
               {5, 21}, {8, 0}, {4, 12}, {0, 2}, {1, 0}, {3, 10}}) {
        check({.length = length - 3,
               .count = count,
               .from_shift = from,
               .to_shift = to,
               .seed = count + from});
      }
    }
  }
  check({.length = 100'000, .count = 3000, .from_shift = 1, .to_shift = 1, .mixed = 1});
  check({.length = 20 * mib, .count = 20, .mixed = 1});
  check({.length = 48 * mib, .count = 8});  // by the copy engine
  for (const std::uint64_t length : {128UL, 256UL, 1000UL, 4096UL}) {
    check({.length = length, .count = 500, .strided = 1});
    check({.length = length, .count = 77, .from_shift = 4, .to_shift = 1, .strided = 1});
  }
  check({.length = 16 * kib, .count = 6400, .batches = 100});  // 100 in flight
  check({.length = 3, .count = 1000, .from_shift = 1, .batches = 10});
  check_parts();
  // Both directions at once: the child writes its source into our target while we write ours into
  // its.
  const shape of{.length = 64 * kib, .count = 4096, .batches = 8};
  const auto segments = segments_of(of);
  other.put(order{task::write, of, 0});
  other.get<char>();
  other.put('g');
  ours(of, segments, direction::write);
  while (!other.readable()) ends.back().wire->poll();
  other.get<double>();
  note("both ways at once", judge(memory, of, direction::write, seed_of_child), "in");
  other.put(order{task::check, of, 0});
  note("both ways at once", other.get<verdict>(), "out");
  std::fprintf(stderr, "checked %llu moves in %.1f s: %llu wrong\n",
               static_cast<unsigned long long>(checked), seconds_since(start),
               static_cast<unsigned long long>(bad));
}

void bench_run::bandwidth(bare_copies& bare, const shape& of, direction dir,
                          const std::string& name, std::optional<double> wanted) {
  const auto segments = segments_of(of);
  const auto bytes = static_cast<double>(total_bytes(segments));
  std::vector<double> mine;
  std::vector<double> rival;
  std::vector<double> posts;
  for (int i = 0; i <= rounds; ++i) {
    const auto contiguous = bare.contiguous(static_cast<std::uint64_t>(bytes), dir);
    double posting = 0;
    const auto time = ours(of, segments, dir, &posting);
    if (i == 0) continue;  // the first one warms up
    rival.push_back(bytes / contiguous / 1e3);
    mine.push_back(bytes / time / 1e3);
    posts.push_back(posting);
  }
  std::fprintf(stderr, "%s: posting %.0f us of %.0f, contiguous %.0f us\n", name.c_str(),
               median(posts), bytes / median(mine) / 1e3, bytes / median(rival) / 1e3);
  rows.push_back({.name = name,
                  .ours = median(mine),
                  .rival = median(rival),
                  .wanted = wanted,
                  .unit = "GB/s"});
}

void bench_run::both_directions() {
  const shape of{.length = 16 * kib,
                 .count = static_cast<std::uint32_t>(pool_bytes / (16 * kib)),
                 .batches = 32};
  const auto segments = segments_of(of);
  const auto bytes = static_cast<double>(pool_bytes);
  std::vector<double> out_alone, in_alone, out_both, in_both;
  for (int i = 0; i <= rounds; ++i) {
    const auto alone = ours(of, segments, direction::write);
    const auto child_writes = [&](bool with_ours) {
      other.put(order{task::write, of, 0});
      other.get<char>();
      auto work = batches_of(ends.back(), segments, of.batches, direction::write);
      other.put('g');
      const auto time = with_ours ? ends.back().run(std::move(work)) : 0;
      while (!other.readable()) ends.back().wire->poll();
      return std::pair{time, other.get<double>()};
    };
    const auto theirs_alone = child_writes(false).second;
    const auto [ours_too, theirs_too] = child_writes(true);
    if (i == 0) continue;
    out_alone.push_back(bytes / alone / 1e3);
    in_alone.push_back(bytes / theirs_alone / 1e3);
    out_both.push_back(bytes / ours_too / 1e3);
    in_both.push_back(bytes / theirs_too / 1e3);
  }
  rows.push_back({.name = "xgmi write 16 KiB both directions at once, out, against out alone",
                  .ours = median(out_both),
                  .rival = median(out_alone),
                  .wanted = 0.9,
                  .unit = "GB/s"});
  rows.push_back({.name = "xgmi write 16 KiB both directions at once, in, against in alone",
                  .ours = median(in_both),
                  .rival = median(in_alone),
                  .wanted = 0.9,
                  .unit = "GB/s"});
}

void bench_run::small(bare_copies& bare) {
  for (const std::uint64_t bytes : {4 * kib, 64 * kib, mib}) {
    for (const auto dir : {direction::write, direction::read}) {
      const shape of{.length = 4 * kib, .count = static_cast<std::uint32_t>(bytes / (4 * kib))};
      const auto segments = segments_of(of);
      std::vector<double> mine, rival, posts;
      for (int i = 0; i < 400; ++i) {
        double posting = 0;
        mine.push_back(ours(of, segments, dir, &posting));
        posts.push_back(posting);
        rival.push_back(bare.contiguous(bytes, dir));
      }
      const auto name = std::string{"xgmi "} + (dir == direction::write ? "write " : "read ") +
                        std::to_string(bytes / kib) +
                        " KiB in 4 KiB blocks until it completes, p50, against one bare copy";
      std::fprintf(stderr, "%s: posting %.1f us\n", name.c_str(), median(posts));
      rows.push_back({.name = name,
                      .ours = median(mine),
                      .rival = median(rival),
                      .wanted = {},
                      .unit = "us",
                      .lower_is_better = true});
    }
  }
}

void bench_run::speed(bare_copies& bare) {
  struct wish {
    std::uint64_t block;
    double wanted;
  };
  const auto blocks_of = [](std::uint64_t block) {
    return static_cast<std::uint32_t>(pool_bytes / block);
  };
  const auto word = [](direction dir) {
    return std::string{dir == direction::write ? "write " : "read "};
  };
  constexpr auto against = " scattered, 1 GiB in batches of 32 MiB, against one contiguous copy";
  for (const auto dir : {direction::write, direction::read}) {
    for (const auto& [block, wanted] : {wish{4 * kib, 0.80}, {16 * kib, 0.92}, {64 * kib, 0.94}}) {
      bandwidth(bare, {.length = block, .count = blocks_of(block), .batches = 32}, dir,
                "xgmi " + word(dir) + std::to_string(block / kib) + " KiB" + against, wanted);
    }
    for (const std::uint64_t block : {4 * kib, 16 * kib, 64 * kib}) {
      bandwidth(bare, {.length = block, .count = 16'384}, dir,
                "xgmi " + word(dir) + std::to_string(block / kib) +
                    " KiB x 16,384 in one batch, against one contiguous copy",
                std::nullopt);
    }
  }
  both_directions();
  small(bare);
  // The rival: a transfer engine without a kernel.
  const auto segments = segments_of({.length = 64 * kib, .count = 16'384});
  const shape whole{.length = 64 * kib, .count = 16'384, .batches = 32};
  std::vector<double> mine, rival;
  for (int i = 0; i < 7; ++i) {
    mine.push_back(static_cast<double>(pool_bytes) / ours(whole, segments, direction::write) / 1e3);
    rival.push_back(static_cast<double>(pool_bytes) /
                    bare.one_per_block(segments, direction::write) / 1e3);
  }
  rows.push_back({.name = "xgmi write 64 KiB x 16,384, against one copy per block",
                  .ours = median(mine),
                  .rival = median(rival),
                  .wanted = {},
                  .unit = "GB/s"});
  drop();
  join(16);
  for (const auto dir : {direction::write, direction::read}) {
    bandwidth(bare, {.length = 16 * kib, .count = blocks_of(16 * kib), .batches = 32}, dir,
              "xgmi " + word(dir) + "16 KiB, copy_blocks 16," + against, 0.85);
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::set<std::string> wanted{argv + 1, argv + argc};
  for (const auto& word : wanted) {
    if (word != "check" && word != "speed" && word != "sweep") {
      die("usage: xgmi_bench [check|speed|sweep]..., found '" + word + "'");
    }
  }
  if (wanted.empty()) wanted = {"check", "speed"};
  // Before any driver is initialised: a forked driver is unusable.
  const auto other = fork_child(child);
  bench_run run{.other = other};
  for (const auto& gpu : run.memory.site->runtime->devices()) {
    std::fprintf(stderr, "GPU %s %s, %u processors, bulk copies %s\n", gpu.bus_id.c_str(),
                 gpu.name.c_str(), gpu.processors, gpu.bulk_copies ? "yes" : "no");
  }
  run.join(0);
  if (wanted.contains("check")) run.check_all();
  other.put(order{task::pools, {}, 0});
  const auto pools = open_pools(other, run.memory);
  if (wanted.contains("sweep")) sweep(run.memory, pools);
  if (wanted.contains("speed")) {
    auto bare = bare_copies_of(run.memory, pools);
    run.speed(bare);
  }
  print(run.rows);
  std::fflush(nullptr);
  other.put(order{task::leave, {}, 0});
  std::_Exit(run.bad == 0 ? 0 : 1);
}
