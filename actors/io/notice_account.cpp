#include "troupe/io/notice_account.hpp"

#include <algorithm>

namespace troupe::io {

namespace {

std::uint64_t less(std::uint64_t from, std::uint64_t what) noexcept {
  return from - std::min(from, what);
}

}  // namespace

bool notice_account::has_room_for(std::size_t bytes) const noexcept {
  // The peer's claims about its room do not lift the limit on notices that wait here.
  if (reserved_.notices >= most_.notices || reserved_.bytes + bytes > most_.bytes) return false;
  const auto unread = less(handed_.notices + reserved_.notices, taken_.notices);
  const auto unread_bytes = less(handed_.bytes + reserved_.bytes, taken_.bytes);
  return unread < room_.notices && unread_bytes + bytes <= room_.bytes;
}

void notice_account::reserve(std::size_t bytes) noexcept {
  ++reserved_.notices;
  reserved_.bytes += bytes;
}

void notice_account::unreserve(std::size_t bytes) noexcept {
  reserved_.notices = less(reserved_.notices, 1);
  reserved_.bytes = less(reserved_.bytes, bytes);
}

void notice_account::hand_over(std::size_t bytes) noexcept {
  unreserve(bytes);
  ++handed_.notices;
  handed_.bytes += bytes;
  ++changes_;
}

void notice_account::take_back(std::size_t bytes) noexcept {
  handed_.notices = less(handed_.notices, 1);
  handed_.bytes = less(handed_.bytes, bytes);
  ++changes_;
}

void notice_account::batch_ends() noexcept {
  if (in_flight_ > 0) --in_flight_;
}

std::optional<std::uint64_t> notice_account::ask() noexcept {
  if (!uncertain_ || asked_ || in_flight_ != 0) return std::nullopt;
  asked_at_ = changes_;
  asked_ = ++questions_;
  return asked_;
}

void notice_account::on_count(const taken& said) noexcept {
  // Counts from two threads of the peer may arrive in either order.
  taken_.notices = std::max(taken_.notices, said.taken.notices);
  taken_.bytes = std::max(taken_.bytes, said.taken.bytes);
  if (!asked_ || said.answers != *asked_) return;
  asked_.reset();
  // The peer's count does not include notices handed over since or still in flight.
  if (asked_at_ != changes_ || in_flight_ != 0) return;
  handed_ = said.received;
  uncertain_ = false;
}

void notice_account::begin(const accepted& said) noexcept {
  room_ = said.room;
  handed_ = said.received;
  taken_ = said.taken;
  // A batch of a former link may still end, and its notice then be counted as not arrived.
  uncertain_ = in_flight_ != 0;
  asked_.reset();
}

}  // namespace troupe::io
