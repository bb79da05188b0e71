#include "troupe/transport/shm/chunk_memory.hpp"

#include <algorithm>
#include <span>
#include <string>
#include <utility>

#include <sys/mman.h>
#include <sys/stat.h>

#include "troupe/transport/shm/sealed_memory.hpp"

namespace troupe::transport::shm {

namespace {

/// The compiler may repeat a plain read, and of memory that the peer writes the second read may
/// find another value than the one that was checked.
template <class Number>
Number read_once(Number& shared) noexcept {
  return std::atomic_ref{shared}.load(std::memory_order_relaxed);
}

}  // namespace

chunk_request taken_request(chunk_state& from) noexcept {
  auto& what = from.request;
  return {read_once(what.grant), read_once(what.transfer), read_once(what.dir),
          read_once(what.runs)};
}

std::vector<chunk_run> taken_runs(chunk_state& from, std::size_t count,
                                  std::vector<chunk_run> into) {
  into.clear();
  into.reserve(count);
  for (auto& run : std::span{from.runs}.first(std::min(count, max_chunk_runs))) {
    into.push_back({read_once(run.offset), read_once(run.length), read_once(run.stride),
                    read_once(run.count), 0});
  }
  return into;
}

chunk_answer taken_answer(chunk_state& from) noexcept {
  chunk_answer said;
  said.status = read_once(from.answer.status);
  if (said.status == 0) return said;  // success has no sentence
  for (std::size_t i = 0; i < said.sentence.size(); ++i) {
    said.sentence[i] = read_once(from.answer.sentence[i]);
  }
  return said;
}

result<std::shared_ptr<chunk_area>> chunk_area::create() {
  auto fd = make_sealed("troupe:chunks", sizeof(chunk_memory));
  if (!fd) return fail(std::move(fd).error());
  return map(std::move(*fd), sizeof(chunk_memory));
}

result<std::shared_ptr<chunk_area>> chunk_area::map(owned_fd fd, std::uint64_t size) {
  if (size != sizeof(chunk_memory)) {
    return fail(errc::unauthorized, "the peer's chunks have " + std::to_string(size) +
                                        " bytes, expected " + std::to_string(sizeof(chunk_memory)));
  }
  auto at = map_sealed(fd.get(), sizeof(chunk_memory));
  if (!at) return fail(std::move(at).error());
  std::shared_ptr<chunk_area> made{new chunk_area};
  struct stat status {};
  if (::fstat(fd.get(), &status) == 0) made->number_ = status.st_ino;
  made->fd_ = std::move(fd);
  made->memory_ = reinterpret_cast<chunk_memory*>(*at);
  return made;
}

chunk_area::~chunk_area() {
  if (pinned_by_ != nullptr) pinned_by_->unpin(pinned_);
  if (memory_ != nullptr) ::munmap(memory_, sizeof(chunk_memory));
}

result<void> chunk_area::pin(xgmi::gpu_runtime& by, std::uint32_t gpu) {
  const std::lock_guard lock{mutex_};
  if (pinned_by_ != nullptr) return {};
  auto made = by.pin(gpu, {memory_->bytes.front().data(), sizeof memory_->bytes});
  if (!made) return fail(std::move(made).error());
  pinned_ = *made;
  pinned_by_ = &by;
  return {};
}

xgmi::pinned_memory chunk_area::pinned(std::size_t index) const noexcept {
  const auto offset = index * chunk_size;
  return {pinned_.host + offset, pinned_.device_address + offset, chunk_size};
}

}  // namespace troupe::transport::shm
