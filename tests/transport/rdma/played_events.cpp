#include "played_events.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <utility>

#include <gtest/gtest.h>

#include "backends.hpp"

using troupe::transport::rdma::played_events;

// The linker puts each __wrap function in place of the one of libibverbs (CMakeLists.txt).
// NOLINTBEGIN(bugprone-reserved-identifier)
extern "C" {
int __real_ibv_get_async_event(ibv_context* device, ibv_async_event* into);
int __wrap_ibv_get_async_event(ibv_context* device, ibv_async_event* into);
void __real_ibv_ack_async_event(ibv_async_event* what);
void __wrap_ibv_ack_async_event(ibv_async_event* what);
ibv_cq* __real_ibv_create_cq(ibv_context* device, int entries, void* context,
                             ibv_comp_channel* channel, int vector);
ibv_cq* __wrap_ibv_create_cq(ibv_context* device, int entries, void* context,
                             ibv_comp_channel* channel, int vector);
int __real_ibv_destroy_cq(ibv_cq* queue);
int __wrap_ibv_destroy_cq(ibv_cq* queue);
int __real_ibv_destroy_qp(ibv_qp* pair);
int __wrap_ibv_destroy_qp(ibv_qp* pair);

int __wrap_ibv_get_async_event(ibv_context* device, ibv_async_event* into) {
  switch (played_events::of_this_process().fetch(*device, *into)) {
    case played_events::answer::played: return 0;
    case played_events::answer::gone: errno = EIO; return -1;
    case played_events::answer::ask_the_device: break;
  }
  return __real_ibv_get_async_event(device, into);
}

void __wrap_ibv_ack_async_event(ibv_async_event* what) {
  if (!played_events::of_this_process().acknowledge(*what)) __real_ibv_ack_async_event(what);
}

ibv_cq* __wrap_ibv_create_cq(ibv_context* device, int entries, void* context,
                             ibv_comp_channel* channel, int vector) {
  auto* made = __real_ibv_create_cq(device, entries, context, channel, vector);
  if (made != nullptr) played_events::of_this_process().made(made);
  return made;
}

int __wrap_ibv_destroy_cq(ibv_cq* queue) {
  played_events::of_this_process().goes(queue);
  return __real_ibv_destroy_cq(queue);
}

int __wrap_ibv_destroy_qp(ibv_qp* pair) {
  played_events::of_this_process().goes(pair);
  return __real_ibv_destroy_qp(pair);
}
}
// NOLINTEND(bugprone-reserved-identifier)

namespace troupe::transport::rdma {

namespace {

std::string name_of(const ibv_context& device) {
  return ::ibv_get_device_name(device.device);
}

/// The queue that the event is about; null: no queue.
const void* subject_of(const ibv_async_event& what) {
  switch (what.event_type) {
    case IBV_EVENT_CQ_ERR: return what.element.cq;
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
    case IBV_EVENT_COMM_EST:
    case IBV_EVENT_SQ_DRAINED:
    case IBV_EVENT_PATH_MIG:
    case IBV_EVENT_PATH_MIG_ERR:
    case IBV_EVENT_QP_LAST_WQE_REACHED: return what.element.qp;
    default: return nullptr;
  }
}

bool same(const ibv_async_event& a, const ibv_async_event& b) {
  return a.event_type == b.event_type && a.element.qp == b.element.qp;
}

}  // namespace

played_events& played_events::of_this_process() {
  static played_events events;
  return events;
}

void played_events::play(const std::string& device, ibv_async_event what) {
  const std::lock_guard lock{mutex_};
  waiting_.push_back({device, what});
}

void played_events::take_away(const std::string& device) {
  const std::lock_guard lock{mutex_};
  gone_.push_back(device);
}

void played_events::ring(const std::string& device) {
  const auto port = "wire" + device.substr(3);  // "rxe0a" is on "wire0a"
  for (const auto* what : {"add", "del"}) {
    const auto command = std::string{"ip address "} + what + " 10.79.0.1/24 dev " + port;
    ASSERT_EQ(std::system(command.c_str()), 0) << command;
  }
}

std::vector<ibv_qp*> played_events::queue_pairs(const std::string& device) const {
  const std::lock_guard lock{mutex_};
  auto found = pairs_;
  std::erase_if(found, [&](const ibv_qp* pair) { return name_of(*pair->context) != device; });
  return found;
}

std::vector<ibv_cq*> played_events::completion_queues(const std::string& device) const {
  const std::lock_guard lock{mutex_};
  auto found = queues_;
  std::erase_if(found, [&](const ibv_cq* queue) { return name_of(*queue->context) != device; });
  return found;
}

std::size_t played_events::acknowledged() const {
  const std::lock_guard lock{mutex_};
  return acknowledged_;
}

std::size_t played_events::waiting() const {
  const std::lock_guard lock{mutex_};
  return waiting_.size();
}

std::size_t played_events::asked() const {
  const std::lock_guard lock{mutex_};
  return asked_;
}

void played_events::acknowledge_late() {
  const std::lock_guard lock{mutex_};
  late_ = true;
}

void played_events::reset() {
  const std::lock_guard lock{mutex_};
  waiting_.clear();
  gone_.clear();
  acknowledged_ = 0;
  late_ = false;
}

played_events::answer played_events::fetch(const ibv_context& device, ibv_async_event& into) {
  const std::lock_guard lock{mutex_};
  ++asked_;
  const auto name = name_of(device);
  if (std::ranges::find(gone_, name) != gone_.end()) return answer::gone;
  const auto next = std::ranges::find(waiting_, name, &played::device);
  if (next == waiting_.end()) return answer::ask_the_device;
  into = next->what;
  waiting_.erase(next);
  fetched_.push_back(into);
  return answer::played;
}

bool played_events::acknowledge(const ibv_async_event& what) {
  std::unique_lock lock{mutex_};
  const auto is_it = [&](const ibv_async_event& one) { return same(one, what); };
  if (std::ranges::none_of(fetched_, is_it)) return false;
  if (std::exchange(late_, false)) {
    const auto going = [&] { return std::ranges::find(going_, subject_of(what)) != going_.end(); };
    EXPECT_TRUE(changed_.wait_for(lock, contract::wait_limit, going))
        << "nobody destroys the queue";
  }
  fetched_.erase(std::ranges::find_if(fetched_, is_it));
  ++acknowledged_;
  changed_.notify_all();
  return true;
}

void played_events::made(ibv_qp* pair) {
  const std::lock_guard lock{mutex_};
  pairs_.push_back(pair);
}

void played_events::made(ibv_cq* queue) {
  const std::lock_guard lock{mutex_};
  queues_.push_back(queue);
}

void played_events::goes(const void* queue) {
  std::unique_lock lock{mutex_};
  going_.push_back(queue);
  changed_.notify_all();
  const auto about_it = [&](const ibv_async_event& one) { return subject_of(one) == queue; };
  if (!changed_.wait_for(lock, contract::wait_limit,
                         [&] { return std::ranges::none_of(fetched_, about_it); })) {
    ADD_FAILURE() << "a queue is destroyed by whoever has to acknowledge an event of it first: for "
                     "ever, were it not a test";
    std::erase_if(fetched_, about_it);
  }
  std::erase_if(waiting_, [&](const played& one) { return about_it(one.what); });
  std::erase_if(pairs_, [&](const ibv_qp* pair) { return pair == queue; });
  std::erase_if(queues_, [&](const ibv_cq* one) { return one == queue; });
  std::erase(going_, queue);
}

}  // namespace troupe::transport::rdma
