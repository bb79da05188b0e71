#include "fake_verbs.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>

#include <infiniband/verbs.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include <valgrind/callgrind.h>

// The library's headers define macros for some of the functions here.
#undef ibv_query_port
#undef ibv_reg_mr

namespace {

bool collecting = false;

/// While it lives, the device works, and no instructions are charged to the caller.
class device_at_work {
 public:
  device_at_work() {
    if (collecting) CALLGRIND_TOGGLE_COLLECT;
  }
  ~device_at_work() {
    if (collecting) CALLGRIND_TOGGLE_COLLECT;
  }
  device_at_work(const device_at_work&) = delete;
  device_at_work& operator=(const device_at_work&) = delete;
};

struct fake_cq {
  ibv_cq verbs{};
  std::deque<ibv_wc> done;
};

struct receive {
  std::uint64_t id{0};
  std::byte* at{nullptr};
};

struct fake_qp {
  ibv_qp verbs{};
  std::uint32_t peer{0};
  std::deque<receive> receives;
};

ibv_device the_device{};
std::map<std::uint32_t, std::unique_ptr<fake_qp>> pairs;
std::uint32_t last_number = 16;

fake_cq* own(ibv_cq* queue) {
  return reinterpret_cast<fake_cq*>(queue);
}

void complete(ibv_cq* queue, std::uint64_t id, std::uint32_t number, ibv_wc_opcode what,
              std::uint32_t bytes = 0, __be32 immediate = 0) {
  ibv_wc done{};
  done.wr_id = id;
  done.status = IBV_WC_SUCCESS;
  done.opcode = what;
  done.qp_num = number;
  done.byte_len = bytes;
  done.imm_data = immediate;
  own(queue)->done.push_back(done);
}

void deliver(fake_qp& to, const ibv_send_wr& work) {
  if (to.receives.empty()) return;
  const auto into = to.receives.front();
  to.receives.pop_front();
  if (work.opcode == IBV_WR_RDMA_WRITE_WITH_IMM) {
    complete(to.verbs.recv_cq, into.id, to.verbs.qp_num, IBV_WC_RECV_RDMA_WITH_IMM, 0,
             work.imm_data);
    return;
  }
  std::uint32_t bytes = 0;
  for (int i = 0; i < work.num_sge; ++i) {
    const auto& from = work.sg_list[i];
    std::memcpy(into.at + bytes, reinterpret_cast<const void*>(from.addr), from.length);
    bytes += from.length;
  }
  complete(to.verbs.recv_cq, into.id, to.verbs.qp_num, IBV_WC_RECV, bytes);
}

int post_send(ibv_qp* pair, ibv_send_wr* work, ibv_send_wr** /*bad*/) {
  const device_at_work here;
  auto& from = *reinterpret_cast<fake_qp*>(pair);
  const auto to = pairs.find(from.peer);
  for (; work != nullptr; work = work->next) {
    if (to != pairs.end() &&
        (work->opcode == IBV_WR_SEND || work->opcode == IBV_WR_RDMA_WRITE_WITH_IMM)) {
      deliver(*to->second, *work);
    }
    if ((work->send_flags & IBV_SEND_SIGNALED) != 0) {
      complete(pair->send_cq, work->wr_id, pair->qp_num,
               work->opcode == IBV_WR_RDMA_READ ? IBV_WC_RDMA_READ : IBV_WC_RDMA_WRITE);
    }
  }
  return 0;
}

int post_recv(ibv_qp* pair, ibv_recv_wr* work, ibv_recv_wr** /*bad*/) {
  const device_at_work here;
  auto& to = *reinterpret_cast<fake_qp*>(pair);
  for (; work != nullptr; work = work->next) {
    to.receives.push_back({work->wr_id, work->num_sge == 0
                                            ? nullptr
                                            : reinterpret_cast<std::byte*>(work->sg_list[0].addr)});
  }
  return 0;
}

int poll_cq(ibv_cq* queue, int most, ibv_wc* into) {
  const device_at_work here;
  auto& done = own(queue)->done;
  const int count = std::min(most, static_cast<int>(done.size()));
  for (int i = 0; i < count; ++i) {
    into[i] = done.front();
    done.pop_front();
  }
  return count;
}

int req_notify_cq(ibv_cq* /*queue*/, int /*solicited*/) {
  return 0;
}

ibv_gid the_address() {
  ibv_gid gid{};
  gid.raw[10] = gid.raw[11] = 0xff;
  gid.raw[12] = 127;
  gid.raw[15] = 1;
  return gid;
}

}  // namespace

void troupe::bench::collect_instructions(bool on) {
  if (on != collecting) CALLGRIND_TOGGLE_COLLECT;
  collecting = on;
}

// -- the library's functions that the backend calls

extern "C" {

ibv_device** ibv_get_device_list(int* count) {
  std::strcpy(the_device.name, "fake_0");
  auto** list = new ibv_device* [2] { &the_device, nullptr };
  if (count != nullptr) *count = 1;
  return list;
}

void ibv_free_device_list(ibv_device** list) {
  delete[] list;
}

const char* ibv_get_device_name(ibv_device* device) {
  return device->name;
}

ibv_context* ibv_open_device(ibv_device* device) {
  auto* context = new ibv_context{};
  context->device = device;
  context->ops.poll_cq = poll_cq;
  context->ops.req_notify_cq = req_notify_cq;
  context->ops.post_send = post_send;
  context->ops.post_recv = post_recv;
  context->async_fd = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  context->num_comp_vectors = 1;
  return context;
}

int ibv_close_device(ibv_context* context) {
  ::close(context->async_fd);
  delete context;
  return 0;
}

int ibv_query_device(ibv_context* /*context*/, ibv_device_attr* about) {
  *about = {};
  about->phys_port_cnt = 1;
  about->max_qp_wr = 1 << 15;
  about->max_sge = about->max_sge_rd = 30;
  about->max_cqe = 1 << 20;
  about->max_qp_rd_atom = about->max_qp_init_rd_atom = 16;
  about->max_mr_size = UINT64_MAX;
  return 0;
}

int ibv_query_port(ibv_context* /*context*/, std::uint8_t /*port*/, _compat_ibv_port_attr* about) {
  auto* port = reinterpret_cast<ibv_port_attr*>(about);
  port->state = IBV_PORT_ACTIVE;
  port->max_mtu = port->active_mtu = IBV_MTU_4096;
  port->gid_tbl_len = 1;
  port->max_msg_sz = std::uint32_t{1} << 30;
  port->active_width = 2;
  port->active_speed = 64;
  port->link_layer = IBV_LINK_LAYER_ETHERNET;
  return 0;
}

ssize_t _ibv_query_gid_table(ibv_context* /*context*/, ibv_gid_entry* entries, std::size_t most,
                             std::uint32_t /*flags*/, std::size_t /*size*/) {
  if (most == 0) return 0;
  entries[0] = {};
  entries[0].gid = the_address();
  entries[0].port_num = 1;
  entries[0].gid_type = IBV_GID_TYPE_ROCE_V2;
  return 1;
}

int ibv_query_gid(ibv_context* /*context*/, std::uint8_t /*port*/, int /*index*/, ibv_gid* gid) {
  *gid = the_address();
  return 0;
}

ibv_pd* ibv_alloc_pd(ibv_context* context) {
  auto* domain = new ibv_pd{};
  domain->context = context;
  return domain;
}

int ibv_dealloc_pd(ibv_pd* domain) {
  delete domain;
  return 0;
}

ibv_mr* ibv_reg_mr(ibv_pd* domain, void* at, std::size_t bytes, int /*rights*/) {
  auto* made = new ibv_mr{};
  made->context = domain->context;
  made->pd = domain;
  made->addr = at;
  made->length = bytes;
  made->lkey = made->rkey = ++last_number;
  return made;
}

// The function that the header calls if the rights are not known at compile time.
ibv_mr* ibv_reg_mr_iova2(ibv_pd* domain, void* at, std::size_t bytes, std::uint64_t /*iova*/,
                         unsigned int rights) {
  return ibv_reg_mr(domain, at, bytes, static_cast<int>(rights));
}

int ibv_dereg_mr(ibv_mr* registered) {
  delete registered;
  return 0;
}

ibv_comp_channel* ibv_create_comp_channel(ibv_context* context) {
  auto* made = new ibv_comp_channel{};
  made->context = context;
  made->fd = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  return made;
}

int ibv_destroy_comp_channel(ibv_comp_channel* channel) {
  ::close(channel->fd);
  delete channel;
  return 0;
}

ibv_cq* ibv_create_cq(ibv_context* context, int entries, void* /*own*/, ibv_comp_channel* channel,
                      int /*vector*/) {
  auto* made = new fake_cq;
  made->verbs.context = context;
  made->verbs.channel = channel;
  made->verbs.cqe = entries;
  return &made->verbs;
}

int ibv_destroy_cq(ibv_cq* queue) {
  delete own(queue);
  return 0;
}

ibv_qp* ibv_create_qp(ibv_pd* domain, ibv_qp_init_attr* wanted) {
  auto made = std::make_unique<fake_qp>();
  made->verbs.context = domain->context;
  made->verbs.pd = domain;
  made->verbs.send_cq = wanted->send_cq;
  made->verbs.recv_cq = wanted->recv_cq;
  made->verbs.qp_num = ++last_number;
  made->verbs.qp_type = IBV_QPT_RC;
  auto* verbs = &made->verbs;
  pairs.emplace(verbs->qp_num, std::move(made));
  return verbs;
}

int ibv_modify_qp(ibv_qp* pair, ibv_qp_attr* to, int mask) {
  if ((mask & IBV_QP_DEST_QPN) != 0) reinterpret_cast<fake_qp*>(pair)->peer = to->dest_qp_num;
  return 0;
}

int ibv_destroy_qp(ibv_qp* pair) {
  pairs.erase(pair->qp_num);
  return 0;
}

}  // extern "C"
