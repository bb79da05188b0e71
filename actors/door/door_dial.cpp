#include "troupe/actors/door/door_dial.hpp"

#include <new>
#include <utility>

#include <sys/epoll.h>

#include "troupe/actors/door/door_sockets.hpp"
#include "troupe/transport/os_error.hpp"

namespace troupe::actors {

door_dial::door_dial(door_loop& loop, std::string host, std::uint16_t port, clock::time_point until,
                     std::shared_ptr<const door_credentials> credentials)
    : loop_{loop},
      host_{std::move(host)},
      port_{port},
      until_{until},
      credentials_{std::move(credentials)} {}

void door_dial::begin(door_resolver& resolver, outcome then) {
  then_ = std::move(then);
  if (auto number = addresses_of_number(host_, port_)) {
    on_addresses(std::move(number));
    return;
  }
  const auto self = shared_from_this();
  timer_ = loop_.call_at(until_, [self] {
    self->timer_ = 0;
    self->finish(fail(errc::deadline,
                      "the name was not looked up in time; the name servers are "
                      "slow or silent: mend them, or write an address"));
  });
  // Weak: a resolver that does not answer must not keep an ended dial alive.
  auto asked = resolver.look_up(
      host_, port_, until_,
      [&loop = loop_, weak = weak_from_this()](result<std::vector<socket_address>> found) {
        loop.post([weak, found = std::move(found)] {
          if (const auto dial = weak.lock()) dial->on_addresses(found);
        });
      });
  if (!asked) finish(fail(asked.error()));
}

void door_dial::abort() {
  finish(fail(errc::aborted, "this node is ending"));
}

void door_dial::give_up(troupe::error why) {
  finish(fail(std::move(why)));
}

void door_dial::on_addresses(result<std::vector<socket_address>> found) {
  if (!then_) return;
  stop_waiting();
  if (!found) {
    finish(fail(found.error()));
    return;
  }
  addresses_ = std::move(*found);
  last_ = {errc::peer_unreachable, "the host has no address"};
  if (credentials_->mode != door_security::mode::tls) {
    // Without tls, any server on another machine, or on the way there, would be trusted.
    const auto others =
        std::erase_if(addresses_, [](const auto& address) { return !is_loopback(address); });
    if (others != 0) {
      last_ = {errc::invalid_config,
               "it is not a loopback address and security.mode is not tls: anyone who answers "
               "there, or on the way, would be taken for a node; set security.mode: tls, and give "
               "a command the deployment's file instead of HOST:PORT"};
    }
  }
  try_next();
}

void door_dial::try_next() {
  const auto self = shared_from_this();
  while (next_ < addresses_.size()) {
    const auto left = static_cast<std::int64_t>(addresses_.size() - next_);
    auto fd = begin_connect(addresses_[next_++]);
    if (!fd) {
      last_ = fd.error();
      continue;
    }
    fd_ = std::move(*fd);
    watch_ = loop_.watch(fd_.get(), EPOLLOUT, [self](std::uint32_t) { self->on_connected(); });
    const auto now = clock::now();
    // An address that never answers must not use up the time for the addresses after it.
    timer_ = loop_.call_at(now + (until_ - now) / left, [self] {
      self->timer_ = 0;
      self->refused({errc::deadline,
                     "nothing answers there; the host is down, or a firewall drops "
                     "what is sent to this port"});
    });
    return;
  }
  finish(fail(last_));
}

void door_dial::on_connected() {
  const int why = connect_outcome(fd_.get());
  if (why == 0) {
    greet();
  } else if (why == ECONNREFUSED) {
    refused({errc::peer_unreachable, "nothing listens there (" + transport::what_errno(why) +
                                         "); start the node, or mend host and port"});
  } else if (why == ETIMEDOUT) {
    refused({errc::deadline, "nothing answers there (" + transport::what_errno(why) + ")"});
  } else {
    refused({errc::peer_unreachable, transport::what_errno(why) + "; mend the host or the route"});
  }
}

void door_dial::refused(troupe::error why) {
  const auto self = shared_from_this();
  stop_waiting();
  fd_.reset();
  last_ = std::move(why);
  try_next();
}

void door_dial::greet() {
  const auto self = shared_from_this();
  stop_waiting();
  greeting_ = std::make_shared<door_greeting>(loop_, std::move(fd_), door_handshake::role::client,
                                              port_, credentials_);
  greeting_->begin(until_, [self](result<proven_connection> how) { self->finish(std::move(how)); });
}

void door_dial::finish(result<proven_connection> how) {
  const auto self = shared_from_this();
  stop_waiting();
  fd_.reset();
  if (greeting_) greeting_->give_up();
  greeting_.reset();
  auto then = std::move(then_);
  then_ = nullptr;
  if (!then) return;
  if (!how) {
    try {
      how = fail(how.error().code, socket_text(host_, port_) + ": " + how.error().message);
    } catch (const std::bad_alloc&) {  // report the error without host and port
    }
  }
  then(std::move(how));
}

void door_dial::stop_waiting() {
  loop_.forget(watch_);
  loop_.cancel(timer_);
}

}  // namespace troupe::actors
