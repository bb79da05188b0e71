#pragma once

/// A real cluster for tests: a supervisor process and node processes forked from the test, real
/// sockets, real signals. The test's own process runs one node (usually decode) and steers the
/// others line by line. Fork every child before the first engine starts here: a process with
/// threads must not fork.

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "troupe/actors/engine.hpp"
#include "troupe/actors/host_options.hpp"
#include "troupe/actors/logging.hpp"
#include "troupe/actors/runtime/system.hpp"
#include "troupe/actors/supervisor/supervisor.hpp"
#include "troupe/config/parse.hpp"
#include "troupe/config/resolve.hpp"

#include "cache_bytes.hpp"
#include "waiting.hpp"

namespace troupe::testing {

using namespace std::chrono_literals;

/// Lines of text between a test and its child.
class line_channel {
 public:
  explicit line_channel(int fd) : fd_{fd} {}
  line_channel(line_channel&& other) noexcept
      : fd_{std::exchange(other.fd_, -1)}, text_{std::move(other.text_)} {}
  line_channel& operator=(line_channel&&) = delete;
  ~line_channel() {
    if (fd_ >= 0) close(fd_);
  }
  void say(const std::string& line) const {
    const auto whole = line + "\n";
    [[maybe_unused]] const auto sent = ::send(fd_, whole.data(), whole.size(), MSG_NOSIGNAL);
  }
  /// The next order for a child, however late it comes; empty once the test is over.
  std::optional<std::string> order() { return hear(24h); }
  /// The next line; empty if none came in time or the other end is gone.
  std::optional<std::string> hear(std::chrono::milliseconds time = wait_limit) {
    const auto until = std::chrono::steady_clock::now() + time;
    for (;;) {
      if (const auto end = text_.find('\n'); end != std::string::npos) {
        auto line = text_.substr(0, end);
        text_.erase(0, end + 1);
        return line;
      }
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
          until - std::chrono::steady_clock::now());
      if (left.count() <= 0) return std::nullopt;
      pollfd wanted{fd_, POLLIN, 0};
      if (::poll(&wanted, 1, static_cast<int>(left.count())) <= 0) return std::nullopt;
      char buffer[4096];
      const auto got = ::recv(fd_, buffer, sizeof buffer, 0);
      if (got <= 0) return std::nullopt;
      text_.append(buffer, static_cast<std::size_t>(got));
    }
  }

 private:
  int fd_;
  std::string text_;
};

/// A forked process that runs `body` and never outlives this object.
class forked {
 public:
  explicit forked(const std::function<int(line_channel&)>& body) : channel_{-1} {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) return;
    pid_ = fork();
    if (pid_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      close(ends[0]);
      int code = 1;
      {
        line_channel channel{ends[1]};
        code = body(channel);
      }
      std::fflush(nullptr);
      _exit(code);
    }
    close(ends[1]);
    channel_.~line_channel();
    new (&channel_) line_channel{ends[0]};
  }
  ~forked() { end(SIGKILL); }
  forked(const forked&) = delete;
  forked& operator=(const forked&) = delete;

  line_channel& channel() { return channel_; }
  void signal(int number) const { ::kill(pid_, number); }
  /// Returns once the process is stopped.
  void stop() const {
    ::kill(pid_, SIGSTOP);
    int status = 0;
    waitpid(pid_, &status, WUNTRACED);
  }
  void end(int number) {
    if (pid_ <= 0) return;
    ::kill(pid_, number);
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = -1;
  }
  /// Waits for the process to exit by itself. Returns its exit status, -1 for a signal.
  int join() {
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  [[nodiscard]] pid_t pid() const { return pid_; }

 private:
  pid_t pid_{-1};
  line_channel channel_;
};

struct cluster_options {
  std::string backend{"auto"};
  std::string mode{"write"};
  std::string model{"{layers: 4, kv_heads: 2, head_dim: 32, dtype: fp16, block_tokens: 16}"};
  std::string prefill_host{"127.0.0.1"};
  std::string prefill_pool{"8MiB"};
  std::string decode_pool{"8MiB"};
  std::string prefill_device{"cpu"}, decode_device{"cpu"};
  std::string prefill_layout;  ///< e.g. "{order: blocks_first}"
  std::string decode_layout;
  std::uint32_t prefill_tp{1}, decode_tp{1};
  std::uint32_t prefill_pp{1}, decode_pp{1};  ///< parts of each replica
  std::uint32_t decodes{1};
  std::string deadline{"10s"};
  std::string on_full{"wait"};
  std::string retry_window{"0s"};
  std::string source_lease{"60s"};
  std::uint32_t max_operations{0};  ///< 0: the default
  std::uint32_t max_parked{0};      ///< 0: the default
  std::string heartbeat_interval{"200ms"};
  std::string heartbeat_timeout{"2s"};
  /// Longer than a busy machine keeps a process from answering. Empty: the default of 1 s.
  std::string peer_silence{"20s"};
  std::string connect_timeout;   ///< empty: the default; longer over rdma
  std::string transport_more;    ///< e.g. ", max_reconnects: 0, fallback: [tcp]"
  bool decode_has_store{false};  ///< an edge from decode to store, as there is one from prefill
  std::string more_stages, more_edges;  ///< lines of a list, "  - {...}\n" each
};

/// Sets time-outs that end nothing during a test: each is longer than any wait, or the longest
/// allowed.
inline cluster_options unhurried(cluster_options options = {}) {
  options.deadline = "10min";
  options.source_lease = "10min";
  options.heartbeat_timeout = "30min";
  options.peer_silence = "1min";
  options.connect_timeout = "1min";
  return options;
}

/// The deployment, with the supervisor in a child process of its own.
class cluster {
 public:
  explicit cluster(cluster_options options = {}) : options_{std::move(options)} {
    supervisor_ =
        std::make_unique<forked>([this](line_channel& channel) { return supervise(channel); });
    const auto port = supervisor_->channel().hear();
    port_ = port ? std::stoi(*port) : 0;
  }

  [[nodiscard]] config::deployment deployment() const {
    auto outcome = config::parse(text(port_), "test.yaml");
    for (const auto& issue : outcome.issues) ADD_FAILURE() << config::to_string(issue);
    return outcome.value.value_or(config::deployment{});
  }

  /// The names of a stage's nodes: replica by replica, rank by rank.
  [[nodiscard]] std::vector<std::string> nodes_of(std::string_view stage) const {
    std::vector<std::string> names;
    for (const auto& node : config::resolve(deployment())) {
      if (node.stage == stage) names.push_back(node.name);
    }
    return names;
  }

  /// Starts a node in this process.
  [[nodiscard]] std::unique_ptr<engine> start(const std::string& name,
                                              engine_options options = {}) const {
    auto started = engine::start(deployment(), name, std::move(options));
    if (!started) {
      ADD_FAILURE() << name << ": " << to_string(started.error());
      return nullptr;
    }
    if (auto in = (*started)->wait_registered(wait_limit); !in)
      ADD_FAILURE() << to_string(in.error());
    return std::move(*started);
  }

  /// Starts a node in its own process, which runs `body` once it is registered.
  [[nodiscard]] std::unique_ptr<forked> spawn(
      const std::string& name, const std::function<int(engine&, line_channel&)>& body,
      bool polling = false) const {
    return std::make_unique<forked>([this, name, body, polling](line_channel& channel) {
      quiet(name);
      engine_options options;
      options.polling = polling;
      auto node = start(name, std::move(options));
      if (!node) return 1;
      return body(*node, channel);
    });
  }

  [[nodiscard]] int port() const { return port_; }
  forked& supervisor() { return *supervisor_; }

  static void quiet(const std::string& name) {
    const char* level = std::getenv("TROUPE_TEST_LOG");
    (void)actors::init_logging({level != nullptr ? level : "off", name, {}, 64u << 20, 3});
  }

 private:
  /// The `transport` section of a stage. Over rdma the prefill side is at one end of the wire and
  /// the other stages are at the other.
  [[nodiscard]] std::string transport(const std::string& stage, const std::string& more) const {
    // A store's memory is host memory.
    const auto backend = stage == "store" && options_.backend == "xgmi" ? "auto" : options_.backend;
    std::string text = "{backend: " + backend + more;
    if (!options_.peer_silence.empty()) text += ", peer_silence: " + options_.peer_silence;
    if (!options_.connect_timeout.empty()) text += ", connect_timeout: " + options_.connect_timeout;
    if (options_.backend == "rdma") {
      text += std::string{", device: "} + (stage == "prefill" ? "rxe0a" : "rxe0b");
      // An emulated machine may stall for longer than the default time-outs allow.
      if (options_.connect_timeout.empty()) text += ", connect_timeout: 20s";
      if (options_.peer_silence.empty()) text += ", peer_silence: 20s";
      if (options_.transport_more.find("rdma:") == std::string::npos)
        text += ", rdma: {timeout: 19}";
    }
    return text + options_.transport_more + "}";
  }
  [[nodiscard]] std::string text(int port) const {
    std::ostringstream out;
    const auto stage = [&](const char* name, std::uint32_t replicas, std::uint32_t pp,
                           std::uint32_t tp, const std::string& pool, const std::string& device,
                           const std::string& layout) {
      out << "  - name: " << name << "\n    role: " << name << "\n    replicas: " << replicas
          << "\n    pipeline_parallel: " << pp << "\n    tensor_parallel: " << tp
          << "\n    hosts: ["
          << (std::string_view{name} == "prefill" ? options_.prefill_host : "127.0.0.1")
          << "]\n    engine: external\n"
          << "    pool: {device: " << device << ", size: " << pool
          << ", on_full: " << options_.on_full << "}\n"
          << "    transport: " << transport(name, ", qp_per_transfer: 2") << "\n";
      if (!layout.empty()) out << "    layout: " << layout << "\n";
    };
    out << "cluster: test\nsupervisor: {host: 127.0.0.1, port: " << port
        << ", heartbeat_interval: " << options_.heartbeat_interval
        << ", heartbeat_timeout: " << options_.heartbeat_timeout
        << "}\nsecurity: {mode: none}\nmodel: " << options_.model
        << "\nlimits: {transfer_deadline: " << options_.deadline
        << ", retry_window: " << options_.retry_window
        << ", source_lease: " << options_.source_lease;
    if (options_.max_operations > 0) out << ", max_operations: " << options_.max_operations;
    if (options_.max_parked > 0) out << ", max_parked: " << options_.max_parked;
    out << "}\nstages:\n";
    stage("prefill", 1, options_.prefill_pp, options_.prefill_tp, options_.prefill_pool,
          options_.prefill_device, options_.prefill_layout);
    stage("decode", options_.decodes, options_.decode_pp, options_.decode_tp, options_.decode_pool,
          options_.decode_device, options_.decode_layout);
    out << "  - {name: store, role: store, pool: {device: cpu, size: 16MiB}, transport: "
        << transport("store", "") << "}\n"
        << options_.more_stages;
    out << "edges:\n  - {from: prefill, to: decode, mode: " << options_.mode
        << "}\n  - {from: prefill, to: store}\n";
    if (options_.decode_has_store) out << "  - {from: decode, to: store}\n";
    out << options_.more_edges;
    return out.str();
  }

  int supervise(line_channel& channel) const {
    quiet("supervisor");
    auto outcome = config::parse(text(0), "test.yaml");
    if (!outcome.value) {
      for (const auto& issue : outcome.issues)
        std::fprintf(stderr, "%s\n", to_string(issue).c_str());
      return 1;
    }
    auto made = actors::host_options_of(*outcome.value);
    if (!made) {
      std::fprintf(stderr, "%s\n", to_string(made.error()).c_str());
      return 1;
    }
    actors::actor_host host{std::move(*made)};
    auto actor =
        actors::spawn_supervisor(host.system(), actors::supervisor_options_from(*outcome.value));
    auto bound = host.publish(actor, "127.0.0.1", 0);
    if (!bound) return 1;
    channel.say(std::to_string(*bound));
    while (channel.order()) {
    }
    return 0;
  }

  cluster_options options_;
  int port_{0};
  std::unique_ptr<forked> supervisor_;
};

/// A node that does nothing until it is told to end or is killed.
inline int bystander(engine&, line_channel& channel) {
  channel.say("up");
  (void)channel.order();
  return 0;
}

/// The events of one operation, up to its outcome (and to `unpinned` if asked).
struct told {
  std::optional<kvcache::allocation> allocated;
  std::vector<actors::cache_slice> layers;
  int done{0}, failed{0}, unpinned{0};
  troupe::error why;
  std::vector<std::byte> aux;
  std::uint64_t bytes{0};
  movement how;
  value_view value;
  std::uint64_t size{0};
  std::optional<actors::placement> placed;
};

/// Sorts an engine's events by operation.
class listener {
 public:
  explicit listener(engine& node) : node_{node} {}

  told& of(operation_id id) { return told_[id.value]; }
  void forget(operation_id id) { told_.erase(id.value); }

  /// Returns whether the condition comes true. Pass a shorter time to check that it does not.
  bool until(const std::function<bool()>& condition, std::chrono::milliseconds time = wait_limit) {
    const auto end = std::chrono::steady_clock::now() + time;
    while (!condition()) {
      if (std::chrono::steady_clock::now() >= end) return false;
      for (auto& e : node_.wait(20ms)) take(e);
    }
    return true;
  }
  bool outcome(operation_id id) {
    return until([&] { return of(id).done + of(id).failed > 0; });
  }
  bool unpinned(operation_id id, std::chrono::milliseconds time = wait_limit) {
    return until([&] { return of(id).unpinned > 0; }, time);
  }
  /// Waits until `count` transfers have been requested over a link that is up.
  bool moving(std::size_t count = 1) {
    return until([&] {
      const auto transfers = node_.report().transfers;
      return static_cast<std::size_t>(std::ranges::count_if(
                 transfers, [](const auto& one) { return one.side != "held"; })) >= count;
    });
  }
  void listen_for(std::chrono::milliseconds time) {
    (void)until([] { return false; }, time);
  }

 private:
  void take(event& e) {
    auto& t = told_[e.operation.value];
    if (auto* a = std::get_if<event_allocated>(&e.what)) t.allocated = std::move(a->blocks);
    if (auto* l = std::get_if<event_layers>(&e.what)) t.layers.push_back(l->slice);
    if (auto* d = std::get_if<event_done>(&e.what)) {
      ++t.done;
      t.aux = std::move(d->aux);
      t.bytes = d->bytes;
      t.how = std::move(d->how);
    }
    if (auto* f = std::get_if<event_failed>(&e.what)) {
      ++t.failed;
      t.why = std::move(f->why);
    }
    if (std::get_if<event_unpinned>(&e.what) != nullptr) ++t.unpinned;
    if (auto* v = std::get_if<event_value>(&e.what)) {
      ++t.done;
      t.value = std::move(v->value);
    }
    if (auto* i = std::get_if<event_info>(&e.what)) {
      ++t.done;
      t.size = i->size;
    }
    if (auto* p = std::get_if<event_placed>(&e.what)) {
      ++t.done;
      t.placed = std::move(p->where);
    }
  }

  engine& node_;
  std::map<std::uint64_t, told> told_;
};

}  // namespace troupe::testing
