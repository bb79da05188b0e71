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

// NOLINTBEGIN(cppcoreguidelines-macro-usage): a function's name, its parameters and their names, once each
#define TROUPE_HAND_ON(result, name, parameters, ...)               \
  [[gnu::weak, gnu::visibility("hidden")]] result name parameters { \
    static auto* const real = function<decltype(name)>(#name);      \
    return hand_on(real, __VA_ARGS__);                              \
  }
// NOLINTEND(cppcoreguidelines-macro-usage)

extern "C" {

TROUPE_HAND_ON(const char*, ibv_wc_status_str, (ibv_wc_status status), status)
TROUPE_HAND_ON(ibv_device**, ibv_get_device_list, (int* num_devices), num_devices)
TROUPE_HAND_ON(void, ibv_free_device_list, (ibv_device * *list), list)
TROUPE_HAND_ON(const char*, ibv_get_device_name, (ibv_device * device), device)
TROUPE_HAND_ON(ibv_context*, ibv_open_device, (ibv_device * device), device)
TROUPE_HAND_ON(int, ibv_close_device, (ibv_context * context), context)
TROUPE_HAND_ON(int, ibv_get_async_event, (ibv_context * context, ibv_async_event* event), context,
               event)
TROUPE_HAND_ON(void, ibv_ack_async_event, (ibv_async_event * event), event)
TROUPE_HAND_ON(int, ibv_query_device, (ibv_context * context, ibv_device_attr* device_attr),
               context, device_attr)
TROUPE_HAND_ON(int, ibv_query_port,
               (ibv_context * context, uint8_t port_num, _compat_ibv_port_attr* port_attr), context,
               port_num, port_attr)
TROUPE_HAND_ON(int, ibv_query_gid,
               (ibv_context * context, uint8_t port_num, int index, ibv_gid* gid), context,
               port_num, index, gid)
TROUPE_HAND_ON(ssize_t, _ibv_query_gid_table,
               (ibv_context * context, ibv_gid_entry* entries, size_t max_entries, uint32_t flags,
                size_t entry_size),
               context, entries, max_entries, flags, entry_size)
TROUPE_HAND_ON(ibv_pd*, ibv_alloc_pd, (ibv_context * context), context)
TROUPE_HAND_ON(int, ibv_dealloc_pd, (ibv_pd * pd), pd)
TROUPE_HAND_ON(ibv_mr*, ibv_reg_mr_iova2,
               (ibv_pd * pd, void* addr, size_t length, uint64_t iova, unsigned int access), pd,
               addr, length, iova, access)
TROUPE_HAND_ON(ibv_mr*, ibv_reg_mr, (ibv_pd * pd, void* addr, size_t length, int access), pd, addr,
               length, access)
TROUPE_HAND_ON(ibv_mr*, ibv_reg_dmabuf_mr,
               (ibv_pd * pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access), pd,
               offset, length, iova, fd, access)
TROUPE_HAND_ON(int, ibv_dereg_mr, (ibv_mr * mr), mr)
TROUPE_HAND_ON(ibv_comp_channel*, ibv_create_comp_channel, (ibv_context * context), context)
TROUPE_HAND_ON(int, ibv_destroy_comp_channel, (ibv_comp_channel * channel), channel)
TROUPE_HAND_ON(ibv_cq*, ibv_create_cq,
               (ibv_context * context, int cqe, void* cq_context, ibv_comp_channel* channel,
                int comp_vector),
               context, cqe, cq_context, channel, comp_vector)
TROUPE_HAND_ON(int, ibv_destroy_cq, (ibv_cq * cq), cq)
TROUPE_HAND_ON(int, ibv_get_cq_event, (ibv_comp_channel * channel, ibv_cq** cq, void** cq_context),
               channel, cq, cq_context)
TROUPE_HAND_ON(void, ibv_ack_cq_events, (ibv_cq * cq, unsigned int nevents), cq, nevents)
TROUPE_HAND_ON(ibv_qp*, ibv_create_qp, (ibv_pd * pd, ibv_qp_init_attr* qp_init_attr), pd,
               qp_init_attr)
TROUPE_HAND_ON(int, ibv_modify_qp, (ibv_qp * qp, ibv_qp_attr* attr, int attr_mask), qp, attr,
               attr_mask)
TROUPE_HAND_ON(int, ibv_destroy_qp, (ibv_qp * qp), qp)
TROUPE_HAND_ON(const char*, ibv_port_state_str, (ibv_port_state port_state), port_state)

}  // extern "C"

#undef TROUPE_HAND_ON
