#include "cluster.hpp"

#include <algorithm>
#include <string_view>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "troupe/actors/runtime/system.hpp"
#include "troupe/actors/supervisor/supervisor.hpp"

#include "node_process.hpp"

namespace troupe::bench {

using namespace std::chrono_literals;

namespace {

constexpr const char* log_level = "error";

const std::string& device_of(const cluster_options& options, std::string_view stage) {
  return stage.starts_with("prefill") ? options.prefill_device : options.decode_device;
}

config::deployment deployment(const cluster_options& options, std::uint16_t port) {
  const auto stage = [&](const std::string& name) {
    return std::string{"  - name: "}.append(name) + "\n    role: " + name +
           "\n    hosts: [127.0.0.1]\n    engine: external\n    pool: {device: " +
           device_of(options, name) + ", size: " + std::to_string(options.pool_bytes) + "B}\n" +
           "    transport: {backend: " + options.backend + options.transport_more + "}\n";
  };
  const auto text = "cluster: bench\nsupervisor: {host: 127.0.0.1, port: " + std::to_string(port) +
                    "}\nsecurity: {mode: none}\nmodel: " + options.model +
                    "\nlimits: {transfer_deadline: " + options.deadline +
                    ", retry_window: 0s, max_operations: 100000}\nstages:\n" + stage("prefill") +
                    stage("decode") + "edges:\n  - {from: prefill, to: decode, mode: write}\n";
  auto made = parsed(text);
  // A file cannot name both modes for two stages; here each is measured over the same link.
  made.edges.push_back({"prefill", "decode", config::transfer_mode::read});
  return made;
}

void supervise(const cluster_options& options, const control& parent) {
  init_log("supervisor", log_level);
  actors::actor_host host;
  auto actor = actors::spawn_supervisor(host.system(),
                                        actors::supervisor_options_from(deployment(options, 0)));
  parent.put(need(host.publish(actor, "127.0.0.1", 0), "supervisor"));
  parent.get<char>();
}

std::unique_ptr<engine> start(const cluster_options& options, std::uint16_t port,
                              const std::string& name) {
  init_log(name, log_level);
  engine_options wanted;
  wanted.polling = options.polling;
  auto node = need(engine::start(deployment(options, port), name, std::move(wanted)), "node");
  need(node->wait_registered(20s), "registration");
  // Kept by the engine, since transfers name their blocks; and touched, so that memory does not
  // grow by the first use of a page.
  (void)need(node->allocate_blocks(options.blocks), "blocks");
  if (device_of(options, name) != "cpu") return node;
  for (std::size_t i = 0; auto region = node->region(i); ++i) {
    std::ranges::fill(*region, std::byte{1});
  }
  return node;
}

/// The prefill engine: carries out the measuring process's orders.
class prefill {
 public:
  prefill(const cluster_options& options, std::uint16_t port, const control& parent)
      : parent_{parent}, options_{options}, node_{start(options, port, "prefill-0")} {
    if (options_.work) work_ = options_.work(*node_);
    parent_.put('k');
  }

  void run() {
    for (;;) {
      if (parent_.readable() || (options_.polling && !spinning_)) obey();
      if (options_.polling) {
        for (int i = 0; i < 64; ++i) (void)node_->poll();
        count(node_->take(256));
      } else {
        count(node_->wait(5ms, 256));
      }
    }
  }

 private:
  void count(const std::vector<event>& events) {
    for (const auto& e : events) {
      if (std::holds_alternative<event_unpinned>(e.what)) --live_;
      const auto* failed = std::get_if<event_failed>(&e.what);
      // Sends that were never sealed end with the decode node.
      if (failed != nullptr && failed->why.code != errc::aborted &&
          failed->why.code != errc::peer_lost) {
        die("a send failed: " + to_string(failed->why));
      }
    }
  }

  void offer() {
    const auto first = parent_.get<std::uint64_t>();
    const auto count = parent_.get<std::uint64_t>();
    const auto sealed = parent_.get<bool>();
    for (auto i = first; i < first + count; ++i) {
      send_spec spec;
      spec.request = std::string{"r"}.append(std::to_string(i));
      spec.blocks = {block_id{static_cast<std::uint32_t>(i % options_.blocks)}};
      const auto send = need(node_->send(std::move(spec)), "send");
      if (sealed) need(node_->seal(send, options_.tokens_per_request), "seal");
    }
    live_ += count;
    std::this_thread::sleep_for(5ms);  // until the actors have received them
    parent_.put('k');
  }

  void obey() {
    const auto command = parent_.get<char>();
    switch (command) {
      case 'o': offer(); break;
      case 'd':
        while (live_ > 0) count(node_->wait(20ms, 256));
        parent_.put('k');
        break;
      case 'm': parent_.put(resident_bytes()); break;
      case '1': spinning_ = true; break;
      case '0':
        spinning_ = false;
        parent_.put('k');
        break;
      default:
        if (!work_) die("an unknown command");
        work_->obey(command, parent_);
    }
  }

  const control& parent_;
  const cluster_options& options_;
  std::unique_ptr<engine> node_;
  std::unique_ptr<prefill_work> work_;
  std::uint64_t live_{0};
  bool spinning_{true};
};

}  // namespace

bench_cluster::bench_cluster(const cluster_options& options) : options_{options} {
  supervisor_ = fork_child([&](const control& parent) { supervise(options, parent); });
  const auto port = supervisor_.get<std::uint16_t>();
  peer_ = fork_child([&](const control& parent) { prefill{options, port, parent}.run(); });
  peer_.get<char>();
  node_ = start(options, port, "decode-0");
}

bench_cluster::~bench_cluster() = default;

void bench_cluster::offer(std::uint64_t first, std::uint64_t count, bool sealed) {
  peer_.put('o');
  peer_.put(first);
  peer_.put(count);
  peer_.put(sealed);
  peer_.get<char>();
}

void bench_cluster::drain() {
  peer_.put('d');
  until_heard();
  peer_.get<char>();
}

void bench_cluster::until_heard() {
  while (!peer_.readable()) take(1ms);
}

void bench_cluster::rest(std::chrono::milliseconds time) {
  for (const auto until = clock_type::now() + time; clock_type::now() < until;) take(1ms);
}

std::uint64_t bench_cluster::peer_resident() {
  peer_.put('m');
  return peer_.get<std::uint64_t>();
}

void bench_cluster::spin(bool on) {
  if (!options_.polling) return;
  peer_.put(on ? '1' : '0');
  if (!on) peer_.get<char>();
}

void bench_cluster::receive(std::uint64_t number, actors::transfer_mode mode, std::uint32_t block) {
  receive_spec spec;
  spec.request = std::string{"r"}.append(std::to_string(number));
  spec.sources = {"prefill-0"};
  spec.mode = mode;
  spec.tokens = options_.tokens_per_request;
  spec.blocks = {block_id{block}};
  (void)need(node_->receive(std::move(spec)), "receive");
}

double bench_cluster::one_by_one(actors::transfer_mode mode, std::uint64_t first, int count) {
  offer(first, static_cast<std::uint64_t>(count));
  std::vector<double> times;
  for (int i = 0; i < count; ++i) {
    const auto before = done;
    const auto start = clock_type::now();
    receive(first + static_cast<std::uint64_t>(i), mode, static_cast<std::uint32_t>(i));
    until_done(before + 1);
    times.push_back(microseconds_since(start));
    until_unpinned(done);
  }
  drain();
  return median(std::move(times));
}

void bench_cluster::take(std::chrono::milliseconds timeout) {
  for (auto& e : node_->wait(timeout, 256)) {
    if (const auto* failed = std::get_if<event_failed>(&e.what)) {
      die("an operation failed: " + to_string(failed->why));
    }
    if (std::holds_alternative<event_done>(e.what)) ++done;
    if (auto* value = std::get_if<event_value>(&e.what)) {
      ++done;
      last_value = std::move(value->value);
    }
    if (std::holds_alternative<event_unpinned>(e.what)) ++unpinned;
  }
}

void bench_cluster::until_done(std::uint64_t outcomes) {
  while (done < outcomes) take(1000ms);
}

void bench_cluster::until_unpinned(std::uint64_t operations) {
  while (unpinned < operations) take(1000ms);
}

}  // namespace troupe::bench
