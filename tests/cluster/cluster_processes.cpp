#include "cluster_processes.hpp"

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <thread>

#include <fcntl.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "troupe/actors/host_options.hpp"
#include "troupe/config/parse.hpp"

#include "free_port.hpp"
#include "waiting.hpp"

namespace troupe::testing {

namespace {

using std::chrono::milliseconds;
using clock = std::chrono::steady_clock;

constexpr std::size_t lines_of_a_log = 12;

std::string last_lines(const std::string& path) {
  std::ifstream in{path};
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(std::move(line));
  std::string text;
  for (auto i = lines.size() - std::min(lines.size(), lines_of_a_log); i < lines.size(); ++i)
    text += "    " + lines[i] + "\n";
  return text;
}

std::string how_it_ended(int status) {
  if (WIFSIGNALED(status)) return "ended with signal " + std::to_string(WTERMSIG(status));
  return "ended with exit code " + std::to_string(WEXITSTATUS(status));
}

}  // namespace

std::vector<std::string> node_names(const cluster_shape& shape) {
  std::vector<std::string> names{"supervisor"};
  for (std::uint32_t i = 0; i < shape.prefills; ++i)
    names.push_back("prefill-" + std::to_string(i));
  for (std::uint32_t i = 0; i < shape.decodes; ++i) names.push_back("decode-" + std::to_string(i));
  return names;
}

cluster_processes::cluster_processes(cluster_shape shape, const network* net)
    : shape_{std::move(shape)},
      net_{net},
      file_{folder_.path() + "/cluster.yaml"},
      decode_file_{folder_.path() + "/decode.yaml"},
      violations_{folder_.path() + "/violations"},
      port_{net != nullptr ? std::uint16_t{7400} : free_port()},
      nodes_{node_names(shape_)} {
  nodes_.erase(nodes_.begin());
  security_ = shape_.secured ? make_credentials() : "{mode: none}";
  std::ofstream{file_} << yaml(16);
  std::ofstream{decode_file_} << yaml(shape_.decode_block_tokens);
}

cluster_processes::~cluster_processes() {
  for (const auto& [name, p] : processes_) {
    if (p.pid > 0) ::kill(p.pid, SIGKILL);
  }
  for (const auto& [name, p] : processes_) {
    if (p.pid > 0) ::waitpid(p.pid, nullptr, 0);
  }
}

std::string cluster_processes::host(const std::string& name) const {
  return net_ != nullptr ? net_->address(name) : "127.0.0.1";
}

std::string cluster_processes::make_credentials() const {
  const auto at = folder_.path() + "/certs";
  const pid_t child = ::fork();
  if (child == 0) {
    ::execl(TROUPE_COMMAND, TROUPE_COMMAND, "certs", "init", at.c_str(), "--cluster", "chaos",
            static_cast<char*>(nullptr));
    ::_exit(127);
  }
  if (child > 0) ::waitpid(child, nullptr, 0);
  return "{mode: tls, secret: " + at + "/cluster.secret, certificate: " + at +
         "/node.crt, key: " + at + "/node.key, ca: " + at + "/ca.crt}";
}

std::string cluster_processes::yaml(std::uint32_t block_tokens) const {
  std::ostringstream out;
  out << "cluster: chaos\nsupervisor: {host: " << host("supervisor") << ", port: " << port_
      << ", heartbeat_interval: " << shape_.heartbeat_interval.count()
      << "ms, heartbeat_timeout: " << shape_.heartbeat_timeout.count()
      << "ms, ease_in: 1s, state_file: " << folder_.path()
      << "/supervisor.state}\nsecurity: " << security_ << "\n"
      << "model: {layers: 4, kv_heads: 2, head_dim: 64, dtype: fp16, block_tokens: " << block_tokens
      << "}\n"
      << "limits: {transfer_deadline: 3s" << shape_.limits_more << "}\nstages:\n";
  const auto stage = [&](const std::string& role, std::uint32_t replicas) {
    out << "  - name: " << role << "\n    role: " << role << "\n    engine: external\n"
        << "    replicas: " << replicas << "\n    hosts: [";
    for (std::uint32_t i = 0; i < replicas; ++i)
      out << (i > 0 ? ", " : "") << host(role + "-" + std::to_string(i));
    out << "]\n    pool: {size: " << shape_.pool << "}\n    transport: {backend: " << shape_.backend
        << ", qp_per_transfer: 2, peer_silence: " << shape_.peer_silence.count() << "ms"
        << shape_.transport_more << "}\n";
  };
  stage("prefill", shape_.prefills);
  stage("decode", shape_.decodes);
  out << "edges:\n  - {from: prefill, to: decode, mode: " << shape_.mode << "}\n";
  return out.str();
}

// -- processes

void cluster_processes::start(const std::string& name) {
  auto& p = processes_[name];
  if (p.pid > 0) return;
  p.log = folder_.path() + "/" + name + "." + std::to_string(++p.lives) + ".log";
  std::vector<std::string> words;
  if (name == "supervisor") {
    words = {TROUPE_COMMAND, "node", file_, "--name", name};
  } else {
    words = {CLUSTER_NODE, name.starts_with("decode") ? decode_file_ : file_, name, violations_};
  }
  std::vector<char*> arguments;
  arguments.reserve(words.size() + 1);
  for (auto& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  const int space = net_ != nullptr ? net_->space(name) : -1;
  const int log = ::open(p.log.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  p.pid = ::fork();
  if (p.pid == 0) {
    // Only calls that are safe in the child of a process with threads.
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::dup2(log, STDOUT_FILENO);
    ::dup2(log, STDERR_FILENO);
    if (space < 0 || ::setns(space, CLONE_NEWNET) == 0) ::execv(arguments[0], arguments.data());
    ::_exit(127);
  }
  ::close(log);
}

void cluster_processes::start_all() {
  start("supervisor");
  for (const auto& name : nodes_) start(name);
}

void cluster_processes::kill(const std::string& name) {
  auto& p = processes_[name];
  if (p.pid <= 0) return;
  ::kill(p.pid, SIGKILL);
  ::waitpid(p.pid, nullptr, 0);
  p.pid = -1;
}

void cluster_processes::ask_to_end(const std::string& name) const {
  ::kill(pid(name), SIGTERM);
}

void cluster_processes::freeze(const std::string& name) const {
  ::kill(pid(name), SIGSTOP);
}

void cluster_processes::thaw(const std::string& name) const {
  ::kill(pid(name), SIGCONT);
}

bool cluster_processes::gone(const std::string& name) {
  auto& p = processes_[name];
  if (p.pid <= 0) return true;
  if (::waitpid(p.pid, nullptr, WNOHANG) != p.pid) return false;
  p.pid = -1;
  return true;
}

std::vector<unwanted_end> cluster_processes::revive() {
  std::vector<unwanted_end> ends;
  for (auto& [name, p] : processes_) {
    int status = 0;
    if (p.pid <= 0 || ::waitpid(p.pid, &status, WNOHANG) != p.pid) continue;
    p.pid = -1;
    ends.push_back({name, how_it_ended(status), last_lines(p.log)});
  }
  for (const auto& e : ends) start(e.name);
  return ends;
}

pid_t cluster_processes::pid(const std::string& name) const {
  const auto found = processes_.find(name);
  return found == processes_.end() || found->second.pid <= 0 ? -1 : found->second.pid;
}

// -- the state of the cluster

bool cluster_processes::are_up(actors::cluster_client& client) const {
  const auto list = client.members();
  const auto is_up = [&](const std::string& name) {
    return std::ranges::any_of(list->members, [&](const actors::member& m) {
      return m.node.name == name && static_cast<pid_t>(m.node.pid) == pid(name) &&
             m.state == static_cast<std::uint8_t>(actors::node_state::up);
    });
  };
  return list && std::ranges::all_of(nodes_, is_up);
}

bool cluster_processes::all_up(actors::cluster_client& client) const {
  return comes_true([&] { return are_up(client); }, milliseconds{50});
}

std::unique_ptr<actors::cluster_client> cluster_processes::client(milliseconds timeout) const {
  actors::cluster_client_options options;
  options.host = host("supervisor");
  options.port = port_;
  options.timeout = timeout;
  if (const auto parsed = config::load(file_); parsed.value) {
    if (auto host = actors::host_options_of(*parsed.value)) options.actors = *host;
  }
  return actors::cluster_client::unconnected(std::move(options));
}

std::vector<std::string> cluster_processes::violations() const {
  std::ifstream in{violations_};
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(std::move(line));
  return lines;
}

}  // namespace troupe::testing
