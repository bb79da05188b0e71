#include "troupe/transport/shm/copy_job.hpp"

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <string>

#include <sys/uio.h>

#include "troupe/transport/os_error.hpp"

namespace troupe::transport::shm {

namespace {

struct packed_key {
  std::uint32_t slot;
  std::uint8_t how;
  std::array<std::uint8_t, 3> unused;
  std::uint64_t address;
};
static_assert(sizeof(packed_key) == 16 && sizeof(packed_key) <= remote_grant::max_key_size);

}  // namespace

std::vector<std::byte> grant_key::encode() const {
  const packed_key packed{slot, static_cast<std::uint8_t>(how), {}, address};
  std::vector<std::byte> bytes(sizeof packed);
  std::memcpy(bytes.data(), &packed, sizeof packed);
  return bytes;
}

result<grant_key> grant_key::decode(std::span<const std::byte> key) {
  packed_key packed{};
  if (key.size() != sizeof packed) {
    return fail(errc::unauthorized, "the grant's key has " + std::to_string(key.size()) +
                                        " bytes, one of shm has " + std::to_string(sizeof packed));
  }
  std::memcpy(&packed, key.data(), sizeof packed);
  const auto how = static_cast<memory>(packed.how);
  if (packed.slot >= slots_per_direction ||
      (how != memory::mapped && how != memory::process && how != memory::asked)) {
    return fail(errc::unauthorized, "the grant's key names slot " + std::to_string(packed.slot) +
                                        " and kind " + std::to_string(packed.how) +
                                        ", which do not exist");
  }
  return grant_key{packed.slot, how, packed.address};
}

troupe::error revoked_by_peer(std::size_t piece) {
  return {errc::grant_revoked, "the peer has revoked the grant of piece " + std::to_string(piece) +
                                   "; its transfer has ended there"};
}

job_runner::job_runner(const peer_process& peer, std::int32_t batch_size) noexcept
    : peer_{&peer},
      runs_per_call_{batch_size > 0
                         ? std::min<std::size_t>(static_cast<std::size_t>(batch_size), chunk_runs)
                         : chunk_runs} {
  static_assert(chunk_runs <= IOV_MAX);
}

void job_runner::fill(const copy_job& job, chunk& out, std::size_t max_runs) {
  const auto& piece = job.pieces[job.at.piece];
  const auto& segments = job.work.pieces[job.at.piece].segments;
  std::byte* const local = piece.local->data();
  // An address in another process is only a number; it is never dereferenced here.
  auto* const remote = reinterpret_cast<std::byte*>(piece.remote_address);
  const bool writing = job.work.dir == direction::write;
  out.count = 0;
  out.bytes = 0;
  out.end = job.at;
  auto& at = out.end;
  while (at.segment < segments.size() && out.count < max_runs && out.bytes < chunk_bytes) {
    const auto& s = segments[at.segment];
    if (at.repetition >= s.count || s.length == 0) {
      at.segment += 1;
      at.repetition = 0;
      at.offset = 0;
      continue;
    }
    const std::uint64_t length = std::min(s.length - at.offset, chunk_bytes - out.bytes);
    std::byte* const here = local + s.local_offset + at.repetition * s.local_stride + at.offset;
    std::byte* const there = remote + s.remote_offset + at.repetition * s.remote_stride + at.offset;
    out.runs[out.count++] = writing ? copy_run{there, here, length} : copy_run{here, there, length};
    out.bytes += length;
    at.offset += length;
    if (at.offset < s.length) continue;
    at.offset = 0;
    at.repetition += 1;
    if (at.repetition == s.count) {
      at.segment += 1;
      at.repetition = 0;
    }
  }
}

job_runner::outcome job_runner::step(copy_job& job) const {
  while (job.at.piece < job.pieces.size() &&
         job.at.segment >= job.work.pieces[job.at.piece].segments.size()) {
    job.at = {.piece = job.at.piece + 1};
  }
  if (job.at.piece == job.pieces.size()) return {progress::done};
  const auto& piece = job.pieces[job.at.piece];
  chunk next;
  fill(job, next, piece.mapped ? chunk_runs : runs_per_call_);

  slot_visit visit{*piece.slot, piece.grant};
  if (!visit) {
    job.failure = revoked_by_peer(job.at.piece);
    return {progress::done, true};
  }
  if (piece.mapped) {
    copier_.copy({next.runs.data(), next.count});
  } else if (auto copied = copy_through_kernel(job.work.dir, {next.runs.data(), next.count});
             !copied) {
    job.failure = std::move(copied).error();
    return {progress::done, visit.leave()};
  }
  job.moved += next.bytes;
  job.at = next.end;
  return {progress::more, visit.leave()};
}

result<void> job_runner::carry(const job_piece& piece, direction dir,
                               std::span<const copy_run> runs) const {
  if (!piece.mapped) return copy_through_kernel(dir, runs);
  copier_.copy(runs);
  return {};
}

result<void> job_runner::copy_through_kernel(direction dir, std::span<const copy_run> runs) const {
  std::array<iovec, chunk_runs> here{};
  std::array<iovec, chunk_runs> there{};
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const auto& run = runs[i];
    auto* from = const_cast<std::byte*>(run.from);
    here[i] = {dir == direction::write ? from : run.to, run.length};
    there[i] = {dir == direction::write ? run.to : from, run.length};
  }
  std::size_t first = 0;
  const auto pid = static_cast<pid_t>(peer_->pid());
  const auto ended = [] {
    return fail(errc::peer_lost, "the peer's process has ended; its memory is gone");
  };
  // Checked before the calls, since the pid may have been reused, and after them, which proves that
  // it was the peer's all the time.
  if (!peer_->alive()) return ended();
  while (first < runs.size()) {
    const auto count = runs.size() - first;
    const ssize_t got = dir == direction::write
                            ? ::process_vm_writev(pid, &here[first], count, &there[first], count, 0)
                            : ::process_vm_readv(pid, &here[first], count, &there[first], count, 0);
    if (got <= 0) {
      if (got < 0 && errno == EINTR) continue;
      const int why = got < 0 ? errno : EFAULT;
      const auto code = why == ESRCH   ? errc::peer_lost
                        : why == EPERM ? errc::backend_unavailable
                                       : errc::out_of_range;
      return fail(code, "process_vm_" + std::string{dir == direction::write ? "writev" : "readv"} +
                            " of the peer's memory: " + what_errno(why));
    }
    // A short transfer may end inside a run: continue from that byte.
    auto left = static_cast<std::size_t>(got);
    while (first < runs.size() && left >= here[first].iov_len) left -= here[first++].iov_len;
    if (left != 0) {
      here[first] = {static_cast<std::byte*>(here[first].iov_base) + left,
                     here[first].iov_len - left};
      there[first] = {static_cast<std::byte*>(there[first].iov_base) + left,
                      there[first].iov_len - left};
    }
  }
  if (!peer_->alive()) return ended();
  return {};
}

void copy_job::release_memory() {
  for (auto& piece : pieces) piece.local.release();
}

std::vector<std::uint32_t> copy_job::unfinished() const {
  std::vector<std::uint32_t> bad;
  std::uint32_t index = 0;
  for (std::size_t p = 0; p < work.pieces.size(); ++p) {
    for (std::size_t s = 0; s < work.pieces[p].segments.size(); ++s, ++index) {
      if (p > at.piece || (p == at.piece && s >= at.segment)) bad.push_back(index);
    }
  }
  return bad;
}

}  // namespace troupe::transport::shm
