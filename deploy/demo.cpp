#include "troupe/deploy/demo.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <ostream>
#include <sstream>
#include <stop_token>
#include <thread>
#include <utility>
#include <vector>

#include <netinet/in.h>
#include <spdlog/fmt/fmt.h>
#include <spdlog/fmt/ranges.h>
#include <sys/socket.h>
#include <unistd.h>

#include "troupe/actors/cluster_client.hpp"
#include "troupe/actors/host_options.hpp"
#include "troupe/actors/request_carrier.hpp"
#include "troupe/config/deployment.hpp"
#include "troupe/config/parse.hpp"
#include "troupe/config/printable.hpp"
#include "troupe/deploy/child_process.hpp"
#include "troupe/deploy/interrupt_watch.hpp"
#include "troupe/deploy/reference_engine/carried_text.hpp"
#include "troupe/deploy/reference_engine/generation.hpp"
#include "troupe/deploy/stop_together.hpp"
#include "troupe/deploy/work_folder.hpp"

namespace troupe::deploy {

namespace {

using namespace std::chrono_literals;
using clock = std::chrono::steady_clock;
using config::printable;

constexpr std::uint32_t layers = 8;
constexpr std::uint32_t kv_heads = 4;
constexpr std::uint32_t head_dim = 32;
constexpr std::uint32_t block_tokens = 16;
constexpr std::uint32_t chunk_tokens = 64;
constexpr const char* dtype = "bf16";
constexpr auto start_patience = 20s;
/// Generous: a slow disk may delay their last log lines.
constexpr auto end_patience = 20s;
/// After a failure or Ctrl-C, when all of them are stopped at once.
constexpr auto rest_patience = 5s;

/// Time for one request. Attention compares every token with every token, so the longest prompt
/// takes minutes where a short one takes milliseconds; five times what two busy cores need.
std::chrono::milliseconds request_patience(std::size_t prompt_tokens, std::uint32_t max_tokens) {
  const std::uint64_t tokens = prompt_tokens + max_tokens;
  return 60s + std::chrono::duration_cast<std::chrono::milliseconds>(tokens * tokens * 10us);
}

constexpr const char* default_prompt =
    "A prefill engine reads this prompt once and fills a cache of keys and values, layer by layer. "
    "While it still computes, the layers that are done already travel to a decode engine in "
    "another "
    "process, which continues the text from there:";

std::string temporary_folder() {
  const char* named = std::getenv("TMPDIR");  // NOLINT(concurrency-mt-unsafe): nobody sets any
  return named != nullptr && *named != '\0' ? named : "/tmp";
}

/// A port on which no process listens now.
result<std::uint16_t> free_port() {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  const bool ok =
      fd >= 0 && ::bind(fd, generic, size) == 0 && ::getsockname(fd, generic, &size) == 0;
  if (fd >= 0) ::close(fd);
  if (!ok) return fail(errc::internal, "no free port on 127.0.0.1");
  return ntohs(address.sin_port);
}

std::string deployment_text(const demo_options& options, std::uint16_t port) {
  std::ostringstream yaml;
  const auto stage = [&](const char* name) {
    yaml << "  - name: " << name << "\n    role: " << name << "\n    engine: reference\n"
         << "    hosts: [127.0.0.1]\n    pool: {device: cpu, size: 64MiB}\n"
         // The machine may be busy otherwise, and a single silence would end the demo.
         << "    transport: {backend: " << options.backend << ", peer_silence: 10s}\n";
  };
  yaml << "cluster: demo\n"
       // This supervisor is never restarted.
       << "supervisor: {host: 127.0.0.1, port: " << port << ", state_file: none}\n"
       << "model: {layers: " << layers << ", kv_heads: " << kv_heads << ", head_dim: " << head_dim
       << ", dtype: " << dtype << ", block_tokens: " << block_tokens << "}\n"
       << "stages:\n";
  stage("prefill");
  stage("decode");
  // No retries: with one node of each kind no other node could continue a request.
  yaml << "edges:\n  - {from: prefill, to: decode, mode: " << options.mode << "}\n"
       << "limits: {retry_budget: 0}\n";
  return yaml.str();
}

/// The last lines of a node's log, to show why it ended.
std::string tail_of(const std::string& log) {
  std::ifstream in{log};
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) {
    lines.push_back("    " + line + "\n");
    if (lines.size() > 8) lines.erase(lines.begin());
  }
  std::string text;
  for (const auto& line : lines) text += line;
  return text;
}

std::string size_text(std::uint64_t bytes) {
  return fmt::format("{:.2f} MiB", static_cast<double>(bytes) / (1 << 20));
}

std::string ms_text(std::int64_t from_ns, std::int64_t to_ns) {
  return fmt::format("{:.1f} ms", static_cast<double>(to_ns - from_ns) / 1e6);
}

/// The processes of the demo.
class demo_nodes {
 public:
  struct node {
    std::string name;
    std::string log;
    child_process process;
  };

  demo_nodes(const work_folder& folder, std::string program)
      : folder_{folder}, program_{std::move(program)} {}

  result<void> start(const std::string& name) {
    const auto log = folder_.file(name + ".log");
    auto child = child_process::start(
        program_, {"node", folder_.file("deployment.yaml"), "--name", name}, log, orphan::dies);
    if (!child) return fail(child.error());
    auto started = std::make_unique<node>(node{name, log, std::move(*child)});
    const std::lock_guard lock{mutex_};
    nodes_.push_back(std::move(started));
    return {};
  }

  /// `peer_lost`, with the end of its log, if a process has ended.
  result<void> check_alive() {
    for (const auto& n : nodes_)
      if (const auto how = n->process.ended())
        return fail(errc::peer_lost,
                    n->name + " ended with " + *how + "; its last words:\n" + tail_of(n->log));
    return {};
  }

  /// Thread-safe.
  void terminate() const {
    const std::lock_guard lock{mutex_};
    for (const auto& n : nodes_) n->process.terminate();
  }

  /// Returns false if one had to be killed. The supervisor is the first that was started.
  bool stop(std::chrono::milliseconds patience, const std::function<bool()>& hurried = {}) {
    ending_group group;
    group.patience = patience;
    group.hurried = hurried;
    for (const auto& n : nodes_) {
      if (group.supervisor == nullptr) {
        group.supervisor = &n->process;
      } else {
        group.nodes.push_back(&n->process);
      }
    }
    return stop_together(group).empty();
  }

 private:
  const work_folder& folder_;
  std::string program_;
  mutable std::mutex mutex_;  ///< guards `nodes_`, which `terminate` reads
  std::vector<std::unique_ptr<node>> nodes_;
};

/// One prompt's way through the cluster.
struct outcome {
  reference::prefill_reply prefill;
  reference::decode_reply decode;
  std::string prefill_node, decode_node;
};

class demo {
 public:
  demo(const demo_options& options, std::ostream& out, const work_folder& folder)
      : options_{options},
        out_{out},
        folder_{folder},
        nodes_{folder, options.program.empty() ? own_program : options.program},
        watch_{[this] {
          interruption_.request_stop();
          nodes_.terminate();
        }} {}

  [[nodiscard]] bool interrupted() const noexcept { return watch_.interrupted(); }

  /// Returns whether every text was identical.
  result<bool> run() {
    if (auto ok = start(); !ok) return fail(ok.error());
    print_head();
    bool identical = true;
    for (std::uint32_t i = 0; i < options_.requests; ++i) {
      auto same = one_request(i);
      if (!same) return fail(explained(same.error()));
      identical &= *same;
    }
    print_link();
    carrier_.reset();
    client_.reset();
    std::optional<clock::time_point> told_again;
    const bool clean = nodes_.stop(end_patience, [&] {
      if (!told_again && interrupted()) told_again = clock::now();
      return told_again && clock::now() >= *told_again + rest_patience;
    });
    out_ << "identical: " << (identical ? "yes" : "NO")
         << (clean ? "" : "  (a node had to be killed)") << "\n";
    return identical && clean;
  }

  /// Stops the processes that still run.
  void stop() {
    nodes_.stop(rest_patience);
    carrier_.reset();
    client_.reset();
  }

 private:
  // -- the cluster

  result<void> start() {
    auto port = free_port();
    if (!port) return fail(port.error());
    supervisor_ = "127.0.0.1:" + std::to_string(*port);
    const auto text = deployment_text(options_, *port);
    std::ofstream{folder_.file("deployment.yaml")} << text;
    const auto deployment = config::parse(text, "demo");
    if (!deployment.value) return fail(errc::internal, config::to_string(deployment.issues));
    auto security = actors::door_security_of(*deployment.value);
    if (!security) return fail(security.error());
    security_ = std::move(*security);
    for (const auto* name : {"supervisor", "prefill-0", "decode-0"})
      if (auto ok = nodes_.start(name); !ok) return ok;
    return wait_until_up(*port);
  }

  result<void> wait_until_up(std::uint16_t port) {
    error last{errc::deadline, "nothing answered"};
    const auto until = clock::now() + start_patience;
    while (clock::now() < until) {
      if (interrupted()) return fail(errc::aborted, "interrupted");
      if (auto ok = nodes_.check_alive(); !ok) return ok;
      auto up = is_up(port);
      if (up && *up) return {};
      if (!up) last = up.error();
      std::this_thread::sleep_for(20ms);
    }
    return fail(errc::deadline,
                "the nodes did not come up; the last answer was " + to_string(last));
  }

  result<bool> is_up(std::uint16_t port) {
    if (!client_) {
      actors::cluster_client_options options;
      options.port = port;
      options.actors.security = security_;
      auto client = actors::cluster_client::connect(options);
      if (!client) return fail(client.error());
      client_ = std::move(*client);
      carrier_ = std::make_unique<actors::request_carrier>(*client_);
    }
    auto members = client_->members();
    if (!members) return fail(members.error());
    members_ = std::move(*members);
    const auto up = std::count_if(
        members_.members.begin(), members_.members.end(), [](const actors::member& m) {
          return m.state == static_cast<std::uint8_t>(actors::node_state::up);
        });
    return up == 2;
  }

  /// A node that died explains a failed request better than the request's own error.
  error explained(const error& why) {
    if (interrupted()) return {errc::aborted, "interrupted"};
    if (auto ok = nodes_.check_alive(); !ok) return ok.error();
    return why;
  }

  // -- requests

  result<bool> one_request(std::uint32_t index) {
    const auto prompt = reference::encode_text(options_.prompt.empty() ? std::string{default_prompt}
                                                                       : options_.prompt);
    const reference::sampling how{0.8f, index + 1, true};
    const std::string id = "demo-" + std::to_string(index + 1);
    const auto began = clock::now();
    auto done = send(id, prompt, how);
    if (!done) return fail(done.error());
    const auto total = clock::now() - began;
    auto alone = compute_alone(prompt, how);
    if (!alone) return fail(alone.error());
    const bool same = done->decode.text == *alone;
    print_request(id, *done, prompt.size(), total);
    print_texts(done->decode.text, *alone, same);
    return same;
  }

  result<outcome> send(const std::string& id, const std::vector<reference::token>& prompt,
                       const reference::sampling& how) {
    reference::text_order order;
    order.request = id;
    order.prompt = prompt;
    order.max_tokens = options_.max_tokens;
    order.chunk = chunk_tokens;
    order.how = how;
    order.from = "prefill";
    order.to = "decode";
    order.deadline = request_patience(prompt.size(), options_.max_tokens);
    auto what = reference::carried_text(order);
    what.stop = interruption_.get_token();
    auto carried = carrier_->carry(what);
    if (!carried) return fail(carried.error());
    outcome done;
    done.prefill_node = carried->where.prefill.front().name;
    done.decode_node = carried->where.decode.front().name;
    auto first = reference::prefill_reply_from(carried->prefill.front());
    if (!first) return fail(first.error());
    auto second = reference::decode_reply_from(carried->decode.front());
    if (!second) return fail(second.error());
    done.prefill = std::move(*first);
    done.decode = std::move(*second);
    return done;
  }

  /// Computes the same text in this process: no transfer, another cache, the same weights.
  result<reference::generation> compute_alone(const std::vector<reference::token>& prompt,
                                              const reference::sampling& how) {
    if (!model_) {
      auto model =
          reference::transformer::create(reference::attention_model(layers, kv_heads, head_dim, 1));
      if (!model) return fail(model.error());
      model_ = std::move(*model);
    }
    return reference::generate_alone(*model_, prompt, options_.max_tokens, how, dtype,
                                     block_tokens);
  }

  // -- output

  void print_head() {
    out_ << "supervisor " << supervisor_ << "; meanwhile: troupe status " << supervisor_
         << "\nnodes      ";
    for (const auto& m : members_.members)
      out_ << m.node.name << " (pid " << m.node.pid << ", " << m.node.host << ":" << m.node.port
           << ")  ";
    out_ << "\nmodel      " << layers << " layers, " << kv_heads << " KV heads of " << head_dim
         << ", " << dtype << ", blocks of " << block_tokens
         << " tokens; random weights, so the text is noise\nprompt     "
         << printable(options_.prompt.empty() ? default_prompt : options_.prompt) << "\n"
         << std::flush;
  }

  void print_request(const std::string& id, const outcome& done, std::size_t tokens,
                     clock::duration total) {
    out_ << id << "     " << tokens << " tokens, " << size_text(done.decode.bytes) << " from "
         << done.prefill_node << " to " << done.decode_node << " (" << options_.mode << ")\n"
         << "           prefill " << ms_text(done.prefill.started_ns, done.prefill.computed_ns);
    if (options_.mode == "write")
      out_ << "; " << std::lround(done.decode.landed_early * 100.0)
           << "% of the cache had landed before it ended";
    out_ << "; all of it was there " << ms_text(done.decode.computed_ns, done.decode.received_ns)
         << " after; " << options_.max_tokens << " tokens after "
         << std::chrono::duration_cast<std::chrono::milliseconds>(total).count() << " ms\n";
  }

  void print_texts(const reference::generation& moved, const reference::generation& alone,
                   bool same) {
    out_ << "  moved    " << printable(reference::decode_text(moved.tokens)) << "\n  alone    "
         << printable(reference::decode_text(alone.tokens)) << "\n";
    if (!same && moved.tokens == alone.tokens)
      out_ << "  the tokens agree, but not every bit of the logits\n";
    out_ << std::flush;
  }

  void print_link() {
    const auto report = client_->report("decode-0");
    if (!report) return;
    for (const auto& link : report->links)
      out_ << "link       decode-0 <-> " << link.peer << " over " << link.backend << ", "
           << link.lanes << (link.lanes == 1 ? " lane: " : " lanes: ") << link.reason << "\n";
  }

  const demo_options& options_;
  std::ostream& out_;
  const work_folder& folder_;
  demo_nodes nodes_;
  std::stop_source interruption_;
  interrupt_watch watch_;
  std::string supervisor_;  ///< its address
  actors::door_security security_;
  std::unique_ptr<actors::cluster_client> client_;
  std::unique_ptr<actors::request_carrier> carrier_;
  actors::membership members_;
  std::shared_ptr<const reference::transformer> model_;
};

result<void> check(const demo_options& options) {
  if (!transfer_mode_of(options.mode))
    return fail(errc::invalid_config, "--mode must be write or read, found " + options.mode);
  if (!config::backend_of(options.backend))
    return fail(errc::invalid_config,
                fmt::format("--backend must be one of {}, found {}",
                            fmt::join(config::backend_words(), ", "), options.backend));
  if (options.requests == 0 || options.requests > 1000)
    return fail(errc::invalid_config, "--requests must be 1 to 1000");
  if (options.prompt.size() > max_prompt_bytes)
    return fail(errc::invalid_config, "--prompt takes at most " + std::to_string(max_prompt_bytes) +
                                          " bytes, found " + std::to_string(options.prompt.size()));
  return {};
}

}  // namespace

int run_demo(const demo_options& options, std::ostream& out, std::ostream& complaints) {
  constexpr int failed = 1;
  constexpr int interrupted = 130;
  if (auto ok = check(options); !ok) {
    complaints << "troupe demo: " << to_string(ok.error()) << "\n";
    return failed;
  }
  auto folder = work_folder::make(temporary_folder());
  if (!folder) {
    complaints << "troupe demo: " << to_string(folder.error()) << "\n";
    return failed;
  }
  const auto remove_folder = [&] {
    if (auto ok = folder->remove(); !ok)
      complaints << "troupe demo: " << to_string(ok.error()) << "\n";
  };
  demo show{options, out, *folder};
  const auto identical = show.run();
  show.stop();
  if (show.interrupted()) {
    remove_folder();
    complaints << "troupe demo: interrupted; every process was stopped\n";
    return interrupted;
  }
  if (!identical) {
    folder->keep();
    complaints << "troupe demo: " << to_string(identical.error())
               << "\nThe deployment and the logs are in " << folder->file("") << "\n";
    return failed;
  }
  remove_folder();
  return *identical ? 0 : failed;
}

}  // namespace troupe::deploy
