#include "troupe/io/agent.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/eventfd.h>

#include "troupe/actors/door/door_thread.hpp"
#include "troupe/io/agent_core.hpp"
#include "troupe/kvcache/or_error.hpp"
#include "troupe/transport/os_error.hpp"
#include "troupe/transport/random.hpp"

namespace troupe::io {

namespace {

using std::chrono::milliseconds;

/// How long the destructor waits for peers that copy.
constexpr milliseconds longest_end{5000};
constexpr milliseconds longest_wait{std::chrono::hours{24 * 365}};
/// Of `max_notices` and `max_notice_bytes`: more than any program keeps, and small enough that
/// sums and multiples do not overflow.
constexpr std::uint64_t most_unread = std::uint64_t{1} << 48;

unexpected wrong(const std::string& what) {
  return fail(errc::invalid_config, "agent: " + what);
}

/// Whether the address is a wildcard (all interfaces), which a peer cannot dial.
bool is_wildcard(const std::string& host) {
  in_addr four{};
  in6_addr six{};
  if (::inet_pton(AF_INET, host.c_str(), &four) == 1) return four.s_addr == 0;
  return ::inet_pton(AF_INET6, host.c_str(), &six) == 1 &&
         std::memcmp(&six, &in6addr_any, sizeof six) == 0;
}

result<void> check(const agent_options& options) {
  if (options.name.empty() || options.name.size() > descriptor::max_name) {
    return wrong("its name has " + std::to_string(options.name.size()) + " bytes, expected 1 to " +
                 std::to_string(descriptor::max_name));
  }
  if (options.host.empty() || options.host.size() > descriptor::max_host) {
    return wrong("host has " + std::to_string(options.host.size()) + " bytes, expected 1 to " +
                 std::to_string(descriptor::max_host) + "; peers dial what it says");
  }
  // Without tls the door refuses a wildcard address, and says why.
  if (options.security.how == actors::door_security::mode::tls && is_wildcard(options.host)) {
    return wrong("host is '" + options.host +
                 "', which no peer can dial; give an address or a name of this host");
  }
  if (options.lanes < 1 || options.lanes > 64) {
    return wrong("lanes is " + std::to_string(options.lanes) + ", expected 1 to 64");
  }
  if (options.peer_silence < milliseconds{100} || options.connect_timeout < milliseconds{1}) {
    return wrong("peer_silence must be at least 100 ms and connect_timeout at least 1 ms");
  }
  if (options.grant_timeout < milliseconds{1}) {
    return wrong("grant_timeout is " + std::to_string(options.grant_timeout.count()) +
                 " ms, expected at least 1 ms");
  }
  if (options.max_peers < 1 || options.max_transfers < 1) {
    return wrong("max_peers and max_transfers must be at least 1");
  }
  if (options.max_notices < least_notices || options.max_notice_bytes < least_notice_bytes) {
    return wrong("max_notices must be at least " + std::to_string(least_notices) +
                 " and max_notice_bytes " + std::to_string(least_notice_bytes) +
                 ": peers may send that much before they ask");
  }
  if (options.max_notices > most_unread || options.max_notice_bytes > most_unread) {
    return wrong("max_notices is " + std::to_string(options.max_notices) +
                 " and max_notice_bytes is " + std::to_string(options.max_notice_bytes) +
                 ", the most of each is " + std::to_string(most_unread));
  }
  return {};
}

}  // namespace

std::string_view to_string(state now) noexcept {
  switch (now) {
    case state::prepared: return "prepared";
    case state::active: return "active";
    case state::done: return "done";
    case state::failed: return "failed";
    case state::cancelled: return "cancelled";
  }
  return "unknown";
}

milliseconds bounded(milliseconds wait) noexcept {
  return std::clamp(wait, milliseconds{0}, longest_wait);
}

result<std::unique_ptr<agent>> agent::create(agent_options options) {
  if (auto ok = check(options); !ok) return fail(std::move(ok).error());
  return or_error("an agent begins", [&]() -> result<std::unique_ptr<agent>> {
    auto made = std::make_unique<agent_core>(std::move(options));
    if (auto ok = made->begin(); !ok) return fail(std::move(ok).error());
    return std::unique_ptr<agent>{std::move(made)};
  });
}

agent_core::agent_core(agent_options options)
    : options_{std::move(options)}, life_{transport::random_id()} {
  transport::random_bytes(token_);
}

result<void> agent_core::begin() {
  events_fd_ = actors::owned_fd{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  if (!events_fd_) {
    return fail(errc::overloaded, "no descriptor for events: " + transport::what_errno(errno) +
                                      "; allow the process more of them (ulimit -n)");
  }
  for (auto* const loop : {&loop_, &work_}) {
    auto made = actors::door_loop::create();
    if (!made) return fail(std::move(made).error());
    *loop = std::move(*made);
  }
  actors::door_options guarded;
  guarded.security = options_.security;
  auto door = actors::door::create(std::move(guarded));
  if (!door) return fail(std::move(door).error());
  door_ = std::move(*door);
  auto port = door_->listen(options_.host, options_.port, [this](actors::door_socket fd) {
    actors::owned_fd own{fd};
    auto owned = std::make_shared<actors::owned_fd>(std::move(own));
    loop_->post([this, owned] { let_in(std::move(*owned)); });
  });
  if (!port) return fail(std::move(port).error());
  port_ = *port;
  transport::endpoint_options with;
  with.self = life_;
  with.host = options_.host;
  with.num_workers = options_.threads;
  with.on_thread_lost = [this](const troupe::error& why) { on_thread_lost(why); };
  with.peer_silence = std::max(options_.peer_silence, milliseconds{2000});
  auto place = transport::endpoint::create(std::move(with));
  if (!place) return fail(std::move(place).error());
  place_ = std::move(*place);
  auto thread = actors::start_quiet_thread("troupe-agent", [this] { loop_->run(); });
  if (!thread) return fail(std::move(thread).error());
  loop_thread_ = std::move(*thread);
  thread = actors::start_quiet_thread("troupe-grants", [this] { work_->run(); });
  if (!thread) return fail(std::move(thread).error());
  work_thread_ = std::move(*thread);
  return {};
}

agent_core::~agent_core() {
  {
    const lock_type lock{mutex_};
    ending_ = true;
  }
  for (const auto& loop : {loop_.get(), work_.get()}) {
    if (loop != nullptr) loop->stop();
  }
  for (auto* const thread : {&loop_thread_, &work_thread_}) {
    if (thread->joinable()) thread->join();
  }
  door_.reset();  // after the threads that dial with it
  if (!place_) return;
  const auto until = std::chrono::steady_clock::now() + longest_end;
  for (const auto region : memories_.regions()) {
    const auto left =
        std::chrono::duration_cast<milliseconds>(until - std::chrono::steady_clock::now());
    static_cast<void>(place_->withdraw(region, std::max(left, milliseconds{0})));
  }
  std::vector<link_ptr> wires;
  {
    const lock_type lock{mutex_};
    for (const auto& [number, one] : links_) wires.push_back(one.wire);
  }
  for (const auto& wire : wires) wire->close();
  place_->stop();
  wires.clear();
  links_.clear();
  place_.reset();
  newcomers_.clear();
}

std::uint32_t agent_core::max_batches() const noexcept {
  return static_cast<std::uint32_t>(std::min<std::size_t>(options_.max_transfers, UINT32_MAX));
}

agent_core::link_ptr agent_core::wire_of(std::uint64_t link) const {
  const auto at = links_.find(link);
  return at == links_.end() ? nullptr : at->second.wire;
}

bool agent_core::wait_until(lock_type& lock, std::chrono::steady_clock::time_point until,
                            const std::function<bool()>& done) {
  while (!done()) {
    if (std::chrono::steady_clock::now() >= until) return false;
    if (options_.threads > 0) {
      changed_.wait_until(lock, until);
      continue;
    }
    lock.unlock();
    if (!place_->poll()) std::this_thread::yield();
    lock.lock();
  }
  return true;
}

}  // namespace troupe::io
