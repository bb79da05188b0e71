#include "window_gate.hpp"

#include <cerrno>
#include <utility>

#include <gtest/gtest.h>

// The linker puts the __wrap function in place of the one of libibverbs (CMakeLists.txt).
extern "C" {
ibv_context* __real_ibv_open_device(ibv_device* which);  // NOLINT(bugprone-reserved-identifier)
ibv_context* __wrap_ibv_open_device(ibv_device* which);  // NOLINT(bugprone-reserved-identifier)

ibv_context* __wrap_ibv_open_device(ibv_device* which) {  // NOLINT(bugprone-reserved-identifier)
  auto* opened = __real_ibv_open_device(which);
  if (opened != nullptr) {
    troupe::transport::rdma::window_gate::of_this_process().watch(opened);
  }
  return opened;
}
}

namespace troupe::transport::rdma {

namespace {

bool about_windows(const ibv_send_wr& work) {
  return work.opcode == IBV_WR_BIND_MW || work.opcode == IBV_WR_LOCAL_INV;
}

window_gate::request said_in(const ibv_qp& pair, const ibv_send_wr& work) {
  window_gate::request made{.what = work.opcode, .queue_pair = pair.qp_num};
  if (work.opcode == IBV_WR_LOCAL_INV) {
    made.key = work.invalidate_rkey;
    return made;
  }
  made.key = work.bind_mw.rkey;
  made.address = work.bind_mw.bind_info.addr;
  made.bytes = work.bind_mw.bind_info.length;
  made.rights = work.bind_mw.bind_info.mw_access_flags;
  return made;
}

}  // namespace

window_gate& window_gate::of_this_process() {
  static window_gate gate;
  return gate;
}

void window_gate::set(ibv_wr_opcode what, way with) {
  const std::lock_guard lock{mutex_};
  ways_[what] = with;
}

std::vector<window_gate::request> window_gate::asked() const {
  const std::lock_guard lock{mutex_};
  return asked_;
}

std::size_t window_gate::kept() const {
  const std::lock_guard lock{mutex_};
  return kept_.size();
}

void window_gate::let_one_go() {
  const std::lock_guard lock{mutex_};
  ASSERT_FALSE(kept_.empty());
  auto& oldest = kept_.front();
  for (std::size_t i = 0; i < oldest.works.size(); ++i) {
    auto& work = oldest.works[i];
    work.next = i + 1 < oldest.works.size() ? &oldest.works[i + 1] : nullptr;
    // The owner of the window has recorded the new key, but the driver expects the old one.
    if (work.opcode == IBV_WR_BIND_MW) std::swap(work.bind_mw.mw->rkey, oldest.keys[i]);
  }
  ibv_send_wr* bad = nullptr;
  EXPECT_EQ(pass(oldest.pair, oldest.works.data(), &bad), 0);
  for (std::size_t i = 0; i < oldest.works.size(); ++i) {
    auto& work = oldest.works[i];
    if (work.opcode == IBV_WR_BIND_MW) std::swap(work.bind_mw.mw->rkey, oldest.keys[i]);
  }
  kept_.pop_front();
}

void window_gate::reset() {
  const std::lock_guard lock{mutex_};
  ways_.clear();
  asked_.clear();
  kept_.clear();
}

void window_gate::watch(ibv_context* opened) {
  const std::lock_guard lock{mutex_};
  originals_[opened] = opened->ops.post_send;
  opened->ops.post_send = post;
}

int window_gate::post(ibv_qp* pair, ibv_send_wr* works, ibv_send_wr** bad) {
  return of_this_process().take(pair, works, bad);
}

int window_gate::pass(ibv_qp* pair, ibv_send_wr* works, ibv_send_wr** bad) const {
  return originals_.at(pair->context)(pair, works, bad);
}

int window_gate::take(ibv_qp* pair, ibv_send_wr* works, ibv_send_wr** bad) {
  const std::lock_guard lock{mutex_};
  for (const auto& before : kept_) {
    // The later work would complete before the work posted earlier.
    if (before.pair == pair && !about_windows(*works)) {
      ADD_FAILURE() << "something was posted behind a request that is kept back";
    }
  }
  if (!about_windows(*works)) return pass(pair, works, bad);
  std::vector<ibv_send_wr> all;
  std::vector<std::uint32_t> keys;
  for (const auto* work = works; work != nullptr; work = work->next) {
    EXPECT_EQ(work->opcode, works->opcode) << "the test mixes what it opens and what it shuts";
    asked_.push_back(said_in(*pair, *work));
    all.push_back(*work);
    keys.push_back(work->opcode == IBV_WR_BIND_MW ? work->bind_mw.mw->rkey : 0);
  }
  switch (ways_[works->opcode]) {
    case way::pass: break;
    case way::keep: kept_.push_back({pair, std::move(all), std::move(keys)}); return 0;
    case way::refuse: *bad = works; return EIO;
    case way::spoil:
      for (auto* work = works; work != nullptr; work = work->next) work->invalidate_rkey ^= 0xff00U;
      break;
  }
  return pass(pair, works, bad);
}

}  // namespace troupe::transport::rdma
