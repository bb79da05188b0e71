#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

namespace troupe::transport::rdma {

/// Memory of a (virtual) graphics device, exported by its driver: a real dma-buf.
class exported {
 public:
  static constexpr std::uint64_t size = std::uint64_t{1} << 20;

  exported() {
    // From the kernel's <drm/drm.h>, which would need libdrm-dev for this alone.
    struct create_dumb {
      std::uint32_t height, width, bpp, flags, handle, pitch;
      std::uint64_t size;
    } dumb{.height = 256, .width = 1024, .bpp = 32, .flags = 0, .handle = 0, .pitch = 0, .size = 0};
    struct prime_handle {
      std::uint32_t handle, flags;
      std::int32_t fd;
    } prime{};
    const int card = ::open("/dev/dri/card0", O_RDWR | O_CLOEXEC);
    EXPECT_GE(card, 0) << std::strerror(errno);
    EXPECT_EQ(::ioctl(card, _IOWR('d', 0xb2, create_dumb), &dumb), 0) << std::strerror(errno);
    EXPECT_EQ(dumb.size, size);
    prime = {.handle = dumb.handle, .flags = O_CLOEXEC | O_RDWR, .fd = -1};
    EXPECT_EQ(::ioctl(card, _IOWR('d', 0x2d, prime_handle), &prime), 0) << std::strerror(errno);
    fd = prime.fd;
    ::close(card);
    at = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    EXPECT_NE(at, MAP_FAILED) << std::strerror(errno);
  }
  ~exported() {
    ::munmap(at, size);
    ::close(fd);
  }
  exported(const exported&) = delete;
  exported& operator=(const exported&) = delete;
  [[nodiscard]] std::span<std::byte> bytes() const { return {static_cast<std::byte*>(at), size}; }

  int fd{-1};
  void* at{nullptr};
};

}  // namespace troupe::transport::rdma
