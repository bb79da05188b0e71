#include "troupe/actors/door/door.hpp"

#include <atomic>
#include <cerrno>
#include <future>
#include <optional>
#include <thread>
#include <unordered_set>
#include <utility>

#include <sys/socket.h>

#include "troupe/actors/door/door_credentials.hpp"
#include "troupe/actors/door/door_dial.hpp"
#include "troupe/actors/door/door_listener.hpp"
#include "troupe/actors/door/door_pump.hpp"
#include "troupe/actors/door/door_sockets.hpp"
#include "troupe/actors/door/door_thread.hpp"
#include "troupe/kvcache/or_error.hpp"
#include "troupe/transport/os_error.hpp"

namespace troupe::actors {

namespace {

using clock = std::chrono::steady_clock;

constexpr std::chrono::seconds look_time{1};
constexpr const char* no_listening = "cannot listen at the cluster port";

/// Passes on one sentence a second, with the number of those left out.
class door_notices {
 public:
  explicit door_notices(std::function<void(const std::string&)> to) : to_{std::move(to)} {}

  void tell(std::string sentence) {
    if (!to_) return;
    const auto now = clock::now();
    if (last_ && now - *last_ < std::chrono::seconds{1}) {
      ++left_out_;
      return;
    }
    last_ = now;
    if (left_out_ > 0) sentence += " (and " + std::to_string(left_out_) + " more like it)";
    left_out_ = 0;
    to_(sentence);
  }

  /// For sentences told only once: never left out.
  void tell_surely(const std::string& sentence) const {
    if (to_) to_(sentence);
  }

 private:
  std::function<void(const std::string&)> to_;
  std::optional<clock::time_point> last_;
  std::uint64_t left_out_{0};
};

/// The public calls, and the state owned by the loop's thread.
class door_here final : public door {
 public:
  door_here(door_options options, door_credential_watch credentials,
            std::unique_ptr<door_loop> loop)
      : mode_{options.security.how},
        credentials_{std::move(credentials)},
        tell_credentials_{{options.credentials}, options.notice},
        notices_{options.notice},
        loop_{std::move(loop)},
        guests_{*loop_, {options.patience, options.max_strangers}, reports()} {
    loop_->on_exception([this](const std::string& what) {
      notices_.tell("the work on a connection was given up: " + what);
    });
  }

  ~door_here() override {
    if (!thread_.joinable()) return;
    loop_->stop();
    thread_.join();
  }

  result<void> begin() {
    if (mode_ != door_security::mode::open) loop_->post([this] { look_at_credentials(); });
    auto thread = start_quiet_thread("troupe-door", [this] {
      loop_->run();
      wind_up();
    });
    if (!thread) return fail(thread.error());
    thread_ = std::move(*thread);
    return {};
  }

  result<std::uint16_t> listen(const std::string& host, std::uint16_t port,
                               std::function<void(door_socket)> admitted) override {
    auto fd = listen_at(host, port);
    if (!fd) return fail(fd.error());
    if (mode_ != door_security::mode::tls && !is_loopback(address_of_socket(fd->get()))) {
      return fail(errc::invalid_config,
                  "cannot listen at " + socket_text(host, port) +
                      ": other machines can reach it and security.mode is not tls, so that anyone "
                      "there could take the node over; set security.mode: tls (`troupe certs init "
                      "DIR` makes what it needs), or listen at 127.0.0.1");
    }
    const auto bound = transport::tcp::bound_port(fd->get());
    const auto loopback = mode_ == door_security::mode::tls
                              ? loopback_notice(host, address_of_socket(fd->get()))
                              : std::string{};
    // Shared, because a posted call must be copyable.
    auto shared = std::make_shared<owned_fd>(std::move(*fd));
    // The caller waits for the outcome, so an exception becomes an error, too.
    const auto open = [this, shared, bound, loopback, admitted = std::move(admitted)] {
      if (!loopback.empty() && told_loopback_.insert(loopback).second)
        notices_.tell_surely(loopback);
      return guests_.open(std::move(*shared), bound, [this, admitted](proven_connection who) {
        if (const auto plain = hand_out(std::move(who))) {
          admitted(*plain);
        } else {
          notices_.tell("a connection was dropped: " + plain.error().message);
        }
      });
    };
    result<void> opened;
    if (loop_->on_its_thread()) {
      loop_->run_posted();
      opened = or_error(no_listening, open);
    } else {
      const auto told = std::make_shared<std::promise<result<void>>>();
      loop_->post([open, told] { told->set_value(or_error(no_listening, open)); });
      opened = told->get_future().get();
    }
    if (!opened) return fail(opened.error());
    return bound;
  }

  void close(std::uint16_t port) override {
    if (loop_->on_its_thread()) {
      loop_->run_posted();
      guests_.close(port);
      return;
    }
    // Shared: the caller may return before the other thread has left `set_value`.
    const auto closed = std::make_shared<std::promise<void>>();
    loop_->post([this, port, closed] {
      const auto done = or_error("closing the port", [&] { guests_.close(port); });
      closed->set_value();
      if (!done) notices_.tell(done.error().message);
    });
    closed->get_future().wait();
  }

  void connect(const std::string& host, std::uint16_t port, clock::time_point deadline,
               std::function<void(result<door_socket>)> then) override {
    loop_->post([this, host, port, deadline, then = std::move(then)] {
      std::shared_ptr<door_dial> made;
      const auto begun = or_error("cannot connect", [&] {
        made = std::make_shared<door_dial>(*loop_, host, port, deadline, credentials());
        dials_.insert(made);
        made->begin(resolver_, [this, made, then](result<proven_connection> how) {
          dials_.erase(made);
          then(how ? hand_out(std::move(*how)) : fail(how.error()));
        });
      });
      if (begun) return;
      if (made) {
        made->give_up(begun.error());
        dials_.erase(made);
      } else {
        then(fail(begun.error()));
      }
    });
  }

  counters count() const override {
    return {admitted_.load(), refused_.load(), strangers_.load(), pumped_.load()};
  }

 private:
  door_listener::reports reports() {
    return {.credentials = [this] { return credentials(); },
            .notice = [this](const std::string& sentence) { notices_.tell(sentence); },
            .admitted = [this] { ++admitted_; },
            .refused = [this] { ++refused_; },
            .strangers = [this](std::uint32_t now) { strangers_ = now; }};
  }

  std::shared_ptr<const door_credentials> credentials() {
    return credentials_.current(clock::now(), tell_credentials_);
  }

  /// Runs periodically, so that replaced files are read and a near expiry is reported even if
  /// nobody connects.
  void look_at_credentials() {
    (void)loop_->call_at(clock::now() + look_time, [this] { look_at_credentials(); });
    (void)credentials();
  }

  /// Makes the socket that the caller gets for an admitted connection.
  result<door_socket> hand_out(proven_connection who) {
    if (!who.tls) return who.fd.release();
    int ends[2]{-1, -1};
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) != 0) {
      return fail(errc::overloaded,
                  "no sockets for the plain side: " + transport::what_errno(errno) +
                      "; allow the process more descriptors (ulimit -n)");
    }
    owned_fd ours{ends[0]}, pumped{ends[1]};
    auto pump = std::make_shared<door_pump>(*loop_, std::move(who.fd), std::move(who.tls),
                                            std::move(pumped));
    pumps_.insert(pump);
    ++pumped_;
    pump->begin([this, which = std::weak_ptr{pump}] {
      pumps_.erase(which.lock());
      --pumped_;
    });
    return ours.release();
  }

  /// On the loop's thread, after its last turn.
  void wind_up() {
    guests_.close();
    // End every dial, including those that callbacks begin when their dial is aborted.
    for (int round = 0; round < 2; ++round) {
      loop_->run_posted();
      // Extracted first: a dial that fails to report its end, out of memory, must not loop for
      // ever.
      while (!dials_.empty()) dials_.extract(dials_.begin()).value()->abort();
    }
    guests_.close();
    for (const auto& pump : pumps_) pump->stop();
    pumps_.clear();
    pumped_ = 0;
  }

  const door_security::mode mode_;
  door_credential_watch credentials_;
  door_credential_watch::listeners tell_credentials_;
  door_notices notices_;
  std::unordered_set<std::string> told_loopback_;  ///< once per name
  std::unique_ptr<door_loop> loop_;
  door_resolver resolver_;
  door_listener guests_;
  std::unordered_set<std::shared_ptr<door_dial>> dials_;
  std::atomic<std::uint64_t> admitted_{0}, refused_{0};
  std::unordered_set<std::shared_ptr<door_pump>> pumps_;
  std::atomic<std::uint32_t> strangers_{0}, pumped_{0};
  std::thread thread_;
};

}  // namespace

result<std::unique_ptr<door>> door::create(door_options options) {
  auto credentials = door_credential_watch::open(options.security);
  if (!credentials) return fail(credentials.error());
  auto loop = door_loop::create();
  if (!loop) return fail(loop.error());
  auto made =
      std::make_unique<door_here>(std::move(options), std::move(*credentials), std::move(*loop));
  if (auto began = made->begin(); !began) return fail(began.error());
  return std::unique_ptr<door>{std::move(made)};
}

}  // namespace troupe::actors
