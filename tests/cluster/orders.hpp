#pragma once

/// The calls from the frontend of the tests to their engines, as text.

#include <chrono>
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

namespace troupe::testing {

/// Call "prefill": compute a request and offer it. Answered once it is offered.
struct prefill_order {
  std::string request;
  std::uint32_t tokens{0};
  std::uint64_t seed{0};  ///< of the bytes
  std::chrono::milliseconds deadline{0};
  std::chrono::milliseconds per_layer{0};  ///< compute time of one layer
};

/// Call "decode": take a request's cache, use it for a time, give its blocks back. Answered once
/// its bytes have been checked twice.
struct decode_order {
  std::string request;
  std::string source;  ///< node name
  std::string mode;    ///< `write` or `read`
  std::uint32_t tokens{0};
  std::uint64_t seed{0};
  std::chrono::milliseconds deadline{0};
  std::chrono::milliseconds use{0};  ///< how long the blocks are needed
  std::uint64_t placed_by{0}, placed_at{0};
  bool fail_when_full{false};
};

/// Call "abort", with the request's id: gives it up. Call "outcome", with the request's id:
/// answered once the operation has an outcome: `done`, or the error as text.

/// Call "counters": the counters of one life of an engine.
struct engine_counters {
  std::uint64_t begun{0}, done{0}, failed{0}, unpinned{0}, open{0};
};

using call_bytes = std::vector<std::uint8_t>;

inline call_bytes bytes_of(const std::ostringstream& text) {
  const auto s = text.str();
  return {s.begin(), s.end()};
}
inline call_bytes encode(const prefill_order& o) {
  std::ostringstream out;
  out << o.request << ' ' << o.tokens << ' ' << o.seed << ' ' << o.deadline.count() << ' '
      << o.per_layer.count();
  return bytes_of(out);
}
inline call_bytes encode(const decode_order& o) {
  std::ostringstream out;
  out << o.request << ' ' << o.source << ' ' << o.mode << ' ' << o.tokens << ' ' << o.seed << ' '
      << o.deadline.count() << ' ' << o.use.count() << ' ' << o.placed_by << ' ' << o.placed_at
      << ' ' << o.fail_when_full;
  return bytes_of(out);
}
inline call_bytes encode(const engine_counters& c) {
  std::ostringstream out;
  out << c.begun << ' ' << c.done << ' ' << c.failed << ' ' << c.unpinned << ' ' << c.open;
  return bytes_of(out);
}

inline prefill_order prefill_order_from(const call_bytes& bytes) {
  prefill_order o;
  std::istringstream in{std::string{bytes.begin(), bytes.end()}};
  std::int64_t deadline = 0;
  std::int64_t per_layer = 0;
  in >> o.request >> o.tokens >> o.seed >> deadline >> per_layer;
  o.deadline = std::chrono::milliseconds{deadline};
  o.per_layer = std::chrono::milliseconds{per_layer};
  return o;
}
inline decode_order decode_order_from(const call_bytes& bytes) {
  decode_order o;
  std::istringstream in{std::string{bytes.begin(), bytes.end()}};
  std::int64_t deadline = 0;
  std::int64_t use = 0;
  in >> o.request >> o.source >> o.mode >> o.tokens >> o.seed >> deadline >> use >> o.placed_by >>
      o.placed_at >> o.fail_when_full;
  o.deadline = std::chrono::milliseconds{deadline};
  o.use = std::chrono::milliseconds{use};
  return o;
}
inline engine_counters counters_from(const call_bytes& bytes) {
  engine_counters c;
  std::istringstream in{std::string{bytes.begin(), bytes.end()}};
  in >> c.begun >> c.done >> c.failed >> c.unpinned >> c.open;
  return c;
}

}  // namespace troupe::testing
