#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <infiniband/verbs.h>

namespace troupe::transport::rdma {

/// Intercepts the calls of libibverbs that set up queue pairs and register memory. By default all
/// calls pass and none is recorded.
class verbs_calls {
 public:
  enum class kind : std::uint8_t { registers, makes_queue_pair, changes_queue_pair };
  /// The arguments of an `ibv_modify_qp`, and its result.
  struct change {
    std::string device;
    std::uint32_t queue_pair{0};
    ibv_qp_attr to{};
    int what{0};  ///< the valid fields of `to`, as in `ibv_qp_attr_mask`
    int answer{0};
  };

  static verbs_calls& of_this_process();

  /// From now on records changes of queue pairs.
  void remember();
  [[nodiscard]] std::vector<change> changes() const;

  /// Holds the next call of that kind until `let_go`, before it reaches the library; of
  /// registrations, the next one of memory that begins at `address`. Fails the test if no call
  /// comes for long, for then the caller of `let_go` waits for one.
  void hold(kind what, const void* address = nullptr);
  /// Whether a call is held.
  [[nodiscard]] bool holds() const;
  void let_go();

  /// Refuses (EINVAL) the next change of a queue pair after `passing` others, before it reaches the
  /// library.
  void refuse_change(unsigned passing);

  /// Lets all calls pass, and records none.
  void reset();

  // -- for the functions that replace the library's

  void pass(kind what, const void* address = nullptr);
  [[nodiscard]] bool refuses_change();
  void note(const ibv_qp& pair, const ibv_qp_attr& to, int what, int answer);

 private:
  mutable std::mutex mutex_;
  std::condition_variable let_go_;
  std::optional<kind> wanted_;
  const void* address_{nullptr};
  bool holds_{false};
  std::optional<unsigned> until_refused_;
  bool remembers_{false};
  std::vector<change> changes_;
};

}  // namespace troupe::transport::rdma
