#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "troupe/kvcache/result.hpp"

namespace troupe::transport::xgmi {

/// Kinds of GPU failures, for all vendors. The runtime maps its driver's errors to these.
enum class gpu_fault : std::uint8_t {
  no_device,      ///< no driver, or no GPU visible to this process
  no_memory,      ///< out of GPU memory or of pinned host memory
  not_permitted,  ///< the two GPUs cannot reach each other, or the memory cannot be exported
  bad_handle,     ///< an exported handle that cannot be opened: its process or its memory is gone
  invalid,        ///< the driver rejects the call: a bug of ours
  lost,           ///< the GPU, or this process's use of it, is out of service until a restart
  other,          ///< any other error of the driver
};

[[nodiscard]] constexpr errc code_of(gpu_fault fault) noexcept {
  switch (fault) {
    case gpu_fault::no_device: return errc::no_device;
    case gpu_fault::no_memory: return errc::pool_exhausted;
    case gpu_fault::not_permitted:
    case gpu_fault::lost: return errc::backend_unavailable;
    case gpu_fault::bad_handle: return errc::peer_lost;
    case gpu_fault::invalid:
    case gpu_fault::other: return errc::internal;
  }
  return errc::internal;
}

/// "GPU 0000:1b:00.0: cudaMalloc: out of memory"; `where` may be empty.
[[nodiscard]] inline troupe::error gpu_error(gpu_fault fault, const std::string& where,
                                             std::string_view call, std::string_view said) {
  std::string text = where.empty() ? "GPU: " : "GPU " + where + ": ";
  text.append(call).append(": ").append(said);
  if (fault == gpu_fault::lost) {
    text += "; this process cannot use its GPUs any more: restart it";
  }
  return {code_of(fault), std::move(text)};
}

/// Advice for an exported event that the driver refuses to open.
inline constexpr std::string_view foreign_event =
    "; the event must have been made with the interprocess and the disable-timing flag, by another "
    "process of this host that still runs (an event of this process is named by its pointer)";

}  // namespace troupe::transport::xgmi
