#include "xgmi_bare.hpp"

namespace troupe::bench {

using namespace transport;

bare_copies::bare_copies(xgmi::gpu_runtime& runtime, std::uint32_t gpu, copy_ends here,
                         copy_ends there)
    : runtime_{runtime},
      here_{here},
      there_{there},
      stream_{need(runtime.make_stream(gpu), "stream")},
      event_{need(runtime.make_event(gpu), "event")} {}

bare_copies::~bare_copies() {
  runtime_.release_event(event_);
  runtime_.release_stream(stream_);
}

void bare_copies::copy(std::uint64_t here, std::uint64_t there, std::uint64_t bytes,
                       direction dir) {
  const bool writes = dir == direction::write;
  const auto* const from = writes ? here_.source + here : there_.source + there;
  auto* const to = writes ? there_.target + there : here_.target + here;
  need(runtime_.copy(stream_, reinterpret_cast<std::uintptr_t>(to),
                     reinterpret_cast<std::uintptr_t>(from), bytes),
       "copy");
}

double bare_copies::until_done(clock_type::time_point since) {
  need(runtime_.record(event_, stream_), "record");
  while (!need(runtime_.happened(event_), "copy")) {
  }
  return microseconds_since(since);
}

double bare_copies::contiguous(std::uint64_t bytes, direction dir) {
  const auto start = clock_type::now();
  copy(0, 0, bytes, dir);
  return until_done(start);
}

double bare_copies::one_per_block(std::span<const segment> segments, direction dir) {
  const auto start = clock_type::now();
  for (const auto& s : segments) copy(s.local_offset, s.remote_offset, s.length, dir);
  return until_done(start);
}

}  // namespace troupe::bench
