#include "troupe/deploy/cli/bench_source.hpp"

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <future>
#include <optional>
#include <thread>
#include <utility>

#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include "troupe/actors/base/phrases.hpp"
#include "troupe/actors/engine.hpp"
#include "troupe/config/print.hpp"
#include "troupe/deploy/child_process.hpp"
#include "troupe/deploy/cli/announcement.hpp"
#include "troupe/deploy/cli/bench_sender.hpp"
#include "troupe/deploy/interrupt_watch.hpp"
#include "troupe/transport/owned_fd.hpp"

namespace troupe::deploy::cli {

namespace {

using clock = std::chrono::steady_clock;
using namespace std::chrono_literals;
using transport::owned_fd;

constexpr std::chrono::milliseconds start_patience = 20s;
/// How often a wait checks for an interruption.
constexpr auto look_interval = 100ms;

unexpected was_interrupted() {
  return fail(errc::aborted, "interrupted");
}

/// The deployment in memory, which a child process reads as a file and which leaves nothing behind.
result<owned_fd> in_memory(const config::deployment& deployment) {
  const auto text = config::print(deployment);
  owned_fd fd{::memfd_create("deployment.yaml", 0)};  // a child inherits it
  if (!fd || ::write(fd.get(), text.data(), text.size()) != static_cast<ssize_t>(text.size())) {
    return fail(errc::internal,
                std::string{"cannot hand the deployment to a process: "} + std::strerror(errno));
  }
  return fd;
}

std::string path_of(const owned_fd& fd) {
  return "/proc/self/fd/" + std::to_string(fd.get());
}

class companion_process final : public bench_companion {
 public:
  /// Runs `troupe` with the arguments; `--announce-fd` is added.
  static result<std::unique_ptr<companion_process>> start(std::string name,
                                                          std::vector<std::string> arguments) {
    auto heard = announcements::open();
    if (!heard) return fail(heard.error());
    arguments.insert(arguments.end(), {"--announce-fd", std::to_string(heard->far_end())});
    auto process = child_process::start(own_program, std::move(arguments), {}, orphan::dies);
    if (!process) return fail(process.error());
    heard->close_far_end();
    return std::unique_ptr<companion_process>{
        new companion_process{std::move(name), std::move(*process), std::move(*heard)}};
  }

  /// Waits for that announcement.
  result<announcement> wait_for(announcement::kind wanted, const bench_interruption& interrupted) {
    const auto until = clock::now() + start_patience;
    while (clock::now() < until) {
      while (const auto what = heard_.take()) {
        if (what->what == wanted) return *what;
        if (what->what == announcement::kind::failed) failure_ = what->text;
      }
      if (heard_.over()) return fail(explain_end());
      if (interrupted()) {
        process_.kill();  // it has nothing to clean up yet
        return was_interrupted();
      }
      pollfd fd{heard_.fd(), POLLIN, 0};
      (void)::poll(&fd, 1, static_cast<int>(look_interval.count()));
    }
    return fail(errc::deadline, name_ + " was not ready in time");
  }

  result<void> check() override {
    while (const auto what = heard_.take())
      if (what->what == announcement::kind::failed) failure_ = what->text;
    if (failure_.empty() && !heard_.over()) return {};
    return fail(explain_end());
  }

  void terminate() override { process_.terminate(); }
  [[nodiscard]] child_process* process() override { return &process_; }

 private:
  companion_process(std::string name, child_process process, announcements heard)
      : name_{std::move(name)}, process_{std::move(process)}, heard_{std::move(heard)} {}

  error explain_end() {
    if (!failure_.empty()) return {errc::peer_lost, name_ + " failed: " + failure_};
    (void)process_.wait(1s);
    return {errc::peer_lost, name_ + " ended with " + process_.ended().value_or("a closed pipe")};
  }

  const std::string name_;
  child_process process_;
  announcements heard_;
  std::string failure_;
};

/// The prefill engine in this process.
class source_thread final : public bench_companion {
 public:
  source_thread(std::unique_ptr<engine> node, const bench_options& options)
      : node_{std::move(node)}, options_{options}, outcome_{promise_.get_future()}, thread_{[this] {
          promise_.set_value(run_bench_sender(*node_, options_, stop_));
        }} {}
  ~source_thread() override {
    stop_ = true;
    thread_.join();
    node_->stop();
  }

  result<void> check() override {
    if (outcome_.wait_for(0s) != std::future_status::ready) return {};
    if (!ended_) ended_ = outcome_.get();
    return *ended_;
  }

  void terminate() override { stop_ = true; }

 private:
  std::unique_ptr<engine> node_;
  const bench_options options_;
  std::atomic<bool> stop_{false};
  std::promise<result<void>> promise_;
  std::future<result<void>> outcome_;
  std::optional<result<void>> ended_;
  std::thread thread_;
};

result<std::unique_ptr<engine>> start_prefill(const config::deployment& deployment,
                                              const bench_options& options) {
  engine_options how;
  how.polling = options.polling;
  return engine::start(deployment, bench_prefill_node, std::move(how));
}

}  // namespace

result<void> wait_taken_in(engine& node, const bench_interruption& interrupted) {
  const auto until = clock::now() + start_patience;
  for (;;) {
    auto taken_in = node.wait_registered(look_interval);
    if (taken_in || taken_in.error().code != errc::deadline) return taken_in;
    if (interrupted()) return was_interrupted();
    if (clock::now() >= until) {
      return fail(errc::deadline, "not registered within " + actors::time_text(start_patience) +
                                      "; " + taken_in.error().message);
    }
  }
}

result<bench_supervisor> start_bench_supervisor(const config::deployment& deployment,
                                                const std::string& log_level,
                                                const bench_interruption& interrupted) {
  const auto file = in_memory(deployment);
  if (!file) return fail(file.error());
  auto process = companion_process::start(
      "the supervisor process",
      {"node", path_of(*file), "--name", "supervisor", "--log-level", log_level});
  if (!process) return fail(process.error());
  const auto listening = (*process)->wait_for(announcement::kind::listening, interrupted);
  if (!listening) return fail(listening.error());
  return bench_supervisor{std::move(*process), listening->port};
}

result<std::unique_ptr<bench_companion>> start_bench_source(const config::deployment& deployment,
                                                            const bench_options& options,
                                                            const std::string& log_level,
                                                            const bench_interruption& interrupted) {
  if (options.in_process) {
    auto node = start_prefill(deployment, options);
    if (!node) return fail(node.error());
    if (auto ok = wait_taken_in(**node, interrupted); !ok) return fail(ok.error());
    return std::unique_ptr<bench_companion>{
        std::make_unique<source_thread>(std::move(*node), options)};
  }
  const auto file = in_memory(deployment);
  if (!file) return fail(file.error());
  std::vector<std::string> arguments{"bench", "--source", path_of(*file), "--log-level", log_level};
  const auto load = arguments_of(options);
  arguments.insert(arguments.end(), load.begin(), load.end());
  auto process = companion_process::start("the prefill process", std::move(arguments));
  if (!process) return fail(process.error());
  if (const auto ready = (*process)->wait_for(announcement::kind::registered, interrupted); !ready)
    return fail(ready.error());
  return std::unique_ptr<bench_companion>{std::move(*process)};
}

result<void> run_bench_source(const config::deployment& deployment, const bench_options& options,
                              int announce_fd) {
  const announcer tell{announce_fd};
  std::atomic<bool> stop{false};
  const interrupt_watch watch{[&] { stop = true; }};
  const auto run = [&]() -> result<void> {
    auto node = start_prefill(deployment, options);
    if (!node) return fail(node.error());
    if (auto ok = wait_taken_in(**node, [&] { return stop.load(); }); !ok) return ok;
    tell.say({announcement::kind::registered, {}, 0});
    if (auto sent = run_bench_sender(**node, options, stop); !sent && !stop) return sent;
    // The other side decides when the run is over: it may still be busy with the last transfers.
    while (!stop) std::this_thread::sleep_for(10ms);
    (*node)->stop();
    return {};
  };
  auto ran = run();
  if (!ran) tell.say({announcement::kind::failed, to_string(ran.error()), 0});
  return ran;
}

}  // namespace troupe::deploy::cli
