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

/// Plays what Soft-RoCE never says: that a queue or a device has failed. It stands between this process
/// and the calls of libibverbs about asynchronous events, and keeps to their rules: a queue that is
/// destroyed waits until what was fetched about it is acknowledged, and takes with it what was not.
/// What is played is fetched with the next real event of its device, or before: `ring`.
class played_events {
 public:
  static played_events& of_this_process();

  /// From now on `device` says, once.
  void play(const std::string& device, ibv_async_event what);
  /// From now on `device` answers that the kernel took it away.
  void take_away(const std::string& device);
  /// Makes `device` readable by a real event: its port has another address for a moment.
  static void ring(const std::string& device);

  /// Those that `device` has now, in the order in which they were made.
  [[nodiscard]] std::vector<ibv_qp*> queue_pairs(const std::string& device) const;
  [[nodiscard]] std::vector<ibv_cq*> completion_queues(const std::string& device) const;
  /// Of those that were played: fetched and acknowledged; neither.
  [[nodiscard]] std::size_t acknowledged() const;
  [[nodiscard]] std::size_t waiting() const;
  /// How often somebody asked a device for its next event.
  [[nodiscard]] std::size_t asked() const;

  /// The next acknowledgement waits until its queue is being destroyed.
  void acknowledge_late();

  /// Nothing is played, and nothing was.
  void reset();

  // -- for those that stand in the place of the library's

  enum class answer : std::uint8_t { played, gone, ask_the_device };
  [[nodiscard]] answer fetch(const ibv_context& device, ibv_async_event& into);
  /// False: it was a real one.
  [[nodiscard]] bool acknowledge(const ibv_async_event& what);
  void made(ibv_qp* pair);
  void made(ibv_cq* queue);
  /// Returns when nothing of it is fetched and not acknowledged.
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
