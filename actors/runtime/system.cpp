#include "troupe/actors/runtime/system.hpp"

#include <algorithm>
#include <exception>
#include <mutex>
#include <new>
#include <random>
#include <system_error>
#include <thread>
#include <utility>

#include <caf/actor_registry.hpp>
#include <caf/exit_reason.hpp>
#include <caf/io/middleman.hpp>
#include <caf/scoped_actor.hpp>
#include <caf/send.hpp>

#include "troupe/actors/base/phrases.hpp"
#include "troupe/actors/logging.hpp"
#include "troupe/actors/messages/messages.hpp"
#include "troupe/actors/runtime/network.hpp"
#include "troupe/actors/runtime/scheduler.hpp"

namespace troupe::actors {

namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

struct host_config;

/// Starts one of CAF's modules. CAF must not hear of a thread that cannot be started: its constructor
/// would destroy threads that run, and ask for the clock of a scheduler that is gone. The system is
/// made without that module, and its maker looks at `start_failure`.
template <class Start>
void start_module(const caf::actor_system& system, Start&& start) noexcept;

class host_scheduler final : public scheduler {
 public:
  using scheduler::scheduler;
  static caf::actor_system::module* make(caf::actor_system& system,
                                         caf::detail::type_list<> /*none*/) {
    return new host_scheduler{system};  // NOLINT: the actor system takes it
  }

 protected:
  void start() override {
    start_module(system(), [this] { scheduler::start(); });
  }
};

class host_middleman final : public caf::actor_system::module {
 public:
  explicit host_middleman(caf::actor_system& system)
      : system_{system}, real_{caf::io::middleman::make(system, {})} {}
  void start() override {
    start_module(system_, [this] { real_->start(); });
  }
  void stop() override { real_->stop(); }
  void init(caf::actor_system_config& config) override { real_->init(config); }
  id_t id() const override { return real_->id(); }
  void* subtype_ptr() override { return real_->subtype_ptr(); }

  static caf::actor_system::module* make(caf::actor_system& system,
                                         caf::detail::type_list<> /*none*/) {
    return new host_middleman{system};  // NOLINT: the actor system takes it
  }

 private:
  caf::actor_system& system_;
  std::unique_ptr<caf::actor_system::module> real_;
};

struct host_config : caf::actor_system_config {
  explicit host_config(const actor_host_options& options) {
    load<host_scheduler>();
    load<host_middleman>();
    add_message_types<caf::id_block::troupe>();
    add_message_type<node_actor>("troupe::actors::node_actor");
    set("scheduler.max-threads", std::max<std::size_t>(options.threads, 1));
    set("middleman.heartbeat-interval", caf::timespan{options.network_heartbeat});
    set("middleman.connection-timeout", caf::timespan{options.connection_timeout});
    set("middleman.workers",
        std::size_t{0});  // messages are decoded where they arrive, which saves a hop
  }

  mutable std::exception_ptr start_failure;  ///< of the first module that did not start
};

template <class Start>
void start_module(const caf::actor_system& system, Start&& start) noexcept {
  const auto& config = static_cast<const host_config&>(system.config());
  if (config.start_failure) return;
  try {
    start();
  } catch (...) {
    config.start_failure = std::current_exception();
  }
}

/// Never destroys a system that cannot be ended. It stays reachable, so that leak checkers do not
/// report it.
void leave_behind(std::unique_ptr<caf::actor_system_config>& config,
                  std::unique_ptr<caf::actor_system>& system) noexcept {
  struct remains {
    caf::actor_system_config* config;
    caf::actor_system* system;
    remains* next;
  };
  static remains* all = nullptr;
  static std::mutex mutex;
  const std::lock_guard lock{mutex};
  // Without memory for it, it is not reachable any more, which is better than an end of the process.
  if (auto* const left = new (std::nothrow) remains{config.get(), system.get(), all}) all = left;
  (void)config.release();
  (void)system.release();
}

/// Throws what the start of one of its modules threw.
std::unique_ptr<caf::actor_system> make_system(const actor_host_options& options,
                                               std::unique_ptr<caf::actor_system_config>& config) {
  auto made = std::make_unique<host_config>(options);
  auto& failure = made->start_failure;
  config = std::move(made);
  auto system = std::make_unique<caf::actor_system>(*config);
  if (const auto why = failure) {
    leave_behind(config, system);
    std::rethrow_exception(why);
  }
  return system;
}

door_options door_options_of(const door_security& security) {
  door_options options;
  options.security = security;
  options.notice = [](const std::string& sentence) { logger("door")->warn("{}", sentence); };
  options.credentials.renewed = [](const std::string& sentence) {
    logger("door")->info("{}", sentence);
  };
  options.credentials.failed = [](const std::string& sentence) {
    logger("door")->error("{}", sentence);
  };
  return options;
}

}  // namespace

actor_host::actor_host(actor_host_options options)
    : options_{std::move(options)},
      system_{make_system(options_, config_)},
      network_{std::make_unique<network>(*system_, door_options_of(options_.security))} {
  const caf_thread_scope made_it;
  own_threads_ = system_->detached_actors();
}

actor_host::~actor_host() {
  (void)shutdown();
  published_.clear();
  owned_.clear();
  network_->stop();
  // The system's destructor waits without a bound for actors and for the threads of detached ones,
  // and such a thread waits until nothing references its actor.
  const auto over = [this] {
    return system_->registry().running() == 0 && system_->detached_actors() <= own_threads_;
  };
  const auto deadline = steady_clock::now() + options_.shutdown_timeout;
  bool forgot_timers = false;
  while (!over() && steady_clock::now() < deadline) {
    // An actor's delayed messages to itself reference it, and would keep its thread until they are
    // due.
    if (!forgot_timers && system_->registry().running() == 0) {
      system_->clock().cancel_all();
      forgot_timers = true;
    }
    std::this_thread::sleep_for(milliseconds{2});
  }
  if (!over()) {
    logger("system")->error(
        "the actor system is left behind with everything that its actors hold: one of its actors "
        "does not end, or code outside of it holds an actor that has a thread of its own");
    network_->cut();
    leave_behind(config_, system_);
    return;
  }
  {
    // The last messages reach the kernel in less time, unless a peer takes nothing more.
    const auto cutting = network_->cut_in(options_.shutdown_timeout / 2);
    system_.reset();
  }
  network_.reset();
}

door::counters actor_host::door_counters() const {
  return network_->count();
}

bool actor_host::shutdown(const std::function<void()>& meanwhile) {
  if (ended_) return *ended_;
  for (const published& p : published_) {
    network_->close(p.port);
    caf::anon_send_exit(p.actor, caf::exit_reason::user_shutdown);
  }
  for (const auto& actor : owned_) caf::anon_send_exit(actor, caf::exit_reason::user_shutdown);
  published_.clear();
  owned_.clear();
  const auto deadline = steady_clock::now() + options_.shutdown_timeout;
  while (system_->registry().running() != 0 && steady_clock::now() < deadline) {
    if (meanwhile) meanwhile();
    std::this_thread::sleep_for(milliseconds{2});
  }
  ended_ = system_->registry().running() == 0;
  if (!*ended_) {
    logger("system")->warn(
        "{} actors had not ended {} ms after they were told to; going without them",
        system_->registry().running(), options_.shutdown_timeout.count());
  }
  return *ended_;
}

result<std::uint16_t> actor_host::publish_actor(const caf::strong_actor_ptr& whom,
                                                const std::set<std::string>& messages,
                                                const std::string& host, std::uint16_t port) {
  auto bound = network_->publish(whom, messages, host, port);
  if (bound) {
    published_.push_back({whom, *bound});
  } else {
    caf::anon_send_exit(whom, caf::exit_reason::user_shutdown);
  }
  return bound;
}

result<caf::strong_actor_ptr> actor_host::connect_actor(const std::set<std::string>& messages,
                                                        const std::string& host, std::uint16_t port,
                                                        milliseconds timeout) {
  if (port == 0) return fail(errc::invalid_config, "port 0 of " + host + " cannot be connected to");
  const auto dialler = network_of(*system_);
  if (!dialler) return fail(errc::aborted, "this process has shut its network down");
  const caf_thread_scope visit;
  caf::scoped_actor self{*system_};
  result<caf::strong_actor_ptr> outcome = fail(errc::internal, "the network layer gave no answer");
  self->request(dialler, caf::infinite, caf::connect_atom::value, host, port, messages,
                caf::timespan{timeout})
      .receive(
          [&](reached& answer) {
            if (answer.failed) {
              outcome = fail(std::move(*answer.failed));
            } else {
              outcome = std::move(answer.actor);
            }
          },
          [&](caf::error& e) {
            outcome = fail(errc::aborted, "the network layer ended: " + system_->render(e));
          });
  return outcome;
}

void set_log_handlers(caf::scheduled_actor& self, std::string component) {
  const auto log = logger(component);
  const auto limiter = std::make_shared<log_limiter>();
  self.set_default_handler(
      [log, limiter](caf::scheduled_actor*, caf::message_view& x) -> caf::result<caf::message> {
        if (const auto held_back = limiter->pass()) {
          log->warn(
              "a message that this actor does not know was dropped ({} elements; {} more such "
              "since the last line)",
              x.content().size(), *held_back);
        }
        return caf::sec::unexpected_message;
      });
  self.set_error_handler([log](caf::scheduled_actor* me, caf::error& e) {
    log->warn("an error came instead of a reply: {}", me->system().render(e));
  });
  self.set_down_handler([log](caf::scheduled_actor* me, caf::down_msg& down) {
    log->debug("actor {} ended: {}", to_string(down.source), me->system().render(down.reason));
  });
  self.set_exception_handler(
      [log](caf::scheduled_actor*, std::exception_ptr& thrown) -> caf::error {
        try {
          std::rethrow_exception(thrown);
        } catch (const std::exception& e) {
          log->error("internal: the actor ends because of an exception: {}", e.what());
        } catch (...) {
          log->error("internal: the actor ends because of an exception of an unknown kind");
        }
        return caf::exit_reason::unhandled_exception;
      });
}

std::uint64_t draw_incarnation() {
  std::random_device device;
  std::uint64_t drawn = 0;
  while (drawn == 0) drawn = (std::uint64_t{device()} << 32) | device();
  return drawn;
}

}  // namespace troupe::actors
