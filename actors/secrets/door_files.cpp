#include "troupe/actors/secrets/door_files.hpp"

#include <array>
#include <cerrno>
#include <cstddef>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "troupe/actors/base/phrases.hpp"
#include "troupe/transport/os_error.hpp"
#include "troupe/transport/owned_fd.hpp"
#include "troupe/transport/random.hpp"

namespace troupe::actors {

namespace {

constexpr std::size_t max_size = 256u << 10;
constexpr mode_t written_by_others = S_IWGRP | S_IWOTH;

/// What to do about a file that cannot be opened; nothing where only the system knows.
std::string_view advice_on(int number) {
  switch (number) {
    case ENOENT:
    case ENOTDIR: return "; `troupe certs init DIR` makes what is needed";
    case EACCES:
    case EPERM:
      return "; it and its folder must belong to the user that runs this process (chown -R USER "
             "FOLDER), or this process run as the user that they belong to";
    default: return "";
  }
}

unexpected not_read(std::string_view what, const std::string& path, int number) {
  auto sentence = "it cannot be read: " + transport::what_errno(number);
  sentence += advice_on(number);
  return bad_file(what, path, sentence);
}

result<std::string> read_file(std::string_view what, const std::string& path, mode_t forbidden) {
  if (path.empty()) return bad_file(what, "(nothing)", "no file is named");
  // Non-blocking, so that a pipe that somebody put there does not hold us up.
  const transport::owned_fd fd{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  struct stat about {};
  if (!fd || ::fstat(fd.get(), &about) != 0) return not_read(what, path, errno);
  if (!S_ISREG(about.st_mode)) return bad_file(what, path, "it is not a regular file");
  if (about.st_uid != 0 && about.st_uid != ::geteuid())
    return bad_file(what, path, "it belongs to somebody else; chown it to this user or to root");
  if ((about.st_mode & forbidden) != 0 && forbidden == written_by_others) {
    return bad_file(what, path, "others than its owner can change it; chmod 644 it");
  }
  if ((about.st_mode & forbidden) != 0) {
    return bad_file(what, path,
                    "others than its owner can read or change it; chmod 600 it, and make it again "
                    "if somebody may have read it");
  }
  std::string text;
  std::array<char, 4096> piece{};
  while (true) {
    const auto n = ::read(fd.get(), piece.data(), piece.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return not_read(what, path, errno);
    if (n == 0) return text;
    text.append(piece.data(), static_cast<std::size_t>(n));
    if (text.size() > max_size) return bad_file(what, path, "it is larger than 256 KiB");
  }
}

}  // namespace

result<std::string> read_public_file(std::string_view what, const std::string& path) {
  return read_file(what, path, written_by_others);
}

result<std::string> read_private_file(std::string_view what, const std::string& path) {
  return read_file(what, path, S_IRWXG | S_IRWXO);
}

unexpected bad_file(std::string_view what, const std::string& path, const std::string& sentence) {
  std::string all{"security."};
  all += what;
  all += ": " + path + ": " + sentence;
  return fail(errc::invalid_config, std::move(all));
}

int write_private(int fd, std::string_view text) {
  if (::fchmod(fd, 0600) != 0) return errno;
  while (!text.empty()) {
    const auto n = ::write(fd, text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno;
    text.remove_prefix(static_cast<std::size_t>(n));
  }
  return ::fsync(fd) == 0 ? 0 : errno;
}

int flush_folder(const std::string& path) {
  const transport::owned_fd fd{::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)};
  if (!fd) return errno;
  // Some file systems cannot flush a folder; the names are there nevertheless.
  return ::fsync(fd.get()) == 0 || errno == EINVAL || errno == ENOTSUP ? 0 : errno;
}

std::string fresh_secret() {
  std::array<std::byte, 32> drawn{};
  transport::random_bytes(drawn);
  return hex_text(drawn) + '\n';
}

}  // namespace troupe::actors
