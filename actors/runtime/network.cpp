#include "troupe/actors/runtime/network.hpp"

#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <stop_token>
#include <thread>
#include <utility>

#include <caf/actor_registry.hpp>
#include <caf/exit_reason.hpp>
#include <caf/io/basp_broker.hpp>
#include <caf/io/middleman.hpp>
#include <caf/send.hpp>

#include "troupe/actors/runtime/crash.hpp"
#include "troupe/actors/runtime/network_dialler.hpp"
#include "troupe/actors/runtime/network_stream.hpp"

namespace troupe::actors {

namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using transport::owned_fd;

/// How long the door may take to send CAF's last messages at the end of the process.
constexpr milliseconds last_words{200};

using registered_atom = caf::atom_constant<caf::atom("TroupeNet")>;
using broker_atom = caf::atom_constant<caf::atom("BASP")>;  // CAF's own name for it

/// CAF's only interface to connections: looked up by its name, as CAF's own modules do.
caf::actor broker_of(caf::actor_system& system) {
  return system.middleman().named_broker<caf::io::basp_broker>(broker_atom::value);
}

}  // namespace

/// Between the door's thread and CAF: lets nothing through once it is shut. Callbacks of the door
/// hold the gate, and nothing of CAF's.
class network::gate : public std::enable_shared_from_this<gate> {
 public:
  gate(caf::actor_system& system, door_options options)
      : system_{&system}, broker_{broker_of(system)} {
    auto made = door::create(std::move(options));
    if (made) {
      door_ = std::move(*made);
    } else {
      why_not_ = made.error();
    }
  }

  void begin() {
    dialler_ = system_->spawn<caf::hidden>(
        network_dialler, broker_, streams_,
        [weak = weak_from_this()](std::uint64_t attempt, const std::string& host,
                                  std::uint16_t port, steady_clock::time_point deadline) {
          const auto self = weak.lock();
          if (!self) return std::optional<troupe::error>{shut()};
          return self->dial(attempt, host, port, deadline);
        });
    system_->registry().put(registered_atom::value,
                            caf::actor_cast<caf::strong_actor_ptr>(dialler_));
  }

  result<std::uint16_t> publish(const caf::strong_actor_ptr& whom,
                                const std::set<std::string>& messages, const std::string& host,
                                std::uint16_t port) {
    if (!door_) return fail(*why_not_);
    // No authorised peer knows a port that the OS chose before we do.
    const auto bound = std::make_shared<std::atomic<std::uint16_t>>(port);
    auto listens = door_->listen(
        host, port,
        [self = weak_from_this(), whom = whom->address(), messages, bound](door_socket s) {
          owned_fd socket{s};
          if (const auto held = self.lock()) {
            held->admit(std::move(socket), whom, messages, *bound);
          }
        });
    if (listens) *bound = *listens;
    return listens;
  }

  void close(std::uint16_t port) {
    if (door_) door_->close(port);
    const std::lock_guard lock{mutex_};
    if (open_) caf::anon_send(broker_, caf::close_atom::value, port);
  }

  void shut_for_good() {
    const std::lock_guard lock{mutex_};
    if (!open_) return;
    open_ = false;
    system_->registry().erase(registered_atom::value);
    // The system waits for actors that were not told.
    send_with_patience([&] { caf::anon_send_exit(dialler_, caf::exit_reason::user_shutdown); });
    dialler_ = nullptr;
    broker_ = nullptr;
  }

  [[nodiscard]] door::counters count() const { return door_ ? door_->count() : door::counters{}; }

  [[nodiscard]] std::shared_ptr<open_streams> streams() const { return streams_; }

  /// Ends the door, after the gate was shut.
  void end_door() {
    std::shared_ptr<door> last;
    {
      const std::lock_guard lock{mutex_};
      last.swap(door_);
    }  // its destructor waits for its thread, which may be about to call us
  }

 private:
  static troupe::error shut() {
    return {errc::aborted, "the network of this process is being shut down"};
  }

  std::optional<troupe::error> dial(std::uint64_t attempt, const std::string& host,
                                    std::uint16_t port, steady_clock::time_point deadline) {
    std::shared_ptr<door> way;
    {
      const std::lock_guard lock{mutex_};
      if (!open_) return shut();
      way = door_;
    }
    if (!way) return why_not_;
    way->connect(host, port, deadline,
                 [weak = weak_from_this(), attempt](result<door_socket> outcome) {
                   dialled told{attempt, std::nullopt, nullptr};
                   if (outcome) {
                     owned_fd socket{*outcome};
                     told.socket = std::make_shared<const owned_fd>(std::move(socket));
                   } else {
                     told.failed = outcome.error();
                   }
                   if (const auto self = weak.lock()) self->tell(std::move(told));
                 });
    return std::nullopt;
  }

  void tell(dialled told) {
    const std::lock_guard lock{mutex_};
    if (open_) caf::anon_send(dialler_, std::move(told));
  }

  void admit(owned_fd socket, const caf::actor_addr& whom, const std::set<std::string>& messages,
             std::uint16_t port) {
    const std::lock_guard lock{mutex_};
    if (!open_) return;
    const auto actor = caf::actor_cast<caf::strong_actor_ptr>(whom);
    if (!actor || port == 0) return;
    // CAF greets the peer on behalf of that port, and its keep-alive ends a silent connection.
    caf::anon_send(broker_, caf::publish_atom::value,
                   streams_->open(*system_, std::move(socket), open_streams::side::admitted), port,
                   actor, messages);
  }

  caf::actor_system* system_;
  const std::shared_ptr<open_streams> streams_{std::make_shared<open_streams>()};
  std::shared_ptr<door> door_;
  std::optional<troupe::error> why_not_;
  std::mutex mutex_;  ///< guards the members below
  bool open_{true};
  caf::actor broker_;
  network_actor dialler_;
};

network_actor network_of(caf::actor_system& system) {
  return caf::actor_cast<network_actor>(system.registry().get(registered_atom::value));
}

void on_network_crash(caf::actor_system& system, std::function<void()> then) {
  on_crash(caf::actor_cast<caf::strong_actor_ptr>(broker_of(system)), std::move(then));
}

network::network(caf::actor_system& system, door_options options)
    : system_{&system}, gate_{std::make_shared<gate>(system, std::move(options))} {
  gate_->begin();
}

network::~network() {
  stop();
  const auto until = steady_clock::now() + last_words;
  while (gate_->count().pumped != 0 && steady_clock::now() < until) {
    std::this_thread::sleep_for(milliseconds{1});
  }
  gate_->end_door();
}

result<std::uint16_t> network::publish(const caf::strong_actor_ptr& whom,
                                       const std::set<std::string>& messages,
                                       const std::string& host, std::uint16_t port) {
  return gate_->publish(whom, messages, host, port);
}

void network::close(std::uint16_t port) {
  gate_->close(port);
}

void network::stop() {
  gate_->shut_for_good();
}

void network::cut() {
  gate_->streams()->cut();
}

std::jthread network::cut_in(milliseconds patience) {
  struct waiting {
    std::mutex mutex;
    std::condition_variable_any woken;
  };
  try {
    return std::jthread{[patience, streams = gate_->streams(),
                         by = std::make_unique<waiting>()](const std::stop_token& over) noexcept {
      std::unique_lock lock{by->mutex};
      by->woken.wait_for(lock, over, patience, [] { return false; });
      if (!over.stop_requested()) streams->cut();
    }};
  } catch (const std::exception&) {  // no thread or memory left, so nothing could cut them later
    cut();
    return {};
  }
}

door::counters network::count() const {
  return gate_->count();
}

}  // namespace troupe::actors
