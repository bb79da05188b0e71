#include <algorithm>
#include <chrono>
#include <fstream>
#include <iostream>
#include <memory>
#include <string>
#include <utility>

#include <CLI/CLI.hpp>
#include <unistd.h>

#include "troupe/actors/engine.hpp"
#include "troupe/actors/logging.hpp"
#include "troupe/config/deployment.hpp"
#include "troupe/config/units.hpp"
#include "troupe/deploy/child_process.hpp"
#include "troupe/deploy/cli/bench_options.hpp"
#include "troupe/deploy/cli/bench_receiver.hpp"
#include "troupe/deploy/cli/bench_report.hpp"
#include "troupe/deploy/cli/bench_source.hpp"
#include "troupe/deploy/cli/deployment_file.hpp"
#include "troupe/deploy/cli/process_name.hpp"
#include "troupe/deploy/cli/progress_line.hpp"
#include "troupe/deploy/cli/stop_signals.hpp"
#include "troupe/deploy/cli/verbs.hpp"
#include "troupe/deploy/stop_together.hpp"

namespace troupe::deploy::cli {

namespace {

using namespace std::chrono_literals;

/// For all processes started here together, including this node's own end; the last of them gets at
/// least `least_end_patience`.
constexpr std::chrono::milliseconds end_patience_of_all = 8s;
constexpr std::chrono::milliseconds least_end_patience = 3s;

struct bench_arguments {
  bench_options load;
  std::string duration{"5s"};
  std::string log_level{"error"};
  std::string source_file;  ///< set in the process that takes the prefill side
  int announce_fd{-1};
};

double share_of(const bench_options& load, const bench_outcome& so_far) {
  if (load.requests != 0)
    return static_cast<double>(so_far.transfers) / static_cast<double>(load.requests);
  return std::chrono::duration<double>(so_far.lasted) / load.duration;
}

/// All participants.
class bench_cluster {
 public:
  bench_cluster() = default;
  ~bench_cluster() { stop(); }
  bench_cluster(const bench_cluster&) = delete;
  bench_cluster& operator=(const bench_cluster&) = delete;

  /// Stops both engines at once, then the supervisor; kills those that do not end.
  void stop() {
    const auto began = clock::now();
    if (source) source->terminate();
    if (node) node->stop();
    if (source && source->process() == nullptr) source.reset();
    ending_group group;
    if (source) group.nodes.push_back(source->process());
    if (supervisor.process) group.supervisor = supervisor.process->process();
    const auto passed = std::chrono::duration_cast<std::chrono::milliseconds>(clock::now() - began);
    group.patience = std::max(end_patience_of_all - passed, least_end_patience);
    stop_together(group);
    node.reset();
    source.reset();
    supervisor.process.reset();
  }

  bench_supervisor supervisor;
  std::unique_ptr<bench_companion> source;
  std::unique_ptr<engine> node;

 private:
  using clock = std::chrono::steady_clock;
};

result<bench_outcome> measure(engine& node, const bench_options& load, bench_companion& source,
                              const bench_interruption& interrupted) {
  progress_line progress{std::cout, ::isatty(STDOUT_FILENO) != 0};
  bench_watch watch;
  watch.interrupted = interrupted;
  watch.checkpoint = [&](const bench_outcome& so_far) {
    progress.show(share_of(load, so_far),
                  throughput_text(so_far) + ", " + std::to_string(so_far.transfers) + " transfers");
    return source.check();
  };
  auto measured = run_bench_receiver(node, bench_prefill_node, load, watch);
  if (measured) return measured;
  // If the other side ended, that explains more than the failed transfer that it caused.
  const auto alive = source.check();
  return alive ? std::move(measured) : fail(alive.error());
}

actors::link_report link_of(const engine& node) {
  for (const auto& link : node.report().links)
    if (link.peer == bench_prefill_node) return link;
  return {};
}

result<bench_report> run_load(const bench_options& load, const std::string& log_level,
                              const bench_interruption& interrupted) {
  auto deployment = bench_deployment(load);
  if (!deployment) return fail(deployment.error());
  bench_cluster cluster;
  auto supervisor = start_bench_supervisor(*deployment, log_level, interrupted);
  if (!supervisor) return fail(supervisor.error());
  cluster.supervisor = std::move(*supervisor);
  deployment->supervisor.port = cluster.supervisor.port;
  auto source = start_bench_source(*deployment, load, log_level, interrupted);
  if (!source) return fail(source.error());
  cluster.source = std::move(*source);
  engine_options how;
  how.polling = load.polling;
  auto started = engine::start(*deployment, bench_decode_node, std::move(how));
  if (!started) return fail(started.error());
  cluster.node = std::move(*started);
  auto& node = *cluster.node;
  if (auto ok = wait_taken_in(node, interrupted); !ok) return fail(ok.error());
  const auto block_bytes = kvcache::bytes_per_block(node.layout());
  bench_report report;
  report.options = load;
  const auto& at = deployment->supervisor;
  report.supervisor = at.host + ":" + std::to_string(at.port);
  report.request_bytes = block_bytes * blocks_per_request(load);
  if (load.blocks == 0) report.request_bytes = block_bytes / load.block_tokens * load.tokens;
  print_head(report, std::cout);
  auto measured = measure(node, load, *cluster.source, interrupted);
  if (!measured) return fail(measured.error());
  report.outcome = *measured;
  report.link = link_of(node);
  cluster.stop();
  return report;
}

result<void> write_json(const bench_report& report) {
  std::ofstream file{report.options.json_file};
  file << to_json(report) << "\n";
  file.close();
  if (file.good()) return {};
  return fail(errc::invalid_config, "cannot write " + report.options.json_file);
}

exit_code complain(const error& why) {
  std::cerr << "troupe bench: " << to_string(why) << "\n";
  return why.code == errc::invalid_config ? exit_code::usage : exit_code::failed;
}

exit_code run_measuring_side(const bench_options& load, const std::string& log_level) {
  // Checked before measuring, not after.
  if (!load.json_file.empty() && !std::ofstream{load.json_file, std::ios::app}) {
    return complain({errc::invalid_config, "cannot write " + load.json_file});
  }
  stop_signals signals;
  bool told = false;
  const auto report = run_load(load, log_level, [&] { return told = told || signals.wait(0ms); });
  if (!report && told) {
    std::cerr << "troupe bench: interrupted; every process was stopped\n";
    return exit_code::interrupted;
  }
  if (!report) return complain(report.error());
  print_results(*report, std::cout);
  if (!load.json_file.empty())
    if (const auto written = write_json(*report); !written) return complain(written.error());
  return report->outcome.interrupted ? exit_code::interrupted : exit_code::ok;
}

exit_code run_source_side(const bench_arguments& given) {
  name_this_process(process_name(bench_prefill_node));
  const auto deployment = load_or_complain(given.source_file);
  if (!deployment) return exit_code::usage;
  const auto ran = run_bench_source(*deployment, given.load, given.announce_fd);
  return ran ? exit_code::ok : exit_code::failed;  // the other side says why
}

exit_code run_bench(bench_arguments& given) {
  actors::log_options log;
  log.level = given.log_level;
  log.node = given.source_file.empty() ? bench_decode_node : bench_prefill_node;
  if (auto ok = actors::init_logging(log); !ok) return complain(ok.error());
  if (!given.source_file.empty()) return run_source_side(given);
  given.load.duration = *config::parse_duration(given.duration);
  return run_measuring_side(given.load, given.log_level);
}

// -- arguments

void add_geometry(CLI::App& verb, bench_options& load) {
  const auto add = [&](const char* name, std::uint32_t& into, unsigned most, const char* text) {
    return verb.add_option(name, into, text)->check(CLI::Range(1U, most))->capture_default_str();
  };
  add("--layers", load.layers, 2048, "Layers of the cache");
  add("--kv-heads", load.kv_heads, 65'536, "KV heads of a layer");
  add("--head-dim", load.head_dim, 65'536, "Elements of a head");
  verb.add_option("--dtype", load.dtype, "Element type")
      ->check(CLI::IsMember({"fp32", "fp16", "bf16", "fp8", "int8"}))
      ->capture_default_str();
  add("--block-tokens", load.block_tokens, 1024, "Tokens of a block");
  auto* tokens = add("--tokens", load.tokens, 16'777'216, "Tokens of each transfer");
  verb.add_option("--blocks", load.blocks, "Blocks of each transfer, instead of --tokens")
      ->check(CLI::Range(1U, 1'048'576U))
      ->excludes(tokens);
  verb.add_flag("--contiguous", load.contiguous,
                "Blocks of a transfer side by side instead of dealt out at random");
}

void add_load(CLI::App& verb, bench_arguments& given) {
  auto& load = given.load;
  verb.add_option("--concurrency", load.concurrency, "Transfers in flight at once")
      ->check(CLI::Range(1U, 16'384U))
      ->capture_default_str();
  verb.add_option("--mode", load.mode, "Who moves the bytes: write (prefill), read (decode)")
      ->check(CLI::IsMember({"write", "read"}))
      ->capture_default_str();
  verb.add_option("--backend", load.backend, "How the bytes move")
      ->check(CLI::IsMember(config::backend_words()))
      ->capture_default_str();
  verb.add_option("--lanes", load.lanes, "Lanes of the link")
      ->check(CLI::Range(1U, 64U))
      ->capture_default_str();
  auto* duration =
      verb.add_option("--duration", given.duration, "How long to measure, e.g. 500ms, 10s, 2min")
          ->check([](const std::string& text) {
            const auto time = config::parse_duration(text);
            return time && time->count() > 0 ? std::string{}
                                             : "takes a duration, like 10s, found `" + text + "`";
          })
          ->capture_default_str();
  verb.add_option("--requests", load.requests, "Number of transfers, instead of --duration")
      ->check(CLI::Range(std::uint64_t{1}, std::uint64_t{1} << 40U))
      ->excludes(duration);
  verb.add_flag("--polling", load.polling, "Both engines poll instead of waiting for events");
  verb.add_flag("--in-process", load.in_process, "Both engines in this process");
  verb.add_flag(
      "--verify", load.verify,
      "Write a pattern into each cache and compare every byte that arrives, in rounds of\n"
      "--concurrency transfers; the time that this takes between rounds does not count");
}

}  // namespace

void add_bench(CLI::App& app, exit_code& code) {
  auto* verb = app.add_subcommand(
      "bench",
      "Move caches between two engines on this machine through the API that engines use, and\n"
      "measure it: the prefill engine runs in a process of its own, the decode engine in this "
      "one.\n"
      "The first transfers (two for each that runs at once) warm up and do not count. The latency\n"
      "is what the decode engine sees, from its call until the whole cache has arrived.");
  const auto given = std::make_shared<bench_arguments>();
  add_geometry(*verb, given->load);
  add_load(*verb, *given);
  verb->add_option("--json", given->load.json_file, "Also write the results to this file");
  verb->add_option("--log-level", given->log_level, "What the nodes log to standard error")
      ->check(CLI::IsMember({"trace", "debug", "info", "warn", "error", "off"}))
      ->capture_default_str();
  // Tells the process of the prefill engine its part.
  verb->add_option("--source", given->source_file)->group("");
  verb->add_option("--announce-fd", given->announce_fd)->group("");
  verb->callback([given, &code] { code = run_bench(*given); });
}

}  // namespace troupe::deploy::cli
