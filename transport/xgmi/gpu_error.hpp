#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "troupe/kvcache/result.hpp"

namespace troupe::transport::xgmi {

/// What may go wrong with a GPU, whoever made it. The runtime sorts its driver's errors into these.
enum class gpu_fault : std::uint8_t {
  no_device,      ///< no driver, no GPU, or none that this process may see
  no_memory,      ///< of the GPU, or pinned memory of the host
  not_permitted,  ///< these two GPUs do not reach each other; this memory cannot be exported
  bad_handle,     ///< an exported handle that cannot be opened: its process or its memory is gone
  invalid,        ///< a call that the driver does not accept: a defect of ours
  lost,           ///< the GPU, or this process's use of it, is out of service until a restart
  other,          ///< what the driver says and we have no name for
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

/// What to do about an exported event that a driver does not open.
inline constexpr std::string_view foreign_event =
    "; the event must have been made with the interprocess and the disable-timing flag, by another "
    "process of this host that still runs (an event of this process is named by its pointer)";

}  // namespace troupe::transport::xgmi
