#include "troupe/actors/door/door_resolver.hpp"

#include <cstring>
#include <exception>
#include <memory>
#include <utility>

#include <netdb.h>
#include <netinet/in.h>
#include <resolv.h>

#include "troupe/actors/door/door_thread.hpp"

namespace troupe::actors {

namespace {

constexpr std::size_t max_threads = 4;
constexpr std::size_t max_waiting = 256;

result<std::vector<socket_address>> ask(const std::string& host, std::uint16_t port, int flags) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int code = ::getaddrinfo(host.empty() ? nullptr : host.c_str(),
                                 std::to_string(port).c_str(), &hints, &found);
  if (code != 0) {
    return fail(errc::peer_unreachable, "the name `" + host +
                                            "` does not resolve: " + ::gai_strerror(code) +
                                            "; write an address, or a name that this host knows");
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owned{found, &::freeaddrinfo};
  std::vector<socket_address> all;
  for (const auto* one = found; one != nullptr; one = one->ai_next) {
    socket_address address;
    if (one->ai_addrlen > sizeof address.storage) continue;
    std::memcpy(&address.storage, one->ai_addr, one->ai_addrlen);
    address.size = one->ai_addrlen;
    all.push_back(address);
  }
  return all;
}

/// Limits the calling thread's DNS queries to two tries of one second, instead of two of five.
void be_brief() {
  if (::res_init() != 0) return;
  _res.retrans = 1;
  _res.retry = 2;
}

}  // namespace

result<std::vector<socket_address>> addresses_of_number(const std::string& host,
                                                        std::uint16_t port) {
  if (host.empty()) return fail(errc::peer_unreachable, "the host is missing");
  return ask(host, port, AI_NUMERICHOST);
}

result<std::vector<socket_address>> addresses_of(const std::string& host, std::uint16_t port) {
  return ask(host, port, host.empty() ? AI_PASSIVE : 0);
}

door_resolver::door_resolver(lookup how) : all_{std::make_shared<shared>()} {
  all_->how = std::move(how);
}

door_resolver::~door_resolver() {
  {
    const std::lock_guard lock{all_->mutex};
    all_->ended = true;
    all_->waiting.clear();
  }
  all_->changed.notify_all();
}

result<void> door_resolver::look_up(std::string host, std::uint16_t port,
                                    std::chrono::steady_clock::time_point until, answer then) {
  const std::lock_guard lock{all_->mutex};
  if (all_->waiting.size() >= max_waiting) {
    return fail(errc::overloaded, "the name `" + host +
                                      "` was not looked up: " + std::to_string(max_waiting) +
                                      " others wait for the name servers already; write addresses, "
                                      "or mend the name servers");
  }
  if (all_->idle <= all_->waiting.size() && all_->threads < max_threads) {
    // Detached: the system's resolver may block the thread for minutes, and cannot be interrupted.
    auto thread = start_quiet_thread("troupe-resolver", [all = all_] { serve(all); });
    if (thread) {
      thread->detach();
      ++all_->threads;
    } else if (all_->threads == 0) {
      return fail(thread.error());
    }
  }
  all_->waiting.push_back({std::move(host), port, until, std::move(then)});
  all_->changed.notify_one();
  return {};
}

void door_resolver::serve(const std::shared_ptr<shared>& all) {
  be_brief();
  std::unique_lock lock{all->mutex};
  while (true) {
    ++all->idle;
    all->changed.wait(lock, [&] { return all->ended || !all->waiting.empty(); });
    --all->idle;
    if (all->ended) return;
    const auto asked = std::move(all->waiting.front());
    all->waiting.pop_front();
    if (std::chrono::steady_clock::now() >= asked.until) continue;
    lock.unlock();
    result<std::vector<socket_address>> found = fail(errc::overloaded, "");
    try {
      found = all->how(asked.host, asked.port);
    } catch (const std::exception& thrown) {
      found = fail(errc::overloaded,
                   "the name `" + asked.host + "` was not looked up: " + thrown.what());
    }
    lock.lock();
    if (all->ended) return;
    asked.then(std::move(found));
  }
}

}  // namespace troupe::actors
