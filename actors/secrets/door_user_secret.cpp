#include "troupe/actors/secrets/door_user_secret.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "troupe/actors/secrets/door_files.hpp"
#include "troupe/config/name_rule.hpp"
#include "troupe/transport/folder.hpp"
#include "troupe/transport/os_error.hpp"
#include "troupe/transport/owned_fd.hpp"
#include "troupe/transport/random.hpp"

namespace troupe::actors {

namespace {

using transport::owned_fd;
using transport::what_errno;

constexpr std::string_view instead =
    "; set XDG_STATE_HOME to a folder that this user can write, name a file that every node can "
    "read "
    "(security.secret), or write `security: {mode: none}` to let in every process of this host";

constexpr const char* folder_instead =
    "; set XDG_STATE_HOME to a folder of this machine that this user can write";

constexpr const char* no_state_folder = "neither XDG_STATE_HOME nor HOME is an absolute path";

unexpected unusable(const std::string& path, std::string sentence) {
  sentence += instead;
  return bad_file("secret", path, sentence);
}

/// Why a folder cannot be used, for whoever knows what for.
unexpected bad_folder(const std::string& sentence) {
  return fail(errc::invalid_config, sentence);
}

std::string environment(const char* name) {
  const char* value = std::getenv(name);  // NOLINT(concurrency-mt-unsafe): nobody sets any
  return value == nullptr ? "" : value;
}

/// The folder of a cluster; empty: nothing says where it would be.
result<std::string> own_folder_path(const std::string& cluster) {
  if (!config::cluster_name.allows(cluster)) {
    return fail(errc::invalid_config, "the name of the cluster must be " +
                                          config::cluster_name.text() +
                                          ": its secret has a folder of that name");
  }
  const auto state = user_state_folder();
  return state.empty() ? state : state + "/troupe/" + cluster;
}

/// Makes it where it is not there. The sentence of the error says what is wrong with it, and not which.
result<owned_fd> open_own_folder(const std::string& path) {
  std::error_code failed;
  std::filesystem::create_directories(std::filesystem::path{path}.parent_path(), failed);
  if (failed) return bad_folder("its folder cannot be made: " + failed.message());
  if (::mkdir(path.c_str(), 0700) != 0 && errno != EEXIST)
    return bad_folder("it cannot be made: " + what_errno(errno));
  owned_fd fd{::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)};
  struct stat about {};
  if (!fd || ::fstat(fd.get(), &about) != 0)
    return bad_folder("it cannot be opened: " + what_errno(errno));
  if (about.st_uid != ::geteuid()) return bad_folder("it belongs to somebody else");
  if ((about.st_mode & (S_IRWXG | S_IRWXO)) != 0) {
    return bad_folder(
        "others than its owner can get into it; delete it (a new secret is made), or "
        "chmod 700 it");
  }
  return fd;
}

/// A file without a name that gets its own once all is in it: whoever is killed meanwhile leaves nothing.
/// Empty: not every file system has them.
std::optional<int> make_secret_unnamed(const owned_fd& folder) {
  const owned_fd fd{::openat(folder.get(), ".", O_WRONLY | O_TMPFILE | O_CLOEXEC, 0600)};
  if (!fd) return std::nullopt;
  if (const int why = write_private(fd.get(), fresh_secret()); why != 0) return why;
  const auto unnamed = "/proc/self/fd/" + std::to_string(fd.get());
  if (::linkat(AT_FDCWD, unnamed.c_str(), folder.get(), "secret", AT_SYMLINK_FOLLOW) == 0) return 0;
  if (errno == EEXIST) return 0;
  return std::nullopt;
}

/// Writes it beside and links it to its name, which only the first can do: who reads it sees all of it.
/// 0, or the errno of what failed.
int make_secret_in(const owned_fd& folder) {
  if (const auto made = make_secret_unnamed(folder)) return *made;
  const auto draft = ".secret." + std::to_string(transport::random_id());
  const owned_fd fd{::openat(folder.get(), draft.c_str(),
                             O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600)};
  if (!fd) return errno;
  int why = write_private(fd.get(), fresh_secret());
  if (why == 0 && ::linkat(folder.get(), draft.c_str(), folder.get(), "secret", 0) != 0)
    why = errno;
  ::unlinkat(folder.get(), draft.c_str(), 0);
  return why == EEXIST ? 0 : why;
}

}  // namespace

std::string user_state_folder() {
  if (auto named = environment("XDG_STATE_HOME"); named.starts_with('/')) return named;
  if (auto home = environment("HOME"); home.starts_with('/')) return home + "/.local/state";
  return {};
}

result<std::string> user_folder_path(const std::string& cluster) {
  auto path = own_folder_path(cluster);
  if (path && path->empty()) {
    return bad_folder(std::string{"there is no folder for what cluster "} + cluster +
                      " keeps of this user: " + no_state_folder + folder_instead);
  }
  return path;
}

result<void> make_user_folder_at(const std::string& path) {
  if (const auto folder = open_own_folder(path); !folder)
    return bad_folder("the folder " + path + ": " + folder.error().message + folder_instead);
  return {};
}

result<std::string> make_user_folder(const std::string& cluster) {
  auto path = user_folder_path(cluster);
  if (!path) return path;
  if (auto made = make_user_folder_at(*path); !made) return fail(std::move(made).error());
  return path;
}

result<std::string> user_secret_path(const std::string& cluster) {
  auto folder = own_folder_path(cluster);
  if (!folder) return folder;
  if (folder->empty()) return unusable("auto", no_state_folder);
  return *folder + "/secret";
}

result<std::string> make_user_secret(const std::string& cluster) {
  auto path = user_secret_path(cluster);
  if (!path) return path;
  const auto own = std::filesystem::path{*path}.parent_path().string();
  const auto folder = open_own_folder(own);
  if (!folder) return unusable(own, folder.error().message);
  struct stat about {};
  if (::fstatat(folder->get(), "secret", &about, AT_SYMLINK_NOFOLLOW) == 0) {
    // For the order of `user_secrets` alone, so that a failure is no matter. Nodes that run would read
    // the file again if its own time changed.
    (void)::futimens(folder->get(), nullptr);
    return path;
  }
  if (const int why = make_secret_in(*folder); why != 0)
    return unusable(*path, "it cannot be made: " + what_errno(why));
  return path;
}

std::vector<user_secret> user_secrets() {
  const auto state = user_state_folder();
  if (state.empty()) return {};
  const auto folders = transport::read_folder(state + "/troupe");
  if (!folders) return {};
  std::vector<std::pair<std::filesystem::file_time_type, user_secret>> found;
  for (const auto& folder : *folders) {
    auto cluster = folder.filename().string();
    if (!config::cluster_name.allows(cluster)) continue;
    const auto secret = folder / "secret";
    std::error_code missing;
    const auto used = std::filesystem::last_write_time(folder, missing);
    if (!missing && std::filesystem::exists(secret, missing))
      found.push_back({used, {std::move(cluster), secret.string()}});
  }
  std::ranges::sort(found, std::greater{}, [](const auto& one) { return one.first; });
  std::vector<user_secret> secrets;
  for (auto& [used, secret] : found) {
    if (secrets.size() == most_user_secrets) break;
    secrets.push_back(std::move(secret));
  }
  return secrets;
}

}  // namespace troupe::actors
