#include "troupe/transport/random.hpp"

#include <random>

#include <sys/random.h>

namespace troupe::transport {

void random_bytes(std::span<std::byte> out) {
  std::size_t done = 0;
  while (done < out.size()) {
    const auto got = ::getrandom(out.data() + done, out.size() - done, 0);
    if (got > 0) {
      done += static_cast<std::size_t>(got);
    } else {  // interrupted, or a kernel without the call: the library's device reads /dev/urandom
      std::random_device device;
      out[done++] = static_cast<std::byte>(device() & 0xffU);
    }
  }
}

std::uint64_t random_id() {
  std::uint64_t id = 0;
  while (id == 0) random_bytes(std::as_writable_bytes(std::span{&id, 1}));
  return id;
}

}  // namespace troupe::transport
