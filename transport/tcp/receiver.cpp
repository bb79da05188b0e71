#include "troupe/transport/tcp/receiver.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include <sys/socket.h>

#include "troupe/transport/os_error.hpp"
#include "troupe/transport/wire_access.hpp"

namespace troupe::transport::tcp {

namespace {

constexpr std::size_t max_pieces = 1023;  // of data; one more piece receives what follows

}  // namespace

lane_receiver::lane_receiver(int fd, frame_handler& handler)
    : fd_{fd}, handler_{handler}, buffer_(buffer_size) {}

lane_receiver::outcome lane_receiver::run(std::size_t budget) {
  bool worked = false;
  emptied_ = false;
  while (true) {
    const auto at = consume();
    if (at == step::failed) return outcome::failed;
    if (at == step::need_room) {
      emptied_ = false;  // more data have arrived than there is room for
      return worked ? outcome::worked : outcome::nothing;
    }
    if (budget == 0) return outcome::worked;
    const auto got = receive();
    if (got == 0) return outcome::ended;
    if (got < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) {
        emptied_ = true;
        return worked ? outcome::worked : outcome::nothing;
      }
      error_ = {errc::peer_lost, "the connection to the peer failed: " + what_errno(errno)};
      return outcome::failed;
    }
    worked = true;
    const auto bytes = static_cast<std::size_t>(got);
    // Less than requested: the socket is empty; save the call that would return EAGAIN.
    emptied_ = bytes < asked_;
    budget = emptied_ ? 0 : budget - std::min(budget, bytes);
  }
}

// -- bytes in the buffer

lane_receiver::step lane_receiver::consume() {
  while (true) {
    auto in = std::span<const std::byte>{buffer_}.subspan(begin_, end_ - begin_);
    if (to_chunk()) {
      const auto place = room();
      if (to_chunk() && place.empty()) return step::need_room;
      if (to_chunk()) in = in.first(std::min(in.size(), place.size()));
    }
    const auto before = in.size();
    const auto event = decoder_.next(in);
    begin_ += before - in.size();
    if (event.what == frame_decoder::kind::need_more) return step::need_bytes;
    if (handle(event) == step::failed) return step::failed;
  }
}

lane_receiver::step lane_receiver::handle(const frame_decoder::event& event) {
  switch (event.what) {
    case frame_decoder::kind::need_more: return step::need_bytes;
    case frame_decoder::kind::begin: {
      stored_.clear();
      landed_ = true;
      auto where = handler_.on_begin(decoder_.header(), event.bytes);
      if (!where) return refuse(std::move(where).error());
      landing_ = std::move(*where);
      return step::go_on;
    }
    case frame_decoder::kind::session: keep_session(event.bytes); return step::go_on;
    case frame_decoder::kind::data: land(event.bytes); return step::go_on;
    case frame_decoder::kind::end: return end_frame();
    case frame_decoder::kind::malformed:
      return refuse({errc::link_broken, "the peer broke the tcp protocol: " + decoder_.reason()});
  }
  return step::failed;
}

lane_receiver::step lane_receiver::end_frame() {
  if (landing_.stage != nullptr) {
    // The sender replaced data that it could not send intact by zeros: do not copy those.
    if (decoder_.trailer_status() == 0 && landed_ && !landing_.stage->launch(landing_)) {
      landed_ = false;
    }
    landing_.stage->drop();
  }
  auto ok =
      handler_.on_end(decoder_.header(), session_, landed_, landing_, decoder_.trailer_status());
  landing_ = {};
  session_ = {};
  session_in_buffer_ = false;
  if (stored_.capacity() > buffer_size) stored_ = {};
  return ok ? step::go_on : refuse(std::move(ok).error());
}

lane_receiver::step lane_receiver::refuse(troupe::error why) {
  error_ = std::move(why);
  return step::failed;
}

void lane_receiver::keep_session(std::span<const std::byte> part) {
  if (part.size() == decoder_.header().session_size) {
    session_ = part;
    session_in_buffer_ = true;
    return;
  }
  // Grows by the bytes received, never by the announced size.
  stored_.insert(stored_.end(), part.begin(), part.end());
  session_ = stored_;
}

void lane_receiver::save_session() {
  if (!session_in_buffer_) return;
  stored_.assign(session_.begin(), session_.end());
  session_ = stored_;
  session_in_buffer_ = false;
}

// A place in a chunk for the next data. If empty, the data wait, or, with `landed_` false, are
// dropped.
std::span<std::byte> lane_receiver::room() {
  auto place = landing_.stage->room();
  if (place) return *place;
  landing_.group->note(place.error());
  landed_ = false;
  return {};
}

void lane_receiver::stage(std::span<const std::byte> bytes) {
  std::memcpy(room().data(), bytes.data(), bytes.size());
  if (!landing_.stage->filled(landing_, bytes.size())) landed_ = false;
}

void lane_receiver::drop_chunk() noexcept {
  if (landing_.stage != nullptr) landing_.stage->drop();
}

// Lands data that were received together with the head of their frame.
void lane_receiver::land(std::span<const std::byte> bytes) {
  payload_ += bytes.size();
  if (!landing_.guard || !landed_) {
    landed_ = false;
    return;
  }
  if (landing_.stage != nullptr) {
    stage(bytes);
    return;
  }
  const scoped_pin pin{*landing_.guard};
  if (!pin) {
    landed_ = false;
    return;
  }
  const wire_access access;
  while (!bytes.empty()) {
    std::array<iovec, 16> pieces{};
    const auto count = landing_.cursor.peek(landing_.runs, pieces, bytes.size());
    if (count == 0) return;
    for (std::size_t i = 0; i < count; ++i) {
      std::memcpy(pieces[i].iov_base, bytes.data(), pieces[i].iov_len);
      bytes = bytes.subspan(pieces[i].iov_len);
      landing_.cursor.advance(landing_.runs, pieces[i].iov_len);
    }
  }
}

// -- bytes from the socket

long lane_receiver::receive() {
  save_session();  // the buffer is about to change
  if (decoder_.data_left() == 0) return receive_head();
  if (to_chunk()) return receive_staged();
  return landing_.guard && landed_ ? receive_data() : receive_to_drop();
}

long lane_receiver::receive_head() {
  if (begin_ == end_) {
    begin_ = end_ = 0;
  } else if (buffer_size - end_ < read_ahead) {
    std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
  }
  // Only a long session frame uses the whole buffer; otherwise read little ahead, since the bytes
  // that follow may be data with a place of their own.
  asked_ = std::min(buffer_size - end_, std::max(read_ahead, decoder_.session_left()));
  const auto got = ::recv(fd_, buffer_.data() + end_, asked_, MSG_DONTWAIT);
  if (got > 0) end_ += static_cast<std::size_t>(got);
  return got;
}

long lane_receiver::receive_data() {
  // Filled before it is read; do not clear it on every call.
  std::array<iovec, max_pieces + 1> pieces;  // NOLINT(cppcoreguidelines-pro-type-member-init)
  const auto left = decoder_.data_left();
  auto count = landing_.cursor.peek(landing_.runs, std::span{pieces}.first(max_pieces), left);
  std::size_t in_place = 0;
  for (std::size_t i = 0; i < count; ++i) in_place += pieces[i].iov_len;
  if (in_place == 0) {  // cannot happen: on_begin has checked that the runs hold the data
    landed_ = false;
    return receive_to_drop();
  }
  asked_ = in_place;
  begin_ = end_ = 0;  // with data still to come, the buffer is empty
  if (in_place == left) {
    pieces[count++] = {buffer_.data(), read_ahead};
    asked_ += read_ahead;
  }
  long got = 0;
  {
    const scoped_pin pin{*landing_.guard};
    if (!pin) {
      landed_ = false;
      return receive_to_drop();
    }
    msghdr message{};
    message.msg_iov = pieces.data();
    message.msg_iovlen = count;
    const wire_access access;
    got = ::recvmsg(fd_, &message, MSG_DONTWAIT);
  }
  if (got <= 0) return got;
  const auto placed = std::min(static_cast<std::size_t>(got), in_place);
  payload_ += placed;
  landing_.cursor.advance(landing_.runs, placed);
  decoder_.took_data(placed);
  end_ = static_cast<std::size_t>(got) - placed;
  return got;
}

// Like `receive_data`, into the chunk in which `consume` found room.
long lane_receiver::receive_staged() {
  const auto left = decoder_.data_left();
  const auto place = room();
  const auto in_place = std::min(left, place.size());
  std::array<iovec, 2> pieces{{{place.data(), in_place}, {buffer_.data(), read_ahead}}};
  begin_ = end_ = 0;  // with data still to come, the buffer is empty
  const bool all = in_place == left;
  asked_ = in_place + (all ? read_ahead : 0);
  msghdr message{};
  message.msg_iov = pieces.data();
  message.msg_iovlen = all ? 2 : 1;
  const auto got = ::recvmsg(fd_, &message, MSG_DONTWAIT);
  if (got <= 0) return got;
  const auto placed = std::min(static_cast<std::size_t>(got), in_place);
  payload_ += placed;
  decoder_.took_data(placed);
  end_ = static_cast<std::size_t>(got) - placed;
  if (!landing_.stage->filled(landing_, placed)) landed_ = false;
  return got;
}

// Skips the data of a frame that was refused or whose grant was revoked in the middle of it. The
// stream continues behind the frame.
long lane_receiver::receive_to_drop() {
  landed_ = false;
  begin_ = end_ = 0;
  asked_ = std::min(buffer_size, decoder_.data_left());
  const auto got = ::recv(fd_, buffer_.data(), asked_, MSG_DONTWAIT);
  if (got > 0) {
    payload_ += static_cast<std::size_t>(got);
    decoder_.took_data(static_cast<std::size_t>(got));
  }
  return got;
}

}  // namespace troupe::transport::tcp
