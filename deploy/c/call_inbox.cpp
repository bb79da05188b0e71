#include "troupe/deploy/c/call_inbox.hpp"

#include <cerrno>
#include <cstring>
#include <utility>

#include <sys/eventfd.h>
#include <unistd.h>

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

void call_inbox::put(call incoming) {
  {
    const std::lock_guard lock{mutex_};
    if (!closed_ && open_.size() < max_open) {
      const auto id = ++last_id_;
      waiting_.push_back({id, std::move(incoming.method), std::move(incoming.payload)});
      open_.emplace(id, std::move(incoming.reply));
      if (waiting_.size() == 1) (void)::eventfd_write(descriptor_, 1);
      return;
    }
    if (closed_) return;  // dropped unanswered: `aborted`
  }
  incoming.reply(fail(errc::overloaded, "the engine has 4096 calls that it has not answered"));
}

std::vector<waiting_call> call_inbox::take(std::size_t max) {
  const std::lock_guard lock{mutex_};
  std::vector<waiting_call> out;
  while (!waiting_.empty() && out.size() < max) {
    out.push_back(std::move(waiting_.front()));
    waiting_.pop_front();
  }
  if (!out.empty() && waiting_.empty()) {
    eventfd_t written = 0;
    (void)::eventfd_read(descriptor_, &written);
  }
  return out;
}

result<void> call_inbox::reply(std::uint64_t id, result<std::vector<std::uint8_t>> answer) {
  answer_call to;
  {
    const std::lock_guard lock{mutex_};
    const auto found = open_.find(id);
    if (found == open_.end()) {
      std::string why{"there is no call "};
      why.append(std::to_string(id)).append(" to answer, or it was answered");
      return fail(errc::not_found, std::move(why));
    }
    to = std::move(found->second);
    open_.erase(found);
  }
  to(std::move(answer));
  return {};
}

void call_inbox::close() {
  std::map<std::uint64_t, answer_call> dropped;  // destroyed, and so answered, without the lock
  const std::lock_guard lock{mutex_};
  closed_ = true;
  dropped.swap(open_);
}

}  // namespace troupe::c
