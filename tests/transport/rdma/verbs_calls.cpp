#include "verbs_calls.hpp"

#include <cerrno>

#include <gtest/gtest.h>

#include "backends.hpp"
#include "played_events.hpp"

using troupe::transport::rdma::played_events;
using troupe::transport::rdma::verbs_calls;

// The linker puts each __wrap function in place of the one of libibverbs (CMakeLists.txt).
// NOLINTBEGIN(bugprone-reserved-identifier)
extern "C" {
int __real_ibv_modify_qp(ibv_qp* pair, ibv_qp_attr* to, int what);
int __wrap_ibv_modify_qp(ibv_qp* pair, ibv_qp_attr* to, int what);
ibv_qp* __real_ibv_create_qp(ibv_pd* domain, ibv_qp_init_attr* wanted);
ibv_qp* __wrap_ibv_create_qp(ibv_pd* domain, ibv_qp_init_attr* wanted);
// Called by `ibv_reg_mr` of verbs.h if the access rights are not a compile-time constant.
ibv_mr* __real_ibv_reg_mr_iova2(ibv_pd* domain, void* at, std::size_t bytes, std::uint64_t address,
                                unsigned rights);
ibv_mr* __wrap_ibv_reg_mr_iova2(ibv_pd* domain, void* at, std::size_t bytes, std::uint64_t address,
                                unsigned rights);

int __wrap_ibv_modify_qp(ibv_qp* pair, ibv_qp_attr* to, int what) {
  verbs_calls::of_this_process().pass(verbs_calls::kind::changes_queue_pair);
  if (verbs_calls::of_this_process().refuses_change()) return EINVAL;
  const int answer = __real_ibv_modify_qp(pair, to, what);
  verbs_calls::of_this_process().note(*pair, *to, what, answer);
  return answer;
}

ibv_qp* __wrap_ibv_create_qp(ibv_pd* domain, ibv_qp_init_attr* wanted) {
  verbs_calls::of_this_process().pass(verbs_calls::kind::makes_queue_pair);
  auto* made = __real_ibv_create_qp(domain, wanted);
  if (made != nullptr) played_events::of_this_process().made(made);
  return made;
}

ibv_mr* __wrap_ibv_reg_mr_iova2(ibv_pd* domain, void* at, std::size_t bytes, std::uint64_t address,
                                unsigned rights) {
  verbs_calls::of_this_process().pass(verbs_calls::kind::registers, at);
  return __real_ibv_reg_mr_iova2(domain, at, bytes, address, rights);
}
}
// NOLINTEND(bugprone-reserved-identifier)

namespace troupe::transport::rdma {

verbs_calls& verbs_calls::of_this_process() {
  static verbs_calls calls;
  return calls;
}

void verbs_calls::remember() {
  const std::lock_guard lock{mutex_};
  remembers_ = true;
}

std::vector<verbs_calls::change> verbs_calls::changes() const {
  const std::lock_guard lock{mutex_};
  return changes_;
}

void verbs_calls::hold(kind what, const void* address) {
  const std::lock_guard lock{mutex_};
  wanted_ = what;
  address_ = address;
}

bool verbs_calls::holds() const {
  const std::lock_guard lock{mutex_};
  return holds_;
}

void verbs_calls::let_go() {
  const std::lock_guard lock{mutex_};
  wanted_.reset();
  holds_ = false;
  let_go_.notify_all();
}

void verbs_calls::reset() {
  let_go();
  const std::lock_guard lock{mutex_};
  remembers_ = false;
  changes_.clear();
  until_refused_.reset();
}

void verbs_calls::refuse_change(unsigned passing) {
  const std::lock_guard lock{mutex_};
  until_refused_ = passing;
}

bool verbs_calls::refuses_change() {
  const std::lock_guard lock{mutex_};
  if (!until_refused_) return false;
  if (*until_refused_ > 0) {
    --*until_refused_;
    return false;
  }
  until_refused_.reset();
  return true;
}

void verbs_calls::pass(kind what, const void* address) {
  std::unique_lock lock{mutex_};
  if (wanted_ != what || address_ != address) return;
  wanted_.reset();
  holds_ = true;
  if (!let_go_.wait_for(lock, contract::wait_limit, [&] { return !holds_; })) {
    holds_ = false;
    ADD_FAILURE() << "what was to go on waits for a call of libibverbs that takes long";
  }
}

void verbs_calls::note(const ibv_qp& pair, const ibv_qp_attr& to, int what, int answer) {
  const std::lock_guard lock{mutex_};
  if (!remembers_) return;
  changes_.push_back({::ibv_get_device_name(pair.context->device), pair.qp_num, to, what, answer});
}

}  // namespace troupe::transport::rdma
