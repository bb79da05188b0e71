#include "troupe/deploy/work_folder.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "troupe/transport/folder.hpp"

namespace troupe::deploy {

namespace {

namespace fs = std::filesystem;
using transport::owned_fd;

constexpr std::string_view folder_prefix = "troupe-demo-";
constexpr std::string_view kept_prefix = "troupe-demo-failed-";
constexpr std::size_t folder_letters = 6;

/// Opens a folder of this user; invalid if it is no folder or another user's.
owned_fd open_own(const std::string& path) {
  owned_fd fd{::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)};
  struct stat about {};
  if (fd && ::fstat(fd.get(), &about) == 0 && about.st_uid == ::geteuid()) return fd;
  return {};
}

/// Whether `path` still names the open folder.
bool is_there(const owned_fd& fd, const std::string& path) {
  struct stat held {};
  struct stat named {};
  return ::fstat(fd.get(), &held) == 0 && ::lstat(path.c_str(), &named) == 0 &&
         held.st_dev == named.st_dev && held.st_ino == named.st_ino;
}

/// Whether the folder contains only files that a run writes.
bool holds_only_ours(const fs::path& folder) {
  const auto entries = transport::read_folder(folder);
  return entries && std::ranges::all_of(*entries, [](const fs::path& entry) {
           std::error_code unknown;
           return fs::is_regular_file(fs::symlink_status(entry, unknown)) &&
                  (entry.filename() == "deployment.yaml" || entry.extension() == ".log");
         });
}

/// Removes a folder and its files. Returns false, with `errno`, if something stays.
bool remove_with_files(const fs::path& folder) {
  const auto entries = transport::read_folder(folder);
  if (!entries) return false;
  int why = 0;
  for (const auto& entry : *entries)
    if (::unlink(entry.c_str()) != 0) why = errno;
  if (why != 0) {
    errno = why;  // rmdir would only say that the folder is not empty
    return false;
  }
  return ::rmdir(folder.c_str()) == 0;
}

bool is_named_like_ours(std::string_view name) {
  return name.size() == folder_prefix.size() + folder_letters && name.starts_with(folder_prefix);
}

/// Removes the folders of killed runs of this user, whose locks are free.
void remove_abandoned(const std::string& base) {
  const auto entries = transport::read_folder(base);
  if (!entries) return;
  for (const auto& entry : *entries) {
    if (!is_named_like_ours(entry.filename().string())) continue;
    const auto fd = open_own(entry.string());
    if (fd && ::flock(fd.get(), LOCK_EX | LOCK_NB) == 0 && holds_only_ours(entry)) {
      (void)remove_with_files(entry);
    }
  }
}

}  // namespace

result<work_folder> work_folder::make(const std::string& base) {
  remove_abandoned(base);
  for (;;) {
    auto path = base + "/" + std::string{folder_prefix} + std::string(folder_letters, 'X');
    if (::mkdtemp(path.data()) == nullptr) {
      return fail(errc::internal, "cannot make a folder " + path + " (" + std::strerror(errno) +
                                      "); set TMPDIR to a folder in which it can be made");
    }
    auto lock = open_own(path);
    if (!lock) {
      const int why = errno;
      ::rmdir(path.c_str());
      return fail(errc::internal, "cannot open " + path + " (" + std::strerror(why) + ")");
    }
    // If folders cannot be locked here, no other run takes ours for an abandoned one either.
    while (::flock(lock.get(), LOCK_EX) != 0 && errno == EINTR) {
    }
    // Otherwise another run removed it as abandoned before it was locked.
    if (is_there(lock, path)) return work_folder{std::move(path), std::move(lock)};
    ::rmdir(path.c_str());  // still there, and empty, if only the look at it failed
  }
}

work_folder::work_folder(std::string path, owned_fd lock) noexcept
    : path_{std::move(path)}, lock_{std::move(lock)} {}

work_folder::~work_folder() {
  try {
    if (lock_) (void)remove_with_files(path_);
  } catch (...) {  // too little memory to list its files: the next run removes it
  }
}

result<void> work_folder::remove() {
  const bool gone = remove_with_files(path_);
  const int why = errno;
  lock_.reset();
  if (!gone) {
    return fail(errc::internal, "cannot remove " + path_ + " (" + std::strerror(why) +
                                    "); the next run tries again, or remove it yourself");
  }
  return {};
}

void work_folder::keep() {
  const fs::path path{path_};
  const auto name = path.filename().string().substr(folder_prefix.size());
  const auto kept = (path.parent_path() / (std::string{kept_prefix} + name)).string();
  if (std::rename(path_.c_str(), kept.c_str()) == 0) path_ = kept;
  lock_.reset();
}

}  // namespace troupe::deploy
