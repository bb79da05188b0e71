#include "troupe/transport/rdma/small_batch.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <type_traits>
#include <utility>

namespace troupe::transport::rdma {

namespace {

struct head {
  std::uint64_t transfer{0};
  std::uint32_t bytes{0};
  std::uint32_t runs{0};
};
static_assert(std::is_trivially_copyable_v<head>);
static_assert(std::is_trivially_copyable_v<small_run> && sizeof(small_run) == 24);

constexpr std::size_t max_sentence = 512;

unexpected wrong_batch(const std::string& what) {
  return fail(errc::unauthorized, "the rdma peer's small batch: " + what);
}

}  // namespace

result<small_batch> small_batch::decode(std::span<const std::byte> payload) {
  head said;
  if (payload.size() < sizeof said) {
    return wrong_batch("found " + std::to_string(payload.size()) + " bytes, expected at least " +
                       std::to_string(sizeof said));
  }
  std::memcpy(&said, payload.data(), sizeof said);
  const auto rest = payload.subspan(sizeof said);
  if (said.bytes > max_small_bytes || said.bytes > rest.size() ||
      said.runs > (rest.size() - said.bytes) / sizeof(small_run)) {
    return wrong_batch(std::to_string(said.bytes) + " bytes in " + std::to_string(said.runs) +
                       " runs do not fit into a message of " + std::to_string(payload.size()) +
                       " bytes, or are more than " + std::to_string(max_small_bytes));
  }
  small_batch made;
  made.transfer_ = transfer_id{said.transfer};
  made.bytes_ = rest.first(said.bytes);
  made.runs_ = rest.subspan(said.bytes, said.runs * sizeof(small_run));
  made.frame_ = rest.subspan(said.bytes + made.runs_.size());
  std::uint64_t in_runs = 0;
  bool empty = said.runs == 0 || made.frame_.empty();
  for (std::size_t i = 0; i < said.runs; ++i) {
    const auto here = made.run(i).bytes;
    empty = empty || here == 0;
    in_runs += here;
  }
  if (empty) return wrong_batch("without a frame, without runs, or with an empty one");
  if (in_runs != said.bytes) {
    return wrong_batch(std::to_string(said.bytes) + " bytes, its runs have " +
                       std::to_string(in_runs));
  }
  return made;
}

small_run small_batch::run(std::size_t index) const noexcept {
  small_run made;
  std::memcpy(&made, runs_.data() + index * sizeof made, sizeof made);
  return made;
}

std::uint32_t small_bytes_of(const batch& work, std::size_t room) noexcept {
  if (work.dir != direction::write || work.frame.empty()) return 0;
  std::uint64_t bytes = 0;
  std::uint64_t runs = 0;
  for (const auto& piece : work.pieces) {
    for (const auto& s : piece.segments) {
      if (s.length == 0) continue;
      if (s.length > max_small_bytes || s.count > max_small_bytes) return 0;
      bytes += s.length * s.count;
      runs += s.count;
      if (bytes > max_small_bytes) return 0;
    }
  }
  const auto all = sizeof(head) + bytes + runs * sizeof(small_run) + work.frame.size();
  return all <= room ? static_cast<std::uint32_t>(bytes) : 0;
}

small_writer::small_writer(std::uint32_t bytes, std::span<std::byte> into) noexcept
    : begin_{into.data()}, all_{bytes}, bytes_{begin_ + sizeof(head)}, run_at_{bytes_ + bytes} {}

void small_writer::add(std::span<const segment> segments, const std::byte* local,
                       std::uint64_t grant) noexcept {
  for (const auto& s : segments) {
    if (s.length == 0) continue;
    for (std::uint32_t n = 0; n < s.count; ++n) {
      const small_run run{.grant = grant,
                          .offset = s.remote_offset + n * s.remote_stride,
                          .bytes = static_cast<std::uint32_t>(s.length),
                          .unused = 0};
      std::memcpy(bytes_, local + s.local_offset + n * s.local_stride, s.length);
      std::memcpy(run_at_, &run, sizeof run);
      bytes_ += s.length;
      run_at_ += sizeof run;
      ++runs_;
    }
  }
}

std::span<const std::byte> small_writer::end(transfer_id transfer,
                                             std::span<const std::byte> frame) noexcept {
  const head said{.transfer = transfer.value, .bytes = all_, .runs = runs_};
  std::memcpy(begin_, &said, sizeof said);
  std::memcpy(run_at_, frame.data(), frame.size());
  return {begin_, run_at_ + frame.size()};
}

completion small_flight::outcome(std::optional<troupe::error> why) const {
  completion made{.id = id,
                  .transfer = transfer,
                  .failure = std::move(why),
                  .bytes = bytes,
                  .bad_segments = {}};
  if (made.failure) {
    made.bytes = 0;
    made.bad_segments.resize(segments);
    std::iota(made.bad_segments.begin(), made.bad_segments.end(), 0U);
  }
  return made;
}

std::vector<std::byte> encode_refusal(const troupe::error& why) {
  const auto length = std::min(why.message.size(), max_sentence);
  std::vector<std::byte> made(1 + length);
  made[0] = static_cast<std::byte>(why.code);
  std::memcpy(made.data() + 1, why.message.data(), length);
  return made;
}

result<troupe::error> decode_refusal(std::span<const std::byte> payload) {
  if (payload.empty() || payload.size() > 1 + max_sentence ||
      !is_errc(static_cast<std::uint8_t>(payload[0]))) {
    return fail(errc::unauthorized, "the rdma peer refused a small batch without a reason");
  }
  const auto sentence = payload.subspan(1);
  return troupe::error{
      static_cast<errc>(payload[0]),
      std::string{reinterpret_cast<const char*>(sentence.data()), sentence.size()}};
}

}  // namespace troupe::transport::rdma
