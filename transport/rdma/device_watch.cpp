#include "troupe/transport/rdma/device_watch.hpp"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <utility>

#include <fcntl.h>
#include <sys/epoll.h>

#include "troupe/transport/os_error.hpp"
#include "troupe/transport/rdma/device_events.hpp"

namespace troupe::transport::rdma {

device_watch::device_watch(std::vector<std::shared_ptr<device>> rails, progress_engine& engine,
                           std::function<void(const std::string&)> notice)
    : rails_{std::move(rails)},
      engine_{engine},
      notice_{std::move(notice)},
      watches_(rails_.size()) {}

void device_watch::start(const std::shared_ptr<device_watch>& self) {
  const std::lock_guard lock{mutex_};
  for (std::size_t i = 0; i < rails_.size(); ++i) {
    const int fd = rails_[i]->context()->async_fd;
    ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
    auto watch = engine_.watch(fd, EPOLLIN, self, i);
    if (watch) {
      watches_[i] = *watch;
    } else if (notice_) {
      notice_("RDMA device " + rails_[i]->name() +
              ": its events cannot be watched: " + to_string(watch.error()));
    }
  }
}

void device_watch::stop() {
  for (std::size_t i = 0; i < rails_.size(); ++i) unwatch(i);
}

void device_watch::unwatch(std::size_t rail) {
  std::optional<watch_id> watch;
  {
    const std::lock_guard lock{mutex_};
    watch = std::exchange(watches_[rail], std::nullopt);
  }
  if (watch) engine_.unwatch(*watch);
}

void device_watch::add(const std::shared_ptr<rdma_link>& link) {
  const std::lock_guard lock{mutex_};
  std::erase_if(links_, [](const auto& known) { return known.expired(); });
  links_.push_back(link);
}

std::vector<std::shared_ptr<rdma_link>> device_watch::links() {
  const std::lock_guard lock{mutex_};
  std::vector<std::shared_ptr<rdma_link>> alive;
  for (const auto& known : links_) {
    if (auto link = known.lock()) alive.push_back(std::move(link));
  }
  return alive;
}

bool device_watch::on_ready(std::uint64_t key, std::uint32_t /*events*/) {
  bool any = false;
  auto& rail = *rails_[key];
  ibv_async_event event{};
  errno = 0;
  while (::ibv_get_async_event(rail.context(), &event) == 0) {
    any = true;
    take(rail, event);
    errno = 0;
  }
  if (const int why = errno; why != EAGAIN && why != EINTR) {
    // The kernel has removed the device. Its descriptor would stay readable for ever.
    unwatch(key);
    fail_device(rail, "is gone: " + what_errno(why));
    any = true;
  }
  return any;
}

void device_watch::take(device& rail, ibv_async_event event) {
  const auto what = event.event_type;
  const auto meaning = meaning_of(what);
  // Read the owner before acknowledging the event: destroying a queue waits, perhaps under its
  // link's lock, until its events are acknowledged, and the queue may be gone right afterwards.
  queue_owner owner = 0;
  std::uint8_t port = 0;
  switch (meaning.about) {
    case event_subject::queue_pair: owner = owner_of(*event.element.qp); break;
    case event_subject::completion_queue: owner = owner_of(*event.element.cq); break;
    case event_subject::port: port = static_cast<std::uint8_t>(event.element.port_num); break;
    case event_subject::device:
    case event_subject::other: break;
  }
  ::ibv_ack_async_event(&event);

  const auto sentence = std::string{meaning.what_happened} + " (" + std::string{meaning.name} + ")";
  if (meaning.about == event_subject::port) {
    if (port == rail.port()) take_port_event(rail, what);
  } else if (meaning.about == event_subject::device) {
    fail_device(rail, sentence);
  } else if (meaning.effect == event_effect::ends) {
    for (const auto& link : links()) {
      if (link->owns(owner)) link->queue_failed(rail, sentence);
    }
  } else if (meaning.effect == event_effect::told) {
    notice(rail, what,
           "RDMA device " + rail.name() + " says " + std::string{meaning.name} +
               ", which should not affect what Troupe uses; everything goes on");
  }
}

/// Links survive a port that is down for a moment, and break by themselves if it stays down.
void device_watch::take_port_event(device& rail, ibv_event_type what) {
  rail.record().note(what, port_record::clock::now());
  rail.look_again();
  notice(rail, what,
         "RDMA device " + rail.name() + " port " + std::to_string(rail.port()) + " " +
             port_event_text(what));
}

void device_watch::fail_device(device& rail, const std::string& what) {
  const auto sentence = "RDMA device " + rail.name() + " " + what;
  // Before its links are told, so that they are not made again with this device.
  if (!rail.mark_failed(sentence)) return;
  notice(
      rail, IBV_EVENT_DEVICE_FATAL,
      sentence +
          "; its links break, and no new ones are made over it until this node is started again");
  for (const auto& link : links()) link->device_failed(rail, sentence);
}

/// Drops immediate repetitions (some drivers report every event twice) and limits the notices of a
/// flapping port, but always reports that a port is up again.
void device_watch::notice(const device& rail, ibv_event_type what, const std::string& sentence) {
  constexpr std::chrono::seconds at_once{1};
  constexpr std::chrono::seconds a_while{10};
  constexpr std::uint32_t in_a_while = 6;
  std::uint32_t count = 0;
  {
    const std::lock_guard lock{mutex_};
    auto& last = said_[&rail];
    const auto now = port_record::clock::now();
    const bool again = sentence == last.sentence && now - last.at < at_once;
    last.sentence = sentence;
    last.at = now;
    if (again) return;
    if (now - last.since >= a_while) {
      last.since = now;
      last.count = 0;
    }
    const bool must_be_told =
        what == IBV_EVENT_DEVICE_FATAL || (what == IBV_EVENT_PORT_ACTIVE && last.told_down);
    if (++last.count > in_a_while && !must_be_told) return;
    count = std::min(last.count, in_a_while);
    if (what == IBV_EVENT_PORT_ERR) last.told_down = true;
    if (what == IBV_EVENT_PORT_ACTIVE) last.told_down = false;
  }
  if (!notice_) return;
  notice_(count < in_a_while ? sentence
                             : sentence + "; more of these are not reported for some seconds");
}

}  // namespace troupe::transport::rdma
