#include "tcp_bare.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include <sys/mman.h>
#include <sys/socket.h>

#include "tcp_work.hpp"

namespace troupe::bench {

using transport::direction;

namespace {

// Commands to the child: 'w' block: read batches and acknowledge each; 'r' block: answer each
// request byte with a batch; 'l' n: answer n messages.
struct bare_command {
  char what;
  std::uint64_t number;
};

// Moves a whole vector with as few calls as the socket allows; blocks.
template <class Call>
void move_all(Call call, int fd, std::vector<iovec> pieces) {
  std::size_t first = 0;
  while (first < pieces.size()) {
    auto moved = call(fd, pieces.data() + first,
                      static_cast<int>(std::min<std::size_t>(pieces.size() - first, 1024)));
    if (moved <= 0) die("bare socket");
    while (moved > 0) {
      const auto step =
          std::min<std::size_t>(static_cast<std::size_t>(moved), pieces[first].iov_len);
      pieces[first].iov_base = static_cast<char*>(pieces[first].iov_base) + step;
      pieces[first].iov_len -= step;
      moved -= static_cast<ssize_t>(step);
      if (pieces[first].iov_len == 0) ++first;
    }
  }
}

void take(int fd, void* data, std::size_t size) {
  move_all(::readv, fd, {iovec{data, size}});
}
void give(int fd, const void* data, std::size_t size) {
  move_all(::writev, fd, {iovec{const_cast<void*>(data), size}});
}

void spin_read(int fd, char* at, std::size_t size) {
  while (size > 0) {
    const auto got = ::recv(fd, at, size, MSG_DONTWAIT);
    if (got > 0) {
      at += got;
      size -= static_cast<std::size_t>(got);
    } else if (got == 0 || errno != EAGAIN) {
      std::_Exit(0);
    }
  }
}

}  // namespace

bare_stream::bare_stream(int fd) : fd_{fd} {
  auto* at =
      ::mmap(nullptr, region_size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) die("mmap");
  std::memset(at, 3, region_size);
  memory_ = static_cast<std::byte*>(at);
}

void bare_stream::begin(std::size_t block) {
  order_ = scattered(block);
}

std::vector<iovec> bare_stream::next_batch(std::size_t block) {
  std::vector<iovec> out;
  for (std::size_t i = 0; i < blocks_per_batch; ++i, ++next_) {
    out.push_back({memory_ + order_[next_ % order_.size()], block});
  }
  return out;
}

void bare_stream::serve(const control& parent) {
  std::vector<char> message(message_size);
  while (true) {
    const auto command = parent.get<bare_command>();
    if (command.what == 'l') {
      for (std::uint64_t i = 0; i < command.number; ++i) {
        spin_read(fd_, message.data(), message.size());
        give(fd_, message.data(), message.size());
      }
      continue;
    }
    begin(command.number);
    while (true) {
      char more;
      take(fd_, &more, 1);
      if (more == 0) break;
      if (command.what == 'w') {
        move_all(::readv, fd_, next_batch(command.number));
        give(fd_, &more, 1);
      } else {
        move_all(::writev, fd_, next_batch(command.number));
      }
    }
  }
}

double bare_stream::throughput(const control& child, direction dir, std::size_t block) {
  child.put(bare_command{dir == direction::write ? 'w' : 'r', block});
  begin(block);
  const char more = 1;
  std::uint64_t started = 0;
  std::uint64_t done = 0;
  const auto start = clock_type::now();
  while (true) {
    const bool time_left = clock_type::now() - start < round_time;
    if (!time_left && done == started) break;
    if (time_left && started - done < batches_in_flight) {
      if (dir == direction::write) {
        auto pieces = next_batch(block);
        pieces.insert(pieces.begin(), {const_cast<char*>(&more), 1});
        move_all(::writev, fd_, std::move(pieces));
      } else {
        give(fd_, &more, 1);
      }
      ++started;
      continue;
    }
    if (dir == direction::write) {
      char ack;
      take(fd_, &ack, 1);
    } else {
      move_all(::readv, fd_, next_batch(block));
    }
    ++done;
  }
  const auto rate = static_cast<double>(done) * static_cast<double>(blocks_per_batch * block) /
                    seconds_since(start) / 1e9;
  const char end = 0;
  give(fd_, &end, 1);
  return rate;
}

double bare_stream::latency(const control& child, int count) const {
  child.put(bare_command{'l', static_cast<std::uint64_t>(count)});
  std::vector<char> message(message_size);
  std::vector<double> times;
  for (int i = 0; i < count; ++i) {
    const auto start = clock_type::now();
    give(fd_, message.data(), message.size());
    spin_read(fd_, message.data(), message.size());
    times.push_back(seconds_since(start) * 1e6 / 2);
  }
  return median(std::move(times));
}

}  // namespace troupe::bench
