#include "troupe/actors/system.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <mutex>
#include <random>
#include <system_error>
#include <thread>
#include <utility>

#include <caf/actor_registry.hpp>
#include <caf/exit_reason.hpp>
#include <caf/io/middleman.hpp>
#include <caf/io/middleman_actor.hpp>
#include <caf/scoped_actor.hpp>
#include <caf/send.hpp>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "troupe/actors/logging.hpp"
#include "troupe/actors/phrases.hpp"
#include "troupe/actors/scheduler.hpp"

namespace troupe::actors {

namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

std::string endpoint_text(const std::string& host, std::uint16_t port) {
  return host + ":" + std::to_string(port);
}

struct socket_fd {
  int fd{-1};
  explicit socket_fd(int f) : fd{f} {}
  socket_fd(const socket_fd&) = delete;
  socket_fd& operator=(const socket_fd&) = delete;
  ~socket_fd() {
    if (fd >= 0) close(fd);
  }
};

struct addrinfo_deleter {
  void operator()(addrinfo* p) const noexcept { freeaddrinfo(p); }
};
using addresses = std::unique_ptr<addrinfo, addrinfo_deleter>;

result<addresses> resolve(const std::string& host, std::uint16_t port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int rc = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (rc != 0) {
    return fail(errc::peer_unreachable, "cannot resolve host '" + host + "': " + gai_strerror(rc) +
                                            "; check the name in the deployment's file");
  }
  return addresses{found};
}

/// 0, or the errno of connecting to one address within the time left.
int try_connect(const addrinfo& a, steady_clock::time_point deadline) {
  const socket_fd s{
      socket(a.ai_family, a.ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC, a.ai_protocol)};
  if (s.fd < 0) return errno;
  if (connect(s.fd, a.ai_addr, a.ai_addrlen) == 0) return 0;
  if (errno != EINPROGRESS) return errno;
  pollfd p{s.fd, POLLOUT, 0};
  int ready = 0;
  do {
    const auto left = std::chrono::ceil<milliseconds>(deadline - steady_clock::now()).count();
    ready = poll(&p, 1, static_cast<int>(std::max<long long>(left, 0)));
  } while (ready < 0 && errno == EINTR);
  if (ready == 0) return ETIMEDOUT;
  if (ready < 0) return errno;
  int number = 0;
  socklen_t size = sizeof(number);
  getsockopt(s.fd, SOL_SOCKET, SO_ERROR, &number, &size);
  return number;
}

/// Why a port could not be bound, found out by binding it once more. CAF says only that it failed.
troupe::error bind_failure(const std::string& host, std::uint16_t port) {
  const auto where = endpoint_text(host, port);
  const auto found = resolve(host, port);
  if (!found)
    return {errc::invalid_config, "cannot listen on " + where + ": " + found.error().message};
  const addrinfo& a = **found;
  const socket_fd s{socket(a.ai_family, a.ai_socktype | SOCK_CLOEXEC, a.ai_protocol)};
  const int on = 1;
  setsockopt(s.fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  const bool bound = bind(s.fd, a.ai_addr, a.ai_addrlen) == 0 && listen(s.fd, 1) == 0;
  const int number = bound ? 0 : errno;
  if (number == EADDRINUSE) {
    return {errc::already_exists,
            "cannot listen on " + where +
                ": the port is taken by another process; stop that process or "
                "configure another port"};
  }
  if (number == EADDRNOTAVAIL) {
    return {errc::invalid_config,
            "cannot listen on " + where +
                ": that is not an address of this host; configure one that is"};
  }
  return {errc::invalid_config,
          "cannot listen on " + where + ": " +
              (number == 0 ? "the network layer refused it, try again" : errno_text(number))};
}

struct host_config : caf::actor_system_config {
  explicit host_config(const actor_host_options& options) {
    load<scheduler>();
    load<caf::io::middleman>();
    add_message_types<caf::id_block::troupe>();
    add_message_type<node_actor>("troupe::actors::node_actor");
    set("scheduler.max-threads", std::max<std::size_t>(options.threads, 1));
    set("middleman.heartbeat-interval", caf::timespan{options.network_heartbeat});
    set("middleman.connection-timeout", caf::timespan{options.connection_timeout});
    set("middleman.workers",
        std::size_t{0});  // messages are decoded where they arrive: one hop less
  }
};

}  // namespace

actor_host::actor_host(actor_host_options options)
    : options_{options},
      config_{std::make_unique<host_config>(options)},
      system_{std::make_unique<caf::actor_system>(*config_)} {}

actor_host::~actor_host() {
  const bool ended = shutdown();
  published_.clear();
  owned_.clear();
  // The system's own end waits for the threads of detached actors without a bound, and such a thread
  // for the last one that knows its actor: an actor that has not ended may be that one.
  const auto deadline = steady_clock::now() + options_.shutdown_timeout;
  while (!ended && system_->detached_actors() != 0 && steady_clock::now() < deadline) {
    std::this_thread::sleep_for(milliseconds{2});
  }
  if (!ended && system_->detached_actors() != 0) {
    logger("system")->error(
        "the actor system is left behind with what its actors hold: a thread of it does not end");
    // Reachable for ever, so that nobody takes them for lost.
    static auto* const left_behind = new std::vector<
        std::pair<std::unique_ptr<caf::actor_system_config>, std::unique_ptr<caf::actor_system>>>;
    static std::mutex mutex;
    const std::lock_guard lock{mutex};
    left_behind->emplace_back(std::move(config_), std::move(system_));
    return;
  }
  system_.reset();
}

bool actor_host::shutdown(const std::function<void()>& meanwhile) {
  if (ended_) return *ended_;
  auto& network = system_->middleman();
  for (const published& p : published_) {
    caf::anon_send(network.actor_handle(), caf::close_atom_v, p.port);
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
    system_->await_actors_before_shutdown(false);
  }
  return *ended_;
}

result<std::uint16_t> actor_host::publish_actor(const caf::strong_actor_ptr& whom,
                                                std::set<std::string> messages,
                                                const std::string& host, std::uint16_t port) {
  caf::scoped_actor self{*system_};
  result<std::uint16_t> outcome = fail(errc::internal, "the network layer gave no answer");
  // SO_REUSEADDR: a node restarted at its port must not wait for connections in TIME_WAIT.
  self->request(system_->middleman().actor_handle(), std::chrono::seconds{10}, caf::publish_atom_v,
                port, whom, std::move(messages), host, true)
      .receive([&](std::uint16_t bound) { outcome = bound; },
               [&](caf::error&) { outcome = fail(bind_failure(host, port)); });
  if (outcome) {
    published_.push_back({whom, *outcome});
  } else {
    caf::anon_send_exit(whom, caf::exit_reason::user_shutdown);
  }
  return outcome;
}

bool was_cut_by_keep_alive(const caf::error& e) {
  return e == caf::sec::connection_timeout;
}

namespace {

/// One attempt. `deadline`: no answer in time, or cut by the keep-alive.
result<caf::strong_actor_ptr> connect_once(caf::actor_system& system,
                                           const std::set<std::string>& messages,
                                           const std::string& host, std::uint16_t port,
                                           milliseconds timeout) {
  const auto where = endpoint_text(host, port);
  caf::scoped_actor self{system};
  result<caf::strong_actor_ptr> outcome = fail(errc::internal, "the network layer gave no answer");
  self->request(system.middleman().actor_handle(), timeout, caf::connect_atom_v, host, port)
      .receive(
          [&](const caf::node_id&, caf::strong_actor_ptr& actor,
              const std::set<std::string>& offered) {
            if (actor == nullptr || !system.assignable(offered, messages)) {
              outcome = fail(errc::version_mismatch,
                             "what answers at " + where +
                                 " is not the kind of node that was expected there; check the "
                                 "address, and that every host runs the same release");
              return;
            }
            outcome = std::move(actor);
          },
          [&](caf::error& e) {
            if (e == caf::sec::request_timeout || was_cut_by_keep_alive(e)) {
              outcome = fail(errc::deadline, where + " did not answer");
              return;
            }
            outcome = fail(errc::peer_unreachable, "cannot connect to " + where + ": " +
                                                       system.render(e) +
                                                       "; is a node of Troupe running there?");
          });
  return outcome;
}

}  // namespace

result<caf::strong_actor_ptr> actor_host::connect_actor(const std::set<std::string>& messages,
                                                        const std::string& host, std::uint16_t port,
                                                        milliseconds timeout) {
  const auto where = endpoint_text(host, port);
  const auto deadline = steady_clock::now() + timeout;
  // CAF connects with a blocking call, one peer after the other: an address that swallows packets
  // would hold up every other connection for minutes.
  if (auto listens = probe_listener(host, port, timeout); !listens) return fail(listens.error());
  for (auto pause = milliseconds{20};; pause *= 2) {
    const auto left = std::chrono::ceil<milliseconds>(deadline - steady_clock::now());
    auto outcome = connect_once(*system_, messages, host, port, std::max(left, milliseconds{1}));
    if (outcome || outcome.error().code != errc::deadline) return outcome;
    if (steady_clock::now() + pause >= deadline) {
      std::this_thread::sleep_until(deadline);
      return fail(errc::deadline, "something listens at " + where + " but did not answer within " +
                                      std::to_string(timeout.count()) +
                                      " ms; it is frozen, or no node of Troupe");
    }
    // Cut by the keep-alive. Each attempt takes a place in the listener's queue until it is noticed
    // there, and CAF waits for ever in front of a full one: not too many of them.
    std::this_thread::sleep_for(pause);
  }
}

result<void> probe_listener(const std::string& host, std::uint16_t port, milliseconds timeout) {
  const auto where = endpoint_text(host, port);
  if (port == 0) return fail(errc::invalid_config, "port 0 of " + host + " cannot be connected to");
  const auto deadline = steady_clock::now() + timeout;
  const auto found = resolve(host, port);
  if (!found) return fail(found.error());
  int number = ETIMEDOUT;
  for (const addrinfo* a = found->get(); a != nullptr; a = a->ai_next) {
    number = try_connect(*a, deadline);
    if (number == 0) return {};
  }
  if (number == ETIMEDOUT) {
    return fail(errc::peer_unreachable, "cannot connect to " + where + ": no answer within " +
                                            std::to_string(timeout.count()) +
                                            " ms; check the address and the firewall");
  }
  return fail(errc::peer_unreachable, "cannot connect to " + where + ": " + errno_text(number) +
                                          "; is the node started, and its address right?");
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
