#include "recovery_cluster.hpp"

#include <array>
#include <csignal>
#include <cstddef>
#include <utility>
#include <variant>

#include <sched.h>
#include <unistd.h>

#include "troupe/actors/runtime/system.hpp"
#include "troupe/actors/supervisor/supervisor.hpp"

#include "node_process.hpp"

namespace troupe::bench {

using namespace std::chrono_literals;

namespace {

constexpr const char* log_level = "off";
constexpr std::uint32_t layers = 4;
constexpr std::uint32_t block_tokens = 16;
constexpr std::array<const char*, 4> names{"prefill-0", "prefill-1", "decode-0", "decode-1"};

config::deployment deployment(const recovery_options& options, std::uint16_t port) {
  const auto stage = [&](const std::string& name, const std::string& hosts) {
    return std::string{"  - name: "}.append(name) + "\n    role: " + name +
           "\n    replicas: 2\n    hosts: [" + hosts + "]\n    engine: external\n" +
           "    pool: {device: cpu, size: " + options.pool +
           "}\n    transport: {backend: " + options.backend + "}\n";
  };
  const std::string mode{to_string(options.mode)};
  const auto text =
      "cluster: recovery\nsupervisor: {host: 127.0.0.1, port: " + std::to_string(port) +
      "}\nsecurity: {mode: none}\nmodel: {layers: 4, kv_heads: 2, head_dim: 32, dtype: fp16, "
      "block_tokens: "
      "16}\nlimits: {transfer_deadline: 120s}\nstages:\n" +
      stage("prefill", options.cuttable ? "127.0.0.2, 127.0.0.3" : "127.0.0.1") +
      stage("decode", "127.0.0.1") + "edges:\n  - {from: prefill, to: decode, mode: " + mode +
      "}\n";
  return parsed(text);
}

void say(const control& to, const std::string& text) {
  const auto* first = reinterpret_cast<const std::byte*>(text.data());
  to.put_list({first, first + text.size()});
}

std::string hear(const control& from) {
  const auto bytes = from.get_list();
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// Reports its process id, waits for a port to listen on (0: any), and reports the port.
void supervise(const recovery_options& options, const control& parent) {
  parent.put(::getpid());
  init_log("supervisor", log_level);
  const auto port = parent.get<std::uint16_t>();
  actors::actor_host host;
  auto actor = actors::spawn_supervisor(host.system(),
                                        actors::supervisor_options_from(deployment(options, port)));
  parent.put(need(host.publish(actor, "127.0.0.1", port), "supervisor"));
  parent.get<char>();
}

std::unique_ptr<engine> start(const recovery_options& options, std::uint16_t port,
                              const std::string& name) {
  init_log(name, log_level);
  auto node = need(engine::start(deployment(options, port), name), "node");
  need(node->wait_registered(20s), "registration");
  return node;
}

operation_id offer_at(engine& node, const std::string& request, recovery_cluster::computed so_far,
                      std::uint32_t tokens) {
  const auto blocks =
      need(node.allocate_blocks((tokens + block_tokens - 1) / block_tokens), "blocks");
  send_spec spec;
  spec.request = request;
  spec.blocks = blocks.blocks;
  const auto id = need(node.send(std::move(spec)), "send");
  // The blocks come back at the end of the send.
  need(node.free_blocks(blocks.owner, blocks.blocks), "free");
  const bool whole = so_far == recovery_cluster::computed::whole;
  need(node.layers_ready(id, 0, whole ? layers : layers / 2, tokens), "layers");
  if (whole) need(node.seal(id, tokens), "seal");
  return id;
}

operation_id ask_at(engine& node, const recovery_options& options, const std::string& prefill,
                    const std::string& request, std::uint32_t tokens) {
  receive_spec spec;
  spec.request = request;
  spec.sources = {prefill};
  spec.mode = options.mode;
  spec.tokens = tokens;
  return need(node.receive(std::move(spec)), "receive");
}

void give_back(engine& node, event& e) {
  if (auto* got = std::get_if<event_allocated>(&e.what)) {
    need(node.free_blocks(got->blocks.owner, got->blocks.blocks), "free");
  }
}

/// Carries out the measuring process's orders, and handles their outcomes.
void obey(const recovery_options& options, const std::string& name, const control& parent) {
  parent.put(::getpid());
  const auto node = start(options, parent.get<std::uint16_t>(), name);
  parent.put('k');
  for (;;) {
    for (auto& e : node->wait(2ms, 256)) give_back(*node, e);
    if (!parent.readable()) continue;
    const auto verb = parent.get<char>();
    const auto tokens = parent.get<std::uint32_t>();
    if (verb == 'o') {
      const auto so_far = parent.get<recovery_cluster::computed>();
      (void)offer_at(*node, hear(parent), so_far, tokens);
    } else {
      const auto prefill = hear(parent);
      (void)ask_at(*node, options, prefill, hear(parent), tokens);
    }
    parent.put('k');
  }
}

bool ip(const std::string& arguments) {
  return std::system(("ip " + arguments + " 2>/dev/null").c_str()) == 0;
}

}  // namespace

recovery_cluster::recovery_cluster(recovery_options options, std::string survivor)
    : options_{std::move(options)}, survivor_{std::move(survivor)} {
  const auto begin = [](const std::function<void(const control&)>& body) {
    process made{fork_child(body), 0};
    made.pid = made.orders.get<pid_t>();
    return made;
  };
  // Forks all of them before this process has threads.
  const auto supervisor = [this](const control& parent) { supervise(options_, parent); };
  processes_["supervisor"] = begin(supervisor);
  next_supervisor_ = begin(supervisor);
  for (const std::string name : names) {
    if (name == survivor_) continue;
    processes_[name] = begin([&](const control& parent) { obey(options_, name, parent); });
  }
  const auto& first = processes_["supervisor"].orders;
  first.put(std::uint16_t{0});
  port_ = first.get<std::uint16_t>();
  for (const auto& [name, other] : processes_) {
    if (name != "supervisor") other.orders.put(port_);
  }
  for (const auto& [name, other] : processes_) {
    if (name != "supervisor") other.orders.get<char>();
  }
  node_ = start(options_, port_, survivor_);
}

void recovery_cluster::signal(const std::string& name, int number) {
  ::kill(processes_.at(name).pid, number);
}

void recovery_cluster::next_supervisor() {
  next_supervisor_.orders.put(port_);
  next_supervisor_.orders.get<std::uint16_t>();
}

void recovery_cluster::offer(const std::string& prefill, const std::string& request,
                             computed so_far, std::uint32_t tokens) {
  if (prefill == survivor_) {
    live_[offer_at(*node_, request, so_far, tokens).value] = request;
    return;
  }
  const auto& to = processes_.at(prefill).orders;
  to.put('o');
  to.put(tokens);
  to.put(so_far);
  say(to, request);
  to.get<char>();
}

void recovery_cluster::ask(const std::string& decode, const std::string& prefill,
                           const std::string& request, std::uint32_t tokens) {
  if (decode == survivor_) {
    live_[ask_at(*node_, options_, prefill, request, tokens).value] = request;
    return;
  }
  const auto& to = processes_.at(decode).orders;
  to.put('a');
  to.put(tokens);
  say(to, prefill);
  say(to, request);
  to.get<char>();
}

std::optional<recovery_cluster::ending> recovery_cluster::outcome(const std::string& request,
                                                                  std::chrono::milliseconds limit) {
  const auto until = clock_type::now() + limit;
  for (;;) {
    if (const auto found = ended_.find(request); found != ended_.end()) return found->second;
    if (clock_type::now() >= until) return std::nullopt;
    take(2ms);
  }
}

void recovery_cluster::rest(std::chrono::milliseconds time) {
  for (const auto until = clock_type::now() + time; clock_type::now() < until;) take(2ms);
}

void recovery_cluster::take(std::chrono::milliseconds timeout) {
  for (auto& e : node_->wait(timeout, 256)) {
    give_back(*node_, e);
    const auto live = live_.find(e.operation.value);
    if (live == live_.end()) continue;
    if (std::holds_alternative<event_done>(e.what)) {
      ended_[live->second] = {std::nullopt, clock_type::now()};
    }
    if (const auto* failed = std::get_if<event_failed>(&e.what)) {
      ended_[live->second] = {failed->why, clock_type::now()};
    }
  }
}

void recovery_cluster::acquaint(const std::string& prefill, const std::string& decode) {
  const auto request = "first" + std::to_string(++acquainted_);
  offer(prefill, request, computed::whole);
  ask(decode, prefill, request);
  const auto ended = outcome(request, 20s);
  if (!ended) die("the first transfer has no outcome");
  if (ended->failure) die("the first transfer failed: " + to_string(*ended->failure));
}

bool recovery_cluster::enter_own_network() {
  return ::unshare(CLONE_NEWNET) == 0 && ip("link set lo up") &&
         ip("rule add pref 100 lookup local") && ip("rule del pref 0");
}

void recovery_cluster::cut_prefill_0() {
  if (!ip("rule add pref 1 to 127.0.0.2 blackhole") ||
      !ip("rule add pref 2 from 127.0.0.2 blackhole")) {
    die("the wire could not be cut");
  }
}

}  // namespace troupe::bench
