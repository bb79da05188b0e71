#include "processes.hpp"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <optional>
#include <sstream>
#include <string_view>
#include <system_error>

#include "troupe/actors/host_options.hpp"
#include "troupe/actors/runtime/system.hpp"
#include "troupe/actors/supervisor/supervisor.hpp"

#include "cluster_fixture.hpp"

namespace troupe::engine_fuzz {

using namespace std::chrono_literals;
using testing::forked;
using testing::line_channel;

namespace {

/// The port in a line; empty if the line says something else.
std::optional<int> port_in(std::string_view line) {
  std::uint16_t port = 0;
  const auto* end = line.data() + line.size();
  const auto read = std::from_chars(line.data(), end, port);
  if (read.ec != std::errc{} || read.ptr != end) return std::nullopt;
  return port;
}

/// Follows orders, one per line. Answers "status" and "audit", after reporting everything new.
class follower {
 public:
  follower(const scenario& s, std::uint32_t node, line_channel& channel)
      : node_{make_local_node(s, node)}, channel_{channel} {}

  int run() {
    const auto first = channel_.order();
    if (!first) return 0;
    const auto supervisor_port = port_in(*first);
    // If another node fails to start, this one is stopped before its turn to start.
    if (!supervisor_port) return refuse(*first);
    const bool up = node_->start(*supervisor_port);
    tell_news();
    channel_.say(up ? "up " + std::to_string(node_->port()) : "down");
    if (!up) return 1;
    for (;;) {
      const auto line = channel_.hear(2ms);
      if (line && !follow(*line)) return 0;
      node_->pump();
    }
  }

 private:
  int refuse(const std::string& line) {
    const bool stops = line == "stop";
    channel_.say(stops ? "stopped" : "down, for `" + line + "` is no port of a supervisor");
    return stops ? 0 : 1;
  }

  bool follow(const std::string& line) {
    std::istringstream words{line};
    std::string verb;
    std::uint32_t number = 0;
    words >> verb >> number;
    if (verb == "round") {
      node_->begin_round(number);
      told_.clear();
    } else if (verb == "act") {
      node_->carry_out(number);
    } else if (verb == "give_up") {
      node_->give_up(number);
    } else if (verb == "woken") {
      node_->hear_of_wake();
    } else if (verb == "status") {
      node_->pump();
      tell_news();
      channel_.say("status " + std::to_string(node_->idle()) + " " +
                   std::to_string(node_->settled()) + " " + std::to_string(node_->progress()));
    } else if (verb == "audit") {
      node_->audit();
      tell_news();
      const auto& c = node_->counts();
      std::ostringstream out;
      out << "audited " << c.transfers << " " << c.arrived << " " << c.failed << " "
          << c.wrong_calls << " " << c.values << " " << c.bytes;
      channel_.say(out.str());
    } else if (verb == "open") {
      channel_.say("open " + node_->open_operations());
    } else if (verb == "stop") {
      tell_news();
      node_->stop();
      channel_.say("stopped");
      return false;
    }
    return true;
  }

  void tell_news() {
    for (; findings_told_ < node_->findings().size(); ++findings_told_) {
      auto text = node_->findings()[findings_told_];
      std::ranges::replace(text, '\n', ' ');
      channel_.say("finding " + text);
    }
    for (const auto& [key, how] : node_->ended()) {
      if (told_.contains(key)) continue;
      told_[key] = how;
      channel_.say("ended " + std::to_string(key.first) + " " +
                   std::to_string(static_cast<int>(key.second)) + " " + how);
    }
  }

  std::unique_ptr<fuzz_node> node_;
  line_channel& channel_;
  outcomes told_;
  std::size_t findings_told_{0};
};

class remote_node final : public fuzz_node {
 public:
  remote_node(const scenario& s, std::uint32_t node)
      : name_{s.name_of(node)}, child_{[&s, node, this](line_channel& channel) {
          testing::cluster::quiet(name_);
          return follower{s, node, channel}.run();
        }} {}

  bool start(int supervisor_port) override {
    child_.channel().say(std::to_string(supervisor_port));
    const auto answer = answer_to("up ");
    if (!answer) return false;
    const auto port = port_in(*answer);
    if (!port) {
      lose("its process is up at `" + *answer + "`, which is no port");
      return false;
    }
    port_ = *port;
    return true;
  }
  void begin_round(std::uint32_t index) override {
    ended_.clear();
    say("round", index);
  }
  void carry_out(std::uint32_t act_index) override { say("act", act_index); }
  void give_up(std::uint32_t request) override { say("give_up", request); }
  void hear_of_wake() override { say("woken", 0); }
  void pump() override {
    if (gone_ || stands_) return;
    child_.channel().say("status");
    const auto answer = answer_to("status ");
    if (!answer) return;
    std::istringstream words{*answer};
    words >> idle_ >> settled_ >> progress_;
  }
  bool idle() override { return gone_ || idle_; }
  bool settled() override { return gone_ || stands_ || settled_; }
  std::uint64_t progress() override { return progress_; }
  void audit() override {
    if (gone_) return;
    child_.channel().say("audit");
    const auto answer = answer_to("audited ");
    if (!answer) return;
    std::istringstream words{*answer};
    words >> counts_.transfers >> counts_.arrived >> counts_.failed >> counts_.wrong_calls >>
        counts_.values >> counts_.bytes;
  }
  int port() override { return port_; }
  std::string open_operations() override {
    if (gone_ || stands_) return {};
    child_.channel().say("open");
    return answer_to("open ").value_or("");
  }
  void stop() override {
    if (gone_) return;
    child_.channel().say("stop");
    (void)answer_to("stopped");
  }
  void die() override {
    child_.end(SIGKILL);
    gone_ = true;
  }
  void stand() override {
    child_.stop();
    stands_ = true;
  }
  void wake() override {
    if (!stands_) return;
    child_.signal(SIGCONT);
    stands_ = false;
    idle_ = settled_ = false;
  }

 private:
  void say(const char* verb, std::uint32_t number) {
    if (gone_ || stands_) return;
    idle_ = settled_ = false;
    child_.channel().say(std::string{verb} + " " + std::to_string(number));
  }
  /// The text behind `word` in the answer. Processes the reports before it.
  std::optional<std::string> answer_to(const std::string& word) {
    while (auto line = child_.channel().hear(2 * testing::wait_limit)) {
      if (line->starts_with(word)) return line->substr(word.size());
      if (line->starts_with("finding ")) {
        findings_.push_back(line->substr(8));
      } else if (line->starts_with("ended ")) {
        std::istringstream words{line->substr(6)};
        std::uint32_t request = 0;
        int what = 0;
        std::string how;
        words >> request >> what >> how;
        ended_[{request, static_cast<part>(what)}] = how;
      } else {
        lose("its process says `" + *line + "` where it should say `" + word + "...`");
        return std::nullopt;
      }
    }
    lose("its process ended, or answers no more");
    return std::nullopt;
  }
  /// Stops asking this node for anything.
  void lose(const std::string& why) {
    findings_.push_back(name_ + ": " + why);
    gone_ = true;
  }

  std::string name_;
  forked child_;
  int port_{0};
  bool gone_{false}, stands_{false}, idle_{true}, settled_{true};
  std::uint64_t progress_{0};
};

// -- the supervisor

class local_supervisor final : public fuzz_supervisor {
 public:
  explicit local_supervisor(const scenario& s) {
    if (const auto started = start(s); !started)
      std::fprintf(stderr, "supervisor: %s\n", to_string(started.error()).c_str());
  }
  int port() const override { return port_; }

 private:
  result<void> start(const scenario& s) {
    const auto deployment = deployment_of(s, 0);
    if (!deployment) return fail(deployment.error());
    auto options = actors::host_options_of(*deployment);
    if (!options) return fail(options.error());
    host_ = std::make_unique<actors::actor_host>(std::move(*options));
    const auto supervisor =
        actors::spawn_supervisor(host_->system(), actors::supervisor_options_from(*deployment));
    const auto bound = host_->publish(supervisor, "127.0.0.1", 0);
    if (!bound) return fail(bound.error());
    port_ = *bound;
    return {};
  }

  std::unique_ptr<actors::actor_host> host_;
  int port_{0};
};

class remote_supervisor final : public fuzz_supervisor {
 public:
  explicit remote_supervisor(const scenario& s)
      : child_{[&s](line_channel& channel) {
          testing::cluster::quiet("supervisor");
          const local_supervisor here{s};
          channel.say(std::to_string(here.port()));
          (void)channel.order();
          return 0;
        }} {
    port_ = port_in(child_.channel().hear().value_or("")).value_or(0);
  }
  int port() const override { return port_; }

 private:
  forked child_;
  int port_{0};
};

}  // namespace

std::unique_ptr<fuzz_node> make_remote_node(const scenario& s, std::uint32_t node) {
  return std::make_unique<remote_node>(s, node);
}

std::unique_ptr<fuzz_supervisor> start_supervisor(const scenario& s) {
  if (s.where == processes::several) return std::make_unique<remote_supervisor>(s);
  return std::make_unique<local_supervisor>(s);
}

}  // namespace troupe::engine_fuzz
