#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include <infiniband/verbs.h>

namespace troupe::transport::rdma {

/// Plays events that Soft-RoCE never raises: the failure of a queue or a device. It stands between
/// this process and the calls of libibverbs about asynchronous events, and keeps to their rules:
/// destroying a queue waits until the events fetched about it are acknowledged, and drops those not
/// fetched yet. A played event is fetched with the next real event of its device; `ring` makes one.
class played_events {
 public:
  static played_events& of_this_process();

  /// From now on `device` reports this event, once.
  void play(const std::string& device, ibv_async_event what);
  /// From now on `device` answers that the kernel took it away.
  void take_away(const std::string& device);
  /// Makes `device` readable by a real event: gives its port another address for a moment.
  static void ring(const std::string& device);

  /// The queues that `device` has now, in order of creation.
  [[nodiscard]] std::vector<ibv_qp*> queue_pairs(const std::string& device) const;
  [[nodiscard]] std::vector<ibv_cq*> completion_queues(const std::string& device) const;
  /// How many played events were fetched and acknowledged; how many were neither.
  [[nodiscard]] std::size_t acknowledged() const;
  [[nodiscard]] std::size_t waiting() const;
  /// How often a device was asked for its next event.
  [[nodiscard]] std::size_t asked() const;

  /// Makes the next acknowledgement wait until its queue is being destroyed.
  void acknowledge_late();

  /// Drops all played events, and forgets the counts.
  void reset();

  // -- for the functions that replace the library's

  enum class answer : std::uint8_t { played, gone, ask_the_device };
  [[nodiscard]] answer fetch(const ibv_context& device, ibv_async_event& into);
  /// Returns whether the event was a played one.
  [[nodiscard]] bool acknowledge(const ibv_async_event& what);
  void made(ibv_qp* pair);
  void made(ibv_cq* queue);
  /// Returns once no event about the queue is fetched and unacknowledged.
  void goes(const void* queue);

 private:
  struct played {
    std::string device;
    ibv_async_event what{};
  };
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<played> waiting_;
  std::vector<ibv_async_event> fetched_;
  std::vector<std::string> gone_;
  std::vector<ibv_qp*> pairs_;
  std::vector<ibv_cq*> queues_;
  std::vector<const void*> going_;
  std::size_t acknowledged_{0};
  std::size_t asked_{0};
  bool late_{false};
};

}  // namespace troupe::transport::rdma
