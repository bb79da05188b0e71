#include "troupe/transport/rdma/verbs_library.hpp"

#include <cerrno>
#include <type_traits>

#include <dlfcn.h>
#include <infiniband/verbs.h>
#include <sys/types.h>

// Definitions of the functions that libibverbs' headers declare. Each forwards to the library's own
// function, found by its name. Inline functions of the headers and of the drivers still call each
// other directly. The definitions are not visible outside of this program, so the library's own
// references do not resolve to them. They are weak so that functions of the same names in tests
// take precedence.

#undef ibv_get_device_list
#undef ibv_query_port
#undef ibv_reg_mr

namespace troupe::transport::rdma {

namespace {

struct opened_library {
  void* handle{::dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL)};
  std::string trouble;

  opened_library() {
    if (handle != nullptr) return;
    const char* why = ::dlerror();
    trouble = why != nullptr ? why : "libibverbs.so.1 cannot be opened";
  }
};

/// Never closed: the library's drivers have threads and handlers of their own.
const opened_library& library() {
  static const opened_library opened;
  return opened;
}

template <class Function>
Function* function(const char* name) {
  return library().handle == nullptr ? nullptr
                                     : reinterpret_cast<Function*>(::dlsym(library().handle, name));
}

/// Result of a function that this release of the library lacks, or that nobody can call without a
/// device.
template <class Result>
Result absent() {
  errno = EOPNOTSUPP;
  if constexpr (std::is_pointer_v<Result>) {
    return nullptr;
  } else if constexpr (std::is_same_v<Result, ssize_t>) {
    return -EOPNOTSUPP;
  } else if constexpr (!std::is_void_v<Result>) {
    return EOPNOTSUPP;
  }
}

template <class Result, class... Parameters>
Result hand_on(Result (*to)(Parameters...), std::type_identity_t<Parameters>... arguments) {
  return to != nullptr ? to(arguments...) : absent<Result>();
}

}  // namespace

std::optional<std::string> why_no_verbs() {
  if (library().handle != nullptr) return std::nullopt;
  return library().trouble;
}

}  // namespace troupe::transport::rdma

using troupe::transport::rdma::function;
using troupe::transport::rdma::hand_on;

extern "C" {

[[gnu::weak, gnu::visibility("hidden")]] const char* ibv_wc_status_str(ibv_wc_status status) {
  static auto* const real = function<decltype(ibv_wc_status_str)>("ibv_wc_status_str");
  return hand_on(real, status);
}

[[gnu::weak, gnu::visibility("hidden")]] ibv_device** ibv_get_device_list(int* num_devices) {
  static auto* const real = function<decltype(ibv_get_device_list)>("ibv_get_device_list");
  return hand_on(real, num_devices);
}

[[gnu::weak, gnu::visibility("hidden")]] void ibv_free_device_list(ibv_device** list) {
  static auto* const real = function<decltype(ibv_free_device_list)>("ibv_free_device_list");
  hand_on(real, list);
}

[[gnu::weak, gnu::visibility("hidden")]] const char* ibv_get_device_name(ibv_device* device) {
  static auto* const real = function<decltype(ibv_get_device_name)>("ibv_get_device_name");
  return hand_on(real, device);
}

[[gnu::weak, gnu::visibility("hidden")]] ibv_context* ibv_open_device(ibv_device* device) {
  static auto* const real = function<decltype(ibv_open_device)>("ibv_open_device");
  return hand_on(real, device);
}

[[gnu::weak, gnu::visibility("hidden")]] int ibv_close_device(ibv_context* context) {
  static auto* const real = function<decltype(ibv_close_device)>("ibv_close_device");
  return hand_on(real, context);
}

[[gnu::weak, gnu::visibility("hidden")]] int ibv_get_async_event(ibv_context* context,
                                                                 ibv_async_event* event) {
  static auto* const real = function<decltype(ibv_get_async_event)>("ibv_get_async_event");
  return hand_on(real, context, event);
}

[[gnu::weak, gnu::visibility("hidden")]] void ibv_ack_async_event(ibv_async_event* event) {
  static auto* const real = function<decltype(ibv_ack_async_event)>("ibv_ack_async_event");
  hand_on(real, event);
}

[[gnu::weak, gnu::visibility("hidden")]] int ibv_query_device(ibv_context* context,
                                                              ibv_device_attr* device_attr) {
  static auto* const real = function<decltype(ibv_query_device)>("ibv_query_device");
  return hand_on(real, context, device_attr);
}

[[gnu::weak, gnu::visibility("hidden")]] int ibv_query_port(ibv_context* context, uint8_t port_num,
                                                            _compat_ibv_port_attr* port_attr) {
  static auto* const real = function<decltype(ibv_query_port)>("ibv_query_port");
  return hand_on(real, context, port_num, port_attr);
}

[[gnu::weak, gnu::visibility("hidden")]] int ibv_query_gid(ibv_context* context, uint8_t port_num,
                                                           int index, ibv_gid* gid) {
  static auto* const real = function<decltype(ibv_query_gid)>("ibv_query_gid");
  return hand_on(real, context, port_num, index, gid);
}

[[gnu::weak, gnu::visibility("hidden")]] ssize_t _ibv_query_gid_table(ibv_context* context,
                                                                      ibv_gid_entry* entries,
                                                                      size_t max_entries,
                                                                      uint32_t flags,
                                                                      size_t entry_size) {
  static auto* const real = function<decltype(_ibv_query_gid_table)>("_ibv_query_gid_table");
  return hand_on(real, context, entries, max_entries, flags, entry_size);
}

[[gnu::weak, gnu::visibility("hidden")]] ibv_pd* ibv_alloc_pd(ibv_context* context) {
  static auto* const real = function<decltype(ibv_alloc_pd)>("ibv_alloc_pd");
  return hand_on(real, context);
}

[[gnu::weak, gnu::visibility("hidden")]] int ibv_dealloc_pd(ibv_pd* pd) {
  static auto* const real = function<decltype(ibv_dealloc_pd)>("ibv_dealloc_pd");
  return hand_on(real, pd);
}

[[gnu::weak, gnu::visibility("hidden")]] ibv_mr* ibv_reg_mr_iova2(ibv_pd* pd, void* addr,
                                                                  size_t length, uint64_t iova,
                                                                  unsigned int access) {
  static auto* const real = function<decltype(ibv_reg_mr_iova2)>("ibv_reg_mr_iova2");
  return hand_on(real, pd, addr, length, iova, access);
}

[[gnu::weak, gnu::visibility("hidden")]] ibv_mr* ibv_reg_mr(ibv_pd* pd, void* addr, size_t length,
                                                            int access) {
  static auto* const real = function<decltype(ibv_reg_mr)>("ibv_reg_mr");
  return hand_on(real, pd, addr, length, access);
}

[[gnu::weak, gnu::visibility("hidden")]] ibv_mr* ibv_reg_dmabuf_mr(ibv_pd* pd, uint64_t offset,
                                                                   size_t length, uint64_t iova,
                                                                   int fd, int access) {
  static auto* const real = function<decltype(ibv_reg_dmabuf_mr)>("ibv_reg_dmabuf_mr");
  return hand_on(real, pd, offset, length, iova, fd, access);
}

[[gnu::weak, gnu::visibility("hidden")]] int ibv_dereg_mr(ibv_mr* mr) {
  static auto* const real = function<decltype(ibv_dereg_mr)>("ibv_dereg_mr");
  return hand_on(real, mr);
}

[[gnu::weak, gnu::visibility("hidden")]] ibv_comp_channel* ibv_create_comp_channel(
    ibv_context* context) {
  static auto* const real = function<decltype(ibv_create_comp_channel)>("ibv_create_comp_channel");
  return hand_on(real, context);
}

[[gnu::weak, gnu::visibility("hidden")]] int ibv_destroy_comp_channel(ibv_comp_channel* channel) {
  static auto* const real =
      function<decltype(ibv_destroy_comp_channel)>("ibv_destroy_comp_channel");
  return hand_on(real, channel);
}

[[gnu::weak, gnu::visibility("hidden")]] ibv_cq* ibv_create_cq(ibv_context* context, int cqe,
                                                               void* cq_context,
                                                               ibv_comp_channel* channel,
                                                               int comp_vector) {
  static auto* const real = function<decltype(ibv_create_cq)>("ibv_create_cq");
  return hand_on(real, context, cqe, cq_context, channel, comp_vector);
}

[[gnu::weak, gnu::visibility("hidden")]] int ibv_destroy_cq(ibv_cq* cq) {
  static auto* const real = function<decltype(ibv_destroy_cq)>("ibv_destroy_cq");
  return hand_on(real, cq);
}

[[gnu::weak, gnu::visibility("hidden")]] int ibv_get_cq_event(ibv_comp_channel* channel,
                                                              ibv_cq** cq, void** cq_context) {
  static auto* const real = function<decltype(ibv_get_cq_event)>("ibv_get_cq_event");
  return hand_on(real, channel, cq, cq_context);
}

[[gnu::weak, gnu::visibility("hidden")]] void ibv_ack_cq_events(ibv_cq* cq, unsigned int nevents) {
  static auto* const real = function<decltype(ibv_ack_cq_events)>("ibv_ack_cq_events");
  hand_on(real, cq, nevents);
}

[[gnu::weak, gnu::visibility("hidden")]] ibv_qp* ibv_create_qp(ibv_pd* pd,
                                                               ibv_qp_init_attr* qp_init_attr) {
  static auto* const real = function<decltype(ibv_create_qp)>("ibv_create_qp");
  return hand_on(real, pd, qp_init_attr);
}

[[gnu::weak, gnu::visibility("hidden")]] int ibv_modify_qp(ibv_qp* qp, ibv_qp_attr* attr,
                                                           int attr_mask) {
  static auto* const real = function<decltype(ibv_modify_qp)>("ibv_modify_qp");
  return hand_on(real, qp, attr, attr_mask);
}

[[gnu::weak, gnu::visibility("hidden")]] int ibv_destroy_qp(ibv_qp* qp) {
  static auto* const real = function<decltype(ibv_destroy_qp)>("ibv_destroy_qp");
  return hand_on(real, qp);
}

[[gnu::weak, gnu::visibility("hidden")]] const char* ibv_port_state_str(ibv_port_state port_state) {
  static auto* const real = function<decltype(ibv_port_state_str)>("ibv_port_state_str");
  return hand_on(real, port_state);
}

}  // extern "C"
