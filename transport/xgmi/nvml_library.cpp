#include "troupe/transport/xgmi/nvml_library.hpp"

#include <array>
#include <string>
#include <type_traits>
#include <utility>

#include <dlfcn.h>

namespace troupe::transport::xgmi {

namespace {

constexpr const char* file = "libnvidia-ml.so.1";

/// Function names and constants from the NVML API Reference, so that its header is not needed.
struct nvml {
  using device = void*;
  static constexpr int success = 0;
  static constexpr int link_ok = 0;                            // NVML_P2P_STATUS_OK
  static constexpr std::array<int, 2> reads_and_writes{0, 1};  // NVML_P2P_CAPS_INDEX_READ, _WRITE

  int (*by_bus_id)(const char*, device*){nullptr};
  int (*link_status)(device, device, int, int*){nullptr};
  const char* (*error_text)(int){nullptr};
  std::string trouble;

  nvml() {
    // Never closed, like the driver.
    auto* const library = ::dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      const char* const why = ::dlerror();
      trouble = why != nullptr ? why : std::string{file} + " cannot be opened";
      return;
    }
    int (*begin)(){nullptr};
    const auto find = [&](auto& call, const char* name) {
      call = reinterpret_cast<std::remove_reference_t<decltype(call)>>(::dlsym(library, name));
      if (call == nullptr && trouble.empty()) trouble = std::string{file} + " has no " + name;
    };
    find(begin, "nvmlInit_v2");
    find(by_bus_id, "nvmlDeviceGetHandleByPciBusId_v2");
    find(link_status, "nvmlDeviceGetP2PStatus");
    find(error_text, "nvmlErrorString");
    if (!trouble.empty()) return;
    if (const int error = begin(); error != success) {
      trouble = std::string{file} + ": " + error_text(error);
    }
  }
};

const nvml& library() {
  static const nvml opened;
  return opened;
}

}  // namespace

usability nvml_reaches(const std::string& gpu, const std::string& peer) {
  const auto& ask = library();
  if (!ask.trouble.empty()) {
    return {false,
            "nothing says whether it can be reached (" + ask.trouble + "); install " + file +
                ", in a container by the driver capability `utility`, or let the process see "
                "both GPUs (CUDA_VISIBLE_DEVICES)"};
  }
  std::array<nvml::device, 2> both{};
  for (auto [id, device] : {std::pair{&gpu, &both[0]}, std::pair{&peer, &both[1]}}) {
    if (const int error = ask.by_bus_id(id->c_str(), device); error != nvml::success) {
      return {false, std::string{file} + " says of GPU " + *id + ": " + ask.error_text(error) +
                         "; give both GPUs to the container"};
    }
  }
  for (const int what : nvml::reads_and_writes) {
    int status = -1;
    const int error = ask.link_status(both[0], both[1], what, &status);
    if (error != nvml::success) {
      return {false, std::string{file} + " says of both GPUs: " + ask.error_text(error)};
    }
    if (status != nvml::link_ok) {
      return {false,
              "GPU " + gpu + " does not reach it: no link between them, or the driver forbids it"};
    }
  }
  return {true, "GPU " + gpu + " reaches GPU " + peer};
}

}  // namespace troupe::transport::xgmi
