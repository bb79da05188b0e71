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

/// Stands between this process and those calls of libibverbs that set up queue pairs and register
/// memory. Until told otherwise all of them pass, and nothing is remembered.
class verbs_calls {
 public:
  enum class kind : std::uint8_t { registers, makes_queue_pair, changes_queue_pair };
  /// What `ibv_modify_qp` was given, and what it answered.
  struct change {
    std::string device;
    std::uint32_t queue_pair{0};
    ibv_qp_attr to{};
    int what{0};  ///< which of `to` count, of `ibv_qp_attr_mask`
    int answer{0};
  };

  static verbs_calls& of_this_process();

  /// From now on changes of queue pairs are remembered.
  void remember();
  [[nodiscard]] std::vector<change> changes() const;

  /// The next call of that kind, of registrations the next one of memory that begins at `address`,
  /// waits before it reaches the library until `let_go`. It fails the test if nobody comes for long:
  /// then whoever was to let it go waits for it.
  void hold(kind what, const void* address = nullptr);
  /// Whether one waits.
  [[nodiscard]] bool holds() const;
  void let_go();

  /// The next change of a queue pair after `passing` others is refused (EINVAL) before it reaches the
  /// library.
  void refuse_change(unsigned passing);

  /// All pass, and nothing is remembered.
  void reset();

  // -- for those that stand in the place of the library's

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
