#include "troupe/transport/tcp/frame_decoder.hpp"

#include <algorithm>
#include <utility>

namespace troupe::transport::tcp {

namespace {

bool has_trailer(frame_type type) noexcept {
  return type == frame_type::write || type == frame_type::read_data;
}

// The bytes that a write's table announces. Saturates, so no sum wraps.
std::uint64_t announced(std::span<const std::byte> table) noexcept {
  std::uint64_t sum = 0;
  while (!table.empty()) {
    const auto entry = decode_entry(table.first<entry_size>());
    const auto bytes = std::uint64_t{entry.length} * entry.count;  // 32 x 32 bits: cannot wrap
    sum = bytes > UINT64_MAX - sum ? UINT64_MAX : sum + bytes;
    table = table.subspan(entry_size);
  }
  return sum;
}

}  // namespace

frame_decoder::event frame_decoder::next(std::span<const std::byte>& in) {
  switch (state_) {
    case state::head: return on_head(in);
    case state::session: {
      const auto e = take(in, kind::session);
      if (left_ == 0) enter_data();
      return e;
    }
    case state::data: {
      const auto e = take(in, kind::data);
      if (left_ == 0) enter_tail();
      return e;
    }
    case state::trailer: return on_trailer(in);
    case state::done: state_ = state::head; return {kind::end, {}};
    case state::failed: return {kind::malformed, {}};
  }
  return malformed("unknown state");
}

frame_decoder::event frame_decoder::on_head(std::span<const std::byte>& in) {
  if (in.size() < header_size) return {};
  auto header = decode_header(in.first<header_size>());
  if (!header) return malformed(std::move(header).error().message);
  const auto table_size = header->entries * entry_size;
  if (in.size() < header_size + table_size) return {};
  const auto table = in.subspan(header_size, table_size);
  if (header->type == frame_type::write && announced(table) != header->data_size) {
    return malformed("the table of a write and its header name different sizes");
  }
  in = in.subspan(header_size + table_size);
  header_ = *header;
  trailer_status_ = 0;
  enter_session();
  return {kind::begin, table};
}

void frame_decoder::enter_session() {
  left_ = header_.session_size;
  state_ = state::session;
  if (left_ == 0) enter_data();
}

void frame_decoder::enter_data() {
  left_ = header_.data_size;
  state_ = state::data;
  if (left_ == 0) enter_tail();
}

void frame_decoder::enter_tail() {
  state_ = has_trailer(header_.type) ? state::trailer : state::done;
}

frame_decoder::event frame_decoder::take(std::span<const std::byte>& in, kind what) {
  if (in.empty()) return {};
  const auto taken = in.first(std::min(in.size(), left_));
  in = in.subspan(taken.size());
  left_ -= taken.size();
  return {what, taken};
}

void frame_decoder::took_data(std::size_t bytes) noexcept {
  left_ -= std::min(bytes, data_left());
  if (left_ == 0 && state_ == state::data) enter_tail();
}

frame_decoder::event frame_decoder::on_trailer(std::span<const std::byte>& in) {
  if (in.size() < trailer_size) return {};
  const auto status = decode_trailer(in.first<trailer_size>());
  if (!status) return malformed("the trailer's mark is wrong");
  in = in.subspan(trailer_size);
  trailer_status_ = *status;
  state_ = state::head;
  return {kind::end, {}};
}

frame_decoder::event frame_decoder::malformed(std::string reason) {
  state_ = state::failed;
  reason_ = std::move(reason);
  return {kind::malformed, {}};
}

}  // namespace troupe::transport::tcp
