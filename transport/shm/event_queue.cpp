#include "troupe/transport/shm/event_queue.hpp"

#include <utility>

namespace troupe::transport::shm {

namespace {

template <class... Fs>
struct overload : Fs... {
  using Fs::operator()...;
};
template <class... Fs>
overload(Fs...) -> overload<Fs...>;

}  // namespace

void event_queue::put(link_event event) {
  const std::lock_guard lock{mutex_};
  events_.push_back(std::move(event));
}

void event_queue::deliver() {
  std::unique_lock lock{mutex_};
  if (calling_ || events_.empty()) return;
  calling_ = true;
  run(lock);
}

void event_queue::deliver(link_event event) {
  std::unique_lock lock{mutex_};
  if (calling_ || !events_.empty()) {
    events_.push_back(std::move(event));
    if (calling_) return;
    calling_ = true;
  } else {
    calling_ = true;
    lock.unlock();
    call(event);
    lock.lock();
  }
  run(lock);
}

void event_queue::run(std::unique_lock<std::mutex>& lock) {
  while (!events_.empty()) {
    auto event = std::move(events_.front());
    events_.pop_front();
    lock.unlock();
    call(event);
    lock.lock();
  }
  calling_ = false;
}

std::size_t event_queue::waiting() const {
  const std::lock_guard lock{mutex_};
  return events_.size();
}

void event_queue::call(link_event& event) {
  std::visit(overload{
                 [&](up_event&) { sink_->on_up(); },
                 [&](completion& done) { sink_->on_completion(std::move(done)); },
                 [&](frame_event& frame) { sink_->on_frame(frame.bytes); },
                 [&](quiescent_event& q) { sink_->on_quiescent(q.transfer); },
                 [&](broken_event& b) { sink_->on_broken(std::move(b.why)); },
             },
             event);
}

}  // namespace troupe::transport::shm
