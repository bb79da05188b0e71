#include "troupe/transport/tcp/landing_stage.hpp"

#include "troupe/transport/tcp/receiver.hpp"

namespace troupe::transport::tcp {

result<std::span<std::byte>> landing_stage::room() {
  if (!chunk_) {
    auto chunk = copies_.lend(quota_);
    if (!chunk) return fail(std::move(chunk).error());
    chunk_ = std::move(*chunk);
    used_ = 0;
    if (!chunk_) return std::span<std::byte>{};
  }
  return chunk_.bytes().subspan(used_);
}

bool landing_stage::filled(landing& where, std::size_t bytes) {
  used_ += bytes;
  return used_ < chunk_.bytes().size() || launch(where);
}

bool landing_stage::launch(landing& where) {
  if (used_ == 0) return true;
  auto chunk = std::move(chunk_);
  const auto bytes = std::exchange(used_, 0);
  const scoped_pin pin{*where.guard};
  if (!pin) return false;
  copies_.start(std::move(chunk), {.dir = direction::read,
                                   .runs = where.runs,
                                   .from = where.cursor,
                                   .bytes = bytes,
                                   .memory = where.memory,
                                   .transfer = where.transfer,
                                   .batch = 0,
                                   .group = where.group});
  where.cursor.advance(where.runs, bytes);
  return true;
}

void landing_stage::drop() noexcept {
  chunk_.release();
  used_ = 0;
}

}  // namespace troupe::transport::tcp
