#include "troupe/deploy/c/call_inbox.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include <sys/eventfd.h>
#include <unistd.h>

#include "troupe/kvcache/or_error.hpp"
#include "troupe/kvcache/or_undo.hpp"

namespace troupe::c {

result<std::unique_ptr<call_inbox>> call_inbox::make() {
  const int descriptor = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (descriptor < 0) {
    std::string why{"no descriptor for calls of frontends: "};
    why.append(std::strerror(errno)).append("; raise the limit of open files");
    return fail(errc::overloaded, std::move(why));
  }
  return std::unique_ptr<call_inbox>{new call_inbox{descriptor}};
}

call_inbox::~call_inbox() {
  close();
  ::close(descriptor_);
}

void call_inbox::tell_overdue(open_calls overdue) {
  for (auto& [id, one] : overdue) {
    // One that cannot be told is dropped unanswered: `aborted`. The others, and calls that were taken
    // meanwhile, must not be lost with it.
    (void)or_error("", [&answer = one.answer] {
      answer(fail(errc::deadline, "the engine did not answer the call in time"));
    });
  }
}

call_inbox::open_calls call_inbox::take_overdue() {
  open_calls overdue;
  const auto now = std::chrono::steady_clock::now();
  for (auto at = open_.begin(); at != open_.end();) {
    const auto one = at++;
    if (one->second.deadline <= now) overdue.insert(open_.extract(one));
  }
  if (!overdue.empty()) {
    std::erase_if(waiting_, [&](const waiting_call& one) { return overdue.contains(one.id); });
  }
  return overdue;
}

void call_inbox::put(call incoming) {
  open_calls overdue;
  bool takes = false;
  bool closed = false;
  {
    const std::lock_guard lock{mutex_};
    if (open_.size() >= max_open) overdue = take_overdue();
    closed = closed_;
    takes = !closed_ && open_.size() < max_open;
    if (takes) {
      const auto id = ++last_id_;
      waiting_.push_back({id, std::move(incoming.method), std::move(incoming.payload)});
      or_undo(
          [&] {
            open_.emplace(id, open_call{std::move(incoming.reply), incoming.deadline});
          },
          [&] { waiting_.pop_back(); });
      if (waiting_.size() == 1) (void)::eventfd_write(descriptor_, 1);
    }
  }
  tell_overdue(std::move(overdue));
  if (takes || closed) return;  // a closed inbox drops it unanswered: `aborted`
  incoming.reply(fail(errc::overloaded, "the engine has " + std::to_string(max_open) +
                                            " calls that it has not answered"));
}

std::vector<waiting_call> call_inbox::take(std::size_t max) {
  open_calls overdue;
  std::vector<waiting_call> out;
  {
    const std::lock_guard lock{mutex_};
    if (waiting_.empty() || max == 0) return {};
    out.reserve(std::min(max, waiting_.size()));
    overdue = take_overdue();
    while (!waiting_.empty() && out.size() < max) {
      out.push_back(std::move(waiting_.front()));
      waiting_.pop_front();
    }
    if (waiting_.empty()) {
      eventfd_t written = 0;
      (void)::eventfd_read(descriptor_, &written);
    }
  }
  tell_overdue(std::move(overdue));
  return out;
}

result<void> call_inbox::reply(std::uint64_t id, result<std::vector<std::uint8_t>> answer) {
  open_calls::node_type one;
  {
    const std::lock_guard lock{mutex_};
    const auto found = open_.find(id);
    if (found == open_.end()) {
      std::string why{"there is no call "};
      why.append(std::to_string(id)).append(" to answer, or it was answered");
      return fail(errc::not_found, std::move(why));
    }
    one = open_.extract(found);
  }
  or_undo([&] { one.mapped().answer(std::move(answer)); },
          [&] {
            const std::lock_guard lock{mutex_};
            if (!closed_) open_.insert(std::move(one));
          });
  return {};
}

void call_inbox::close() {
  open_calls dropped;  // destroyed, which answers them, without the lock
  const std::lock_guard lock{mutex_};
  closed_ = true;
  dropped.swap(open_);
}

}  // namespace troupe::c
