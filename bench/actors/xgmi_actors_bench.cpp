// Rows of the actors over GPUs: a prefill engine with its cache on the first GPU of this machine, a
// decode engine in another process with its cache on the second. Measures a small transfer, and how
// much of a whole prompt's transfer is left when its layers are pushed after the kernels that
// compute them. Targets are poisoned, every byte is checked by kernels.
//
//   xgmi_actors_bench [small|layers]... [--polling|--events] [--quick]
//                     [--tokens N] [--latent N] [--compute RATIO] [--copy-blocks N] [--rounds N]
//
// --compute: the length of a layer's kernel, in units of a layer's transfer. Prints its
// observations to standard error, and the rows for bench/run to standard output. Exit 1: it failed
// (not two GPUs, a wrong byte), standard error says why. 2: wrong arguments. In a build without
// GPUs both are doubles: then it shows that it works, and its figures say nothing.
#include <algorithm>
#include <charconv>
#include <cstdio>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "troupe/transport/xgmi/gpu_site.hpp"

#include "cluster.hpp"
#include "gpu_cache.hpp"
#include "gpu_prefill.hpp"
#include "layer_kernels.hpp"
#include "parts.hpp"
#include "xgmi_bare.hpp"

namespace {

using namespace troupe;
using namespace troupe::bench;
using namespace std::chrono_literals;
using actors::transfer_mode;
using transport::xgmi::gpu_site;

constexpr std::uint32_t prefill_gpu = 0;
constexpr std::uint32_t decode_gpu = 1;

struct settings {
  bool quick{false};
  std::uint32_t tokens{32'768};
  std::uint32_t latent{576};  ///< of DeepSeek-V3, whose 61 layers these are
  double compute{1.25};
  std::uint32_t copy_blocks{64};
  std::uint32_t rounds{9};
};

cluster_options cluster_on_gpus(const settings& chosen, bool polling) {
  cluster_options options;
  options.backend = "xgmi";
  options.polling = polling;
  options.prefill_device = "gpu:" + std::to_string(prefill_gpu);
  options.decode_device = "gpu:" + std::to_string(decode_gpu);
  options.transport_more =
      ", connect_timeout: 20s, xgmi: {copy_blocks: " + std::to_string(chosen.copy_blocks) + "}";
  options.deadline = "20s";
  return options;
}

std::string name_of(bool polling) {
  return polling ? "polling" : "event-driven";
}

// -- setup

void look(const control&) {
  const auto& runtime = *gpu_site::of_process()->runtime;
  const auto state = runtime.state();
  if (!state.usable) die("needs two GPUs: " + state.reason);
  for (const auto& gpu : runtime.devices()) {
    std::fprintf(stderr, "GPU %s %s, %u processors, bulk copies %s\n", gpu.bus_id.c_str(),
                 gpu.name.c_str(), gpu.processors, gpu.bulk_copies ? "yes" : "no");
  }
  if (runtime.devices().size() < 2) die("needs two GPUs, this process sees one");
  if (!runtime.reaches(prefill_gpu, decode_gpu) || !runtime.reaches(decode_gpu, prefill_gpu)) {
    die("needs two GPUs that reach each other's memory: the first two do not");
  }
}

// -- one small transfer

constexpr std::uint64_t small_bytes = 64u << 10;
constexpr std::uint32_t small_blocks = 512;

/// One copy between the two GPUs by the driver, all from this process.
class bare_peer_copy {
 public:
  explicit bare_peer_copy(transport::xgmi::gpu_runtime& runtime)
      : prefill_{allocate(runtime, prefill_gpu, decode_gpu)},
        decode_{allocate(runtime, decode_gpu, prefill_gpu)},
        push_{runtime, prefill_gpu, {prefill_, prefill_}, {decode_, decode_}},
        pull_{runtime, decode_gpu, {decode_, decode_}, {prefill_, prefill_}} {}
  /// Microseconds, the median: pushed (write mode) or pulled.
  double median_of(transfer_mode mode, int count) {
    std::vector<double> times;
    for (int i = 0; i < count; ++i) {
      times.push_back(mode == transfer_mode::write
                          ? push_.contiguous(small_bytes, transport::direction::write)
                          : pull_.contiguous(small_bytes, transport::direction::read));
    }
    return median(std::move(times));
  }

 private:
  static std::byte* allocate(transport::xgmi::gpu_runtime& runtime, std::uint32_t gpu,
                             std::uint32_t peer) {
    need(runtime.enable(gpu, peer), "the other GPU's memory");
    return need(runtime.allocate(gpu, small_bytes), "memory of a GPU");
  }
  std::byte* prefill_;
  std::byte* decode_;
  bare_copies push_;
  bare_copies pull_;
};

/// A small transfer that the decode engine asked for long before it is ready.
void waited_for(const control& runner, bench_cluster& cluster, const gpu_cache& cache,
                bare_peer_copy& bare, const settings& chosen, bool polling) {
  gpu_prefill_orders prefill{cluster};
  receive_spec into;
  into.sources = {"prefill-0"};
  into.tokens = 16;
  into.blocks = {block_id{1}};
  cluster.spin(true);
  std::vector<double> times;
  for (int i = 0; i < (chosen.quick ? 5 : 100); ++i) {
    times.push_back(prefill.push("waited " + std::to_string(i), into).until_done);
    cache.must_hold(std::vector{block_id{0}}, into.blocks, 7, "a transfer that was waited for");
  }
  cluster.spin(false);
  give(runner, {"xgmi write of 64 KiB, one layer, through the actors, " + name_of(polling) +
                    ", p50 from layers_ready to done, against one bare peer copy",
                median(std::move(times)),
                bare.median_of(transfer_mode::write, 100),
                {},
                "us",
                true});
}

void small(const control& runner, const settings& chosen, bool polling) {
  auto options = cluster_on_gpus(chosen, polling);
  options.model = "{layers: 1, kv_heads: 8, head_dim: 128, dtype: bf16, block_tokens: 16}";
  options.blocks = small_blocks;
  options.pool_bytes = small_blocks * small_bytes;
  options.work = [polling](engine& node) {
    return std::make_unique<gpu_prefill>(node, polling, prefill_gpu,
                                         request_shape{16, {block_id{0}}});
  };
  bench_cluster cluster{options};
  gpu_prefill_orders prefill{cluster};
  const gpu_cache cache{cluster.node(), decode_gpu};
  bare_peer_copy bare{*gpu_site::of_process()->runtime};
  prefill.fill(7);
  const int count = chosen.quick ? 50 : 300;
  std::uint64_t next = 0;
  for (const auto mode : {transfer_mode::write, transfer_mode::read}) {
    cache.poison();
    std::vector<double> ours;
    std::vector<double> rival;
    for (std::uint32_t round = 0; round <= chosen.rounds; ++round) {
      const auto first = next;
      next += static_cast<std::uint64_t>(count);
      cluster.spin(true);
      const auto time = cluster.one_by_one(mode, first, count);
      cluster.spin(false);
      const auto copy = bare.median_of(mode, count);
      std::vector<block_id> from;
      std::vector<block_id> to;
      for (std::uint32_t i = 0; i < static_cast<std::uint32_t>(count); ++i) {
        from.push_back(block_id{static_cast<std::uint32_t>((first + i) % small_blocks)});
        to.push_back(block_id{i});
      }
      cache.must_hold(from, to, 7, "small transfers");
      if (round == 0) continue;  // the first one warms up
      ours.push_back(time);
      rival.push_back(copy);
    }
    const auto name = std::string{"xgmi "} + (mode == transfer_mode::write ? "write" : "read") +
                      " of 64 KiB, one layer, through the actors, " + name_of(polling) +
                      ", p50 from receive to done, ";
    const auto [least, most] = std::ranges::minmax(ours);
    std::fprintf(stderr, "%srounds of %d from %.1f to %.1f us\n", name.c_str(), count, least, most);
    give(runner, {name + "against the limit", median(ours), 40, 1.0, "us", true});
    give(runner,
         {name + "against one bare peer copy", median(ours), median(rival), {}, "us", true});
  }
  waited_for(runner, cluster, cache, bare, chosen, polling);
}

// -- layers after a compute stream

constexpr std::uint32_t layers = 61;
constexpr std::uint32_t block_tokens = 64;

/// `count` blocks of a pool of twice as many, in any order.
std::vector<block_id> dealt_out(std::uint32_t count, unsigned seed) {
  std::vector<std::uint32_t> all(std::size_t{2} * count);
  std::iota(all.begin(), all.end(), 0U);
  std::ranges::shuffle(all, std::mt19937{seed});
  std::vector<block_id> blocks;
  for (std::uint32_t i = 0; i < count; ++i) blocks.push_back(block_id{all[i]});
  return blocks;
}

/// Steps of arithmetic that make all kernels take `wanted` microseconds.
std::uint32_t steps_for(gpu_prefill_orders& prefill, double wanted) {
  constexpr std::uint32_t few = 500;
  constexpr std::uint32_t many = 5'000;
  const auto time_of = [&](std::uint32_t steps) {
    (void)prefill.compute(1, steps);
    return prefill.compute(1, steps).gpu;
  };
  const auto less = time_of(few);
  const auto more = time_of(many);
  const auto each = std::max((more - less) / (many - few), 1e-4);
  const auto steps = std::clamp(few + (wanted - less) / each, 0.0, 1e8);
  std::fprintf(stderr,
               "kernels of %u steps take %.0f us, of %u steps %.0f us; %.0f steps for %.0f us\n",
               few, less, many, more, steps, wanted);
  return static_cast<std::uint32_t>(steps);
}

/// One series, by round.
struct series {
  std::vector<double> of;
  void add(double value) { of.push_back(value); }
  [[nodiscard]] double mid() const { return median(of); }
  void say(const char* what) const {
    const auto [least, most] = std::ranges::minmax(of);
    std::fprintf(stderr, "  %-58s %10.1f us (%.1f to %.1f)\n", what, mid(), least, most);
  }
};

struct pushes {
  series compute, compute_gpu, transfer, both, both_gpu, exposed, added, enqueued;
};

pushes measure(bench_cluster& cluster, const settings& chosen, const std::vector<block_id>& from,
               const receive_spec& into) {
  gpu_prefill_orders prefill{cluster};
  const gpu_cache cache{cluster.node(), decode_gpu};
  cache.poison();
  prefill.fill(1);
  const auto warm = prefill.push("warm", into).until_done;
  cache.must_hold(from, into.blocks, 1, "the first transfer");
  const auto again = prefill.push("warm again", into).until_done;
  cache.must_hold(from, into.blocks, 1, "the second transfer");
  std::fprintf(stderr, "the first transfer took %.0f us, the second %.0f us\n", warm, again);
  const auto steps = steps_for(prefill, chosen.compute * again);
  pushes seen;
  std::uint64_t seed = 100;
  for (std::uint32_t round = 0; round <= chosen.rounds; ++round) {
    const auto number = std::to_string(round);
    const auto alone = prefill.compute(++seed, steps);
    const auto transfer = prefill.push("transfer " + number, into);
    cache.must_hold(from, into.blocks, seed, "a transfer alone");
    const auto both = prefill.push_behind("both " + number, into, ++seed, steps);
    cache.must_hold(from, into.blocks, seed, "a transfer behind kernels");
    if (round == 0) continue;  // the first one warms up
    seen.compute.add(alone.host);
    seen.compute_gpu.add(alone.gpu);
    seen.transfer.add(transfer.until_done);
    seen.both.add(both.until_done);
    seen.both_gpu.add(both.prefill.gpu);
    seen.exposed.add(both.until_done - both.prefill.gpu);
    seen.added.add(both.until_done - alone.host);
    seen.enqueued.add(both.prefill.enqueued);
  }
  return seen;
}

void push_layers(const control& runner, const settings& chosen, bool polling) {
  const auto count = (chosen.tokens + block_tokens - 1) / block_tokens;
  const auto block_bytes = std::uint64_t{block_tokens} * chosen.latent * 2;
  const auto from = dealt_out(count, 1);
  auto options = cluster_on_gpus(chosen, polling);
  options.model = "{layers: " + std::to_string(layers) +
                  ", mla: {latent_dim: " + std::to_string(chosen.latent) +
                  "}, dtype: bf16, block_tokens: " + std::to_string(block_tokens) + "}";
  options.blocks = 2 * count;
  options.pool_bytes = layers * block_bytes * options.blocks;
  options.work = [&](engine& node) {
    return std::make_unique<gpu_prefill>(node, polling, prefill_gpu,
                                         request_shape{chosen.tokens, from});
  };
  bench_cluster cluster{options};
  receive_spec into;
  into.sources = {"prefill-0"};
  into.mode = transfer_mode::write;
  into.tokens = chosen.tokens;
  into.blocks = dealt_out(count, 2);
  char size[64];
  std::snprintf(size, sizeof size, "%u layers of %.1f MiB", layers,
                static_cast<double>(count * block_bytes) / (1 << 20));
  const auto name = std::string{"xgmi push of "} + size + " behind a compute stream, " +
                    name_of(polling) + ", copy_blocks " + std::to_string(chosen.copy_blocks);
  std::fprintf(stderr, "%s: blocks of %llu bytes in random order\n", name.c_str(),
               static_cast<unsigned long long>(block_bytes));
  const auto seen = measure(cluster, chosen, from, into);
  seen.compute.say("compute alone, from the first launch, seen by the host");
  seen.compute_gpu.say("the same by the GPU's clock");
  seen.transfer.say("transfer alone, all layers ready at once, to done");
  seen.both.say("both, from the first launch to done at the decode engine");
  seen.enqueued.say("of which the host launched and said");
  seen.both_gpu.say("compute with the transfer, by the GPU's clock");
  seen.exposed.say("exposed: of both, what is not beside compute");
  seen.added.say("both less compute alone: that, and what compute was slowed down");
  std::fprintf(stderr, "  the transfer alone moves %.1f GB/s\n",
               static_cast<double>(count * block_bytes * layers) / seen.transfer.mid() / 1e3);
  give(runner, {name + ": exposed, against the transfer alone", seen.exposed.mid(),
                seen.transfer.mid(), 0.1, "us", true});
  give(runner, {name + ": all that it adds to compute, against the transfer alone",
                seen.added.mid(), seen.transfer.mid(), 0.1, "us", true});
  give(runner, {name + ": compute meanwhile, against compute alone",
                seen.both_gpu.mid(),
                seen.compute_gpu.mid(),
                {},
                "us",
                true});
}

// -- arguments

constexpr auto usage =
    "usage: xgmi_actors_bench [small|layers]... [--polling|--events] [--quick] [--tokens N] "
    "[--latent N] [--compute RATIO] [--copy-blocks N] [--rounds N]\n";

struct request {
  settings with;
  std::set<std::string> parts;
  std::vector<bool> styles{false, true};
};

template <class Number>
bool read(std::string_view text, Number least, Number most, Number& into) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), into);
  return error == std::errc{} && end == text.data() + text.size() && into >= least && into <= most;
}

std::optional<request> arguments(int argc, char** argv) {
  request asked;
  for (int i = 1; i < argc; ++i) {
    const std::string word{argv[i]};
    const auto next = [&] { return std::string_view{i + 1 < argc ? argv[++i] : ""}; };
    bool fine = true;
    if (word == "small" || word == "layers") {
      asked.parts.insert(word);
    } else if (word == "--polling") {
      asked.styles = {true};
    } else if (word == "--events") {
      asked.styles = {false};
    } else if (word == "--quick") {
      asked.with.quick = true;
      asked.with.rounds = 2;
      asked.with.tokens = 256;
    } else if (word == "--tokens") {
      fine = read(next(), 1U, 1U << 20, asked.with.tokens);
    } else if (word == "--latent") {
      fine = read(next(), 4U, 65'536U, asked.with.latent) && asked.with.latent % 4 == 0;
    } else if (word == "--compute") {
      fine = read(next(), 0.1, 10.0, asked.with.compute);
    } else if (word == "--copy-blocks") {
      fine = read(next(), 1U, 1024U, asked.with.copy_blocks);
    } else if (word == "--rounds") {
      fine = read(next(), 1U, 50U, asked.with.rounds);
    } else {
      fine = false;
    }
    if (!fine) return std::nullopt;
  }
  if (asked.parts.empty()) asked.parts = {"small", "layers"};
  return asked;
}

}  // namespace

int main(int argc, char** argv) {
  const auto asked = arguments(argc, argv);
  if (!asked) {
    std::fputs(usage, stderr);
    return 2;
  }
  if (prepare_gpus()) std::fputs("doubles instead of GPUs: the figures mean nothing\n", stderr);
  std::vector<std::string> rows;
  const auto run = [&](const std::function<void(const control&)>& body) {
    for (auto& r : part(body, 60s)) rows.push_back(std::move(r));
  };
  run(look);
  for (const bool polling : asked->styles) {
    if (asked->parts.contains("small")) {
      run([&](const control& c) { small(c, asked->with, polling); });
    }
    if (asked->parts.contains("layers")) {
      run([&](const control& c) { push_layers(c, asked->with, polling); });
    }
  }
  print(rows);
}
