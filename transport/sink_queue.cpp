#include "troupe/transport/sink_queue.hpp"

#include <utility>

namespace troupe::transport {

namespace {

template <class... Fs>
struct overloaded : Fs... {
  using Fs::operator()...;
};
template <class... Fs>
overloaded(Fs...) -> overloaded<Fs...>;

}  // namespace

void sink_queue::frame(std::span<const std::byte> bytes) {
  {
    const std::lock_guard lock{mutex_};
    if (delivering_) {
      waiting_bytes_.fetch_add(bytes.size(), std::memory_order_relaxed);
      waiting_.emplace_back(frame_event{bytes.begin(), bytes.end()});
      return;
    }
    delivering_ = true;
  }
  sink_->on_frame(bytes);
  deliver_rest();
}

void sink_queue::push(event e) {
  {
    const std::lock_guard lock{mutex_};
    if (delivering_) {
      waiting_.push_back(std::move(e));
      return;
    }
    delivering_ = true;
  }
  call(e);
  deliver_rest();
}

void sink_queue::deliver_rest() {
  while (true) {
    std::unique_lock lock{mutex_};
    if (waiting_.empty()) {
      delivering_ = false;
      return;
    }
    auto next = std::move(waiting_.front());
    waiting_.pop_front();
    lock.unlock();
    call(next);
  }
}

void sink_queue::call(event& e) {
  std::visit(overloaded{[&](up_event) { sink_->on_up(); },
                        [&](completion& done) { sink_->on_completion(std::move(done)); },
                        [&](quiescent_event q) { sink_->on_quiescent(q.transfer); },
                        [&](broken_event& b) {
                          if (!muted_.load(std::memory_order_acquire)) sink_->on_broken(b.why);
                        },
                        [&](frame_event& bytes) {
                          sink_->on_frame(bytes);
                          waiting_bytes_.fetch_sub(bytes.size(), std::memory_order_relaxed);
                        }},
             e);
}

}  // namespace troupe::transport
