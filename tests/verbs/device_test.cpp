// What Soft-RoCE does, tested through verbs alone: the machine is as README.md says, and the queue
// pair guarantees that the rdma backend relies on hold there. No Troupe code is involved: if the
// backend's tests fail and these pass, look at the backend.

#include <array>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <infiniband/verbs.h>

namespace {

using namespace std::chrono_literals;
using clock_type = std::chrono::steady_clock;

struct closer {
  void operator()(ibv_context* p) const { ibv_close_device(p); }
  void operator()(ibv_pd* p) const { ibv_dealloc_pd(p); }
  void operator()(ibv_cq* p) const { ibv_destroy_cq(p); }
  void operator()(ibv_mr* p) const { ibv_dereg_mr(p); }
  void operator()(ibv_qp* p) const { ibv_destroy_qp(p); }
  void operator()(ibv_mw* p) const { ibv_dealloc_mw(p); }
};
template <class T>
using owned = std::unique_ptr<T, closer>;

owned<ibv_context> open_device(const std::string& name) {
  int count = 0;
  ibv_device** list = ibv_get_device_list(&count);
  owned<ibv_context> found;
  for (int i = 0; i < count; ++i) {
    if (name == ibv_get_device_name(list[i])) {
      found.reset(ibv_open_device(list[i]));
    }
  }
  if (list != nullptr) {
    ibv_free_device_list(list);
  }
  return found;
}

constexpr std::uint8_t port = 1;
constexpr std::uint8_t ipv4_gid = 1;
constexpr std::size_t memory_bytes = 1 << 20;

/// How long a queue pair waits, and how often it retries.
struct patience {
  std::uint8_t timeout = 14;  ///< 4.096 us * 2^14 = 67 ms
  std::uint8_t retries = 6;
};

/// One end: a device, a megabyte of registered memory and one queue pair.
struct end {
  owned<ibv_context> context;
  owned<ibv_pd> domain;
  owned<ibv_cq> completions;
  std::vector<std::uint8_t> memory = std::vector<std::uint8_t>(memory_bytes);
  owned<ibv_mr> registered;
  owned<ibv_qp> pair;

  explicit end(const std::string& device) : context{open_device(device)} {
    if (!context) {
      return;
    }
    domain.reset(ibv_alloc_pd(context.get()));
    completions.reset(ibv_create_cq(context.get(), 256, nullptr, nullptr, 0));
    registered.reset(ibv_reg_mr(domain.get(), memory.data(), memory.size(),
                                IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
                                    IBV_ACCESS_REMOTE_READ | IBV_ACCESS_MW_BIND));
    ibv_qp_init_attr wanted{};
    wanted.send_cq = completions.get();
    wanted.recv_cq = completions.get();
    wanted.cap = {.max_send_wr = 64,
                  .max_recv_wr = 64,
                  .max_send_sge = 4,
                  .max_recv_sge = 4,
                  .max_inline_data = 64};
    wanted.qp_type = IBV_QPT_RC;
    pair.reset(ibv_create_qp(domain.get(), &wanted));
  }

  bool whole() const { return context && domain && completions && registered && pair; }

  ibv_gid gid() const {
    ibv_gid value{};
    ibv_query_gid(context.get(), port, ipv4_gid, &value);
    return value;
  }

  /// Moves the queue pair through INIT, RTR and RTS towards `other`. Returns whether all three
  /// succeeded.
  bool connect(const end& other, patience how) {
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_INIT;
    attr.port_num = port;
    attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
    if (ibv_modify_qp(pair.get(), &attr,
                      IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) != 0) {
      return false;
    }
    attr = {};
    attr.qp_state = IBV_QPS_RTR;
    attr.path_mtu = IBV_MTU_4096;
    attr.dest_qp_num = other.pair->qp_num;
    attr.max_dest_rd_atomic = 16;
    attr.min_rnr_timer = 12;
    attr.ah_attr.is_global = 1;
    attr.ah_attr.grh.dgid = other.gid();
    attr.ah_attr.grh.sgid_index = ipv4_gid;
    attr.ah_attr.grh.hop_limit = 64;
    attr.ah_attr.port_num = port;
    if (ibv_modify_qp(pair.get(), &attr,
                      IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                          IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) != 0) {
      return false;
    }
    attr = {};
    attr.qp_state = IBV_QPS_RTS;
    attr.timeout = how.timeout;
    attr.retry_cnt = how.retries;
    attr.rnr_retry = 7;
    attr.max_rd_atomic = 16;
    return ibv_modify_qp(pair.get(), &attr,
                         IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                             IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC) == 0;
  }

  /// Posts one work request over the first `bytes` of the memory. Returns the result of
  /// ibv_post_send.
  int post(ibv_wr_opcode opcode, std::uint64_t remote, std::uint32_t key, std::uint32_t bytes,
           std::uint32_t immediate = 0) {
    ibv_sge piece{.addr = reinterpret_cast<std::uintptr_t>(memory.data()),
                  .length = bytes,
                  .lkey = registered->lkey};
    ibv_send_wr request{};
    request.sg_list = &piece;
    request.num_sge = bytes == 0 ? 0 : 1;
    request.opcode = opcode;
    request.send_flags = IBV_SEND_SIGNALED;
    request.imm_data = immediate;
    request.wr.rdma.remote_addr = remote;
    request.wr.rdma.rkey = key;
    ibv_send_wr* bad = nullptr;
    return ibv_post_send(pair.get(), &request, &bad);
  }

  int post_receive() {
    ibv_recv_wr request{};
    ibv_recv_wr* bad = nullptr;
    return ibv_post_recv(pair.get(), &request, &bad);
  }

  /// The next completion; empty if none comes within `limit`.
  std::optional<ibv_wc> next(std::chrono::milliseconds limit = 20s) {
    const auto until = clock_type::now() + limit;
    ibv_wc completion{};
    while (clock_type::now() < until) {
      if (ibv_poll_cq(completions.get(), 1, &completion) == 1) {
        return completion;
      }
    }
    return std::nullopt;
  }

  std::uint64_t address() const { return reinterpret_cast<std::uintptr_t>(memory.data()); }

  ibv_qp_state state() const {
    ibv_qp_attr attr{};
    ibv_qp_init_attr init{};
    ibv_query_qp(pair.get(), &attr, IBV_QP_STATE, &init);
    return attr.qp_state;
  }
};

/// Runs the program that cuts wires.
void wire(const std::string& what) {
  const char* program = std::getenv("TROUPE_VERBS_WIRE");
  ASSERT_NE(program, nullptr) << "this test runs in tests/verbs/machine";
  const auto command = "'" + std::string{program} + "' " + what;
  ASSERT_EQ(std::system(command.c_str()), 0) << command;
}

class device_test : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(near_.whole()) << "rxe0a cannot be used; this test runs in tests/verbs/machine";
    ASSERT_TRUE(far_.whole()) << "rxe0b cannot be used; this test runs in tests/verbs/machine";
    std::iota(near_.memory.begin(), near_.memory.end(), std::uint8_t{1});
  }

  void TearDown() override {
    if (cut_) {
      wire("restore 0 a");
    }
    if (lossy_) {
      wire("lose 0 0");
    }
  }

  void cut() {
    cut_ = true;
    wire("cut 0 a");
  }

  void lose_everything() {
    lossy_ = true;
    wire("lose 0 100");
  }

  void lose_nothing() {
    wire("lose 0 0");
    lossy_ = false;
  }

  void connect(patience how = {}) {
    ASSERT_TRUE(near_.connect(far_, how));
    ASSERT_TRUE(far_.connect(near_, how));
  }

  /// The status of the next completion at the near end; -1 if none comes.
  int status() {
    const auto completion = near_.next();
    return completion ? static_cast<int>(completion->status) : -1;
  }

  end near_{"rxe0a"};
  end far_{"rxe0b"};

 private:
  bool cut_ = false;
  bool lossy_ = false;
};

TEST_F(device_test, a_write_lands_and_a_read_fetches_it_back) {
  connect();
  const auto sent = near_.memory;
  ASSERT_EQ(near_.post(IBV_WR_RDMA_WRITE, far_.address(), far_.registered->rkey, memory_bytes), 0);
  ASSERT_EQ(status(), IBV_WC_SUCCESS);
  EXPECT_EQ(far_.memory, sent);
  near_.memory.assign(memory_bytes, 0);
  ASSERT_EQ(near_.post(IBV_WR_RDMA_READ, far_.address(), far_.registered->rkey, memory_bytes), 0);
  ASSERT_EQ(status(), IBV_WC_SUCCESS);
  EXPECT_EQ(near_.memory, sent);
}

TEST_F(device_test, a_write_with_immediate_is_told_to_the_target_after_its_bytes) {
  connect();
  ASSERT_EQ(far_.post_receive(), 0);
  ASSERT_EQ(
      near_.post(IBV_WR_RDMA_WRITE_WITH_IMM, far_.address(), far_.registered->rkey, 65536, 77), 0);
  const auto landed = far_.next();
  ASSERT_TRUE(landed);
  EXPECT_EQ(landed->status, IBV_WC_SUCCESS);
  EXPECT_EQ(landed->opcode, IBV_WC_RECV_RDMA_WITH_IMM);
  EXPECT_EQ(landed->imm_data, 77u);
  EXPECT_EQ(std::memcmp(far_.memory.data(), near_.memory.data(), 65536), 0);
  EXPECT_EQ(status(), IBV_WC_SUCCESS);
}

TEST_F(device_test, a_wrong_key_is_refused_and_ends_the_queue_pair) {
  connect();
  ASSERT_EQ(near_.post(IBV_WR_RDMA_WRITE, far_.address(), far_.registered->rkey ^ 0x5a, 4096), 0);
  EXPECT_EQ(status(), IBV_WC_REM_ACCESS_ERR);
  EXPECT_EQ(near_.state(), IBV_QPS_ERR);
  EXPECT_EQ(far_.memory, std::vector<std::uint8_t>(memory_bytes));
}

TEST_F(device_test, a_range_that_leaves_the_region_is_refused) {
  connect();
  ASSERT_EQ(near_.post(IBV_WR_RDMA_WRITE, far_.address() + memory_bytes - 100,
                       far_.registered->rkey, 101),
            0);
  EXPECT_EQ(status(), IBV_WC_REM_ACCESS_ERR);
}

TEST_F(device_test, a_memory_window_lets_in_only_until_it_is_invalidated) {
  connect();
  owned<ibv_mw> window{ibv_alloc_mw(far_.domain.get(), IBV_MW_TYPE_2)};
  ASSERT_TRUE(window) << std::strerror(errno);
  const auto key = ibv_inc_rkey(window->rkey);
  ibv_send_wr bind{};
  bind.opcode = IBV_WR_BIND_MW;
  bind.send_flags = IBV_SEND_SIGNALED;
  bind.bind_mw.mw = window.get();
  bind.bind_mw.rkey = key;
  bind.bind_mw.bind_info = {.mr = far_.registered.get(),
                            .addr = far_.address() + 4096,
                            .length = 4096,
                            .mw_access_flags = IBV_ACCESS_REMOTE_WRITE};
  ibv_send_wr* bad = nullptr;
  ASSERT_EQ(ibv_post_send(far_.pair.get(), &bind, &bad), 0);
  auto bound = far_.next();
  ASSERT_TRUE(bound);
  ASSERT_EQ(bound->status, IBV_WC_SUCCESS);

  ASSERT_EQ(near_.post(IBV_WR_RDMA_WRITE, far_.address() + 4096, key, 4096), 0);
  ASSERT_EQ(status(), IBV_WC_SUCCESS);
  EXPECT_EQ(std::memcmp(far_.memory.data() + 4096, near_.memory.data(), 4096), 0);

  ibv_send_wr invalidate{};
  invalidate.opcode = IBV_WR_LOCAL_INV;
  invalidate.send_flags = IBV_SEND_SIGNALED;
  invalidate.invalidate_rkey = key;
  ASSERT_EQ(ibv_post_send(far_.pair.get(), &invalidate, &bad), 0);
  auto gone = far_.next();
  ASSERT_TRUE(gone);
  ASSERT_EQ(gone->status, IBV_WC_SUCCESS);
  std::memset(far_.memory.data(), 0xee, memory_bytes);
  ASSERT_EQ(near_.post(IBV_WR_RDMA_WRITE, far_.address() + 4096, key, 4096), 0);
  EXPECT_EQ(status(), IBV_WC_REM_ACCESS_ERR);
  EXPECT_EQ(far_.memory, std::vector<std::uint8_t>(memory_bytes, 0xee));
}

TEST_F(device_test, a_queue_pair_that_is_put_in_error_flushes_and_refuses_what_a_peer_writes) {
  connect();
  ASSERT_EQ(far_.post_receive(), 0);
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_ERR;
  ASSERT_EQ(ibv_modify_qp(far_.pair.get(), &attr, IBV_QP_STATE), 0);
  const auto flushed = far_.next();
  ASSERT_TRUE(flushed);
  EXPECT_EQ(flushed->status, IBV_WC_WR_FLUSH_ERR);
  ASSERT_EQ(near_.post(IBV_WR_RDMA_WRITE, far_.address(), far_.registered->rkey, 4096), 0);
  EXPECT_NE(status(), IBV_WC_SUCCESS);
  EXPECT_EQ(far_.memory, std::vector<std::uint8_t>(memory_bytes));
}

TEST_F(device_test, a_silent_wire_spends_the_retry_budget) {
  connect({.timeout = 12, .retries = 3});  // 17 ms, a few times
  lose_everything();
  const auto start = clock_type::now();
  ASSERT_EQ(near_.post(IBV_WR_RDMA_WRITE, far_.address(), far_.registered->rkey, 4096), 0);
  EXPECT_EQ(status(), IBV_WC_RETRY_EXC_ERR);
  RecordProperty("budget_ms", std::to_string((clock_type::now() - start) / 1ms));
  EXPECT_EQ(near_.state(), IBV_QPS_ERR);
}

// Hardware tries 7 times; Soft-RoCE takes 7 as "for ever". A wait for a completion therefore needs
// a deadline.
TEST_F(device_test, seven_retries_never_end) {
  connect({.timeout = 12, .retries = 7});
  lose_everything();
  ASSERT_EQ(near_.post(IBV_WR_RDMA_WRITE, far_.address(), far_.registered->rkey, 4096), 0);
  EXPECT_FALSE(near_.next(3s));
  lose_nothing();
  EXPECT_EQ(status(), IBV_WC_SUCCESS);
}

TEST_F(device_test, a_wire_that_comes_back_within_the_budget_loses_nothing) {
  connect({.timeout = 20, .retries = 6});  // four seconds, six times: the host may be busy
  const auto sent = near_.memory;
  wire("lose 0 100");
  ASSERT_EQ(near_.post(IBV_WR_RDMA_WRITE, far_.address(), far_.registered->rkey, 65536), 0);
  EXPECT_FALSE(near_.next(500ms));
  lose_nothing();
  EXPECT_EQ(status(), IBV_WC_SUCCESS);
  EXPECT_EQ(std::memcmp(far_.memory.data(), sent.data(), 65536), 0);
}

TEST_F(device_test, a_port_that_goes_down_is_told_as_an_event_and_fails_what_is_posted) {
  connect({.timeout = 12, .retries = 3});
  cut();
  ibv_async_event event{};
  ASSERT_EQ(ibv_get_async_event(near_.context.get(), &event), 0);
  EXPECT_EQ(event.event_type, IBV_EVENT_PORT_ERR);
  ibv_ack_async_event(&event);
  ibv_port_attr attr{};
  ASSERT_EQ(ibv_query_port(near_.context.get(), port, &attr), 0);
  EXPECT_EQ(attr.state, IBV_PORT_DOWN);
  ASSERT_EQ(near_.post(IBV_WR_RDMA_WRITE, far_.address(), far_.registered->rkey, 4096), 0);
  const auto outcome = status();
  EXPECT_TRUE(outcome == IBV_WC_LOC_QP_OP_ERR || outcome == IBV_WC_RETRY_EXC_ERR) << outcome;
}

}  // namespace
