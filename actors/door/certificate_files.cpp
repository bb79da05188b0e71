#include <array>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "troupe/actors/door/certificates.hpp"
#include "troupe/actors/secrets/door_files.hpp"
#include "troupe/transport/os_error.hpp"
#include "troupe/transport/owned_fd.hpp"

namespace troupe::actors {

namespace {

using transport::owned_fd;
using transport::what_errno;

constexpr unsigned max_days = 3650;
/// Certificates are valid from this much earlier, because clocks of hosts differ.
constexpr std::chrono::minutes early{5};

unexpected not_written(const std::string& path, int number) {
  return fail(errc::invalid_config, path + " cannot be written: " + what_errno(number));
}

/// Writes a file that only its owner can read, completely or not at all.
result<void> write_new(const std::string& path, std::string_view text) {
  const owned_fd fd{
      ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600)};
  if (!fd) return not_written(path, errno);
  const int why = write_private(fd.get(), text);
  if (why == 0) return {};
  ::unlink(path.c_str());
  return not_written(path, why);
}

/// Removes the files and the folder that it made, unless `keep` is called: leftovers of a failed
/// attempt would block the next one.
class attempt {
 public:
  attempt() = default;
  attempt(const attempt&) = delete;
  attempt& operator=(const attempt&) = delete;
  ~attempt() {
    for (const auto& path : files_) ::unlink(path.c_str());
    if (!folder_.empty()) ::rmdir(folder_.c_str());
  }

  /// A folder that already exists is not removed with the attempt.
  result<void> make_folder(const std::string& path) {
    if (::mkdir(path.c_str(), 0700) == 0) {
      folder_ = path;
    } else if (errno != EEXIST) {
      return not_written(path, errno);
    }
    return {};
  }
  result<void> write(const std::string& path, std::string_view text) {
    auto written = write_new(path, text);
    if (written) files_.push_back(path);
    return written;
  }
  void keep() {
    files_.clear();
    folder_.clear();
  }

 private:
  std::vector<std::string> files_;
  std::string folder_;
};

result<void> sync_folder(const std::string& folder) {
  if (const int why = flush_folder(folder); why != 0) return not_written(folder, why);
  return {};
}

/// Checks that nobody else can replace files in the folder.
result<void> check_folder(const std::string& folder) {
  struct stat about {};
  if (::stat(folder.c_str(), &about) != 0) return not_written(folder, errno);
  if (about.st_uid != ::geteuid()) {
    return fail(errc::invalid_config,
                folder + " belongs to somebody else, who could change what is in it; name another");
  }
  if ((about.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
    return fail(errc::invalid_config, folder +
                                          " can be changed by others than its owner; chmod 700 it, "
                                          "or name another folder");
  }
  return {};
}

result<void> put_in_place(const std::string& path) {
  if (std::rename(file_beside(path).c_str(), path.c_str()) != 0) return not_written(path, errno);
  return {};
}

certificate_life life_of(std::chrono::days days) {
  const auto now = std::chrono::system_clock::now();
  return {now - early, now + days};
}

result<void> check_days(unsigned days) {
  if (days >= 1 && days <= max_days) return {};
  return fail(errc::invalid_config,
              "a certificate lasts 1 to 3650 days, found " + std::to_string(days));
}

/// Checks that the new certificate has not expired. It lasts at least a day, so it is expired only
/// if its authority is.
result<void> check_lasts(const certificate_pair& made, const std::string& ca,
                         const std::string& cluster) {
  const auto facts = facts_of(made.certificate);
  if (!facts) return fail(facts.error());
  if (facts->life.until > std::chrono::system_clock::now()) return {};
  return fail(errc::invalid_config,
              ca +
                  ": the authority has expired, and with it all that it signs; make a new one in "
                  "another folder (`troupe certs init OTHER --cluster " +
                  cluster +
                  "`), append its certificate to security.ca on every host, then use the "
                  "certificate and key of that folder on every host");
}

}  // namespace

certificate_files certificate_files_in(const std::string& folder) {
  const auto in = [&](const char* name) { return folder + "/" + name; };
  return {in("ca.crt"), in("ca.key"), in("node.crt"), in("node.key"), in("cluster.secret")};
}

std::string file_beside(const std::string& path) {
  return path + ".new";
}

result<certificate_files> init_certificates(const std::string& folder, const std::string& cluster,
                                            unsigned days) {
  if (auto fits = check_days(days); !fits) return fail(fits.error());
  const auto files = certificate_files_in(folder);
  const std::array all{&files.ca, &files.ca_key, &files.certificate, &files.key, &files.secret};
  for (const auto* path : all) {
    std::error_code ignored;
    if (std::filesystem::exists(std::filesystem::symlink_status(*path, ignored))) {
      return fail(errc::already_exists,
                  *path + " is there already; `troupe certs renew " + folder +
                      "` makes a new certificate of the same authority, and for a new authority "
                      "name another folder");
    }
  }
  auto authority = make_authority(cluster, life_of(std::chrono::days{max_days}));
  if (!authority) return fail(authority.error());
  auto node = make_node_certificate(*authority, cluster, life_of(std::chrono::days{days}));
  if (!node) return fail(node.error());

  std::error_code problem;
  const auto parent = std::filesystem::path{folder}.parent_path();
  if (!parent.empty()) std::filesystem::create_directories(parent, problem);
  attempt made;
  if (auto there = made.make_folder(folder); !there) return fail(there.error());
  if (auto safe = check_folder(folder); !safe) return fail(safe.error());
  const std::array<std::pair<const std::string*, std::string>, 5> texts{
      {{&files.ca, authority->certificate},
       {&files.ca_key, authority->key},
       {&files.certificate, node->certificate},
       {&files.key, node->key},
       {&files.secret, fresh_secret()}}};
  for (const auto& [path, text] : texts)
    if (auto written = made.write(*path, text); !written) return fail(written.error());
  if (auto synced = sync_folder(folder); !synced) return fail(synced.error());
  made.keep();
  return files;
}

result<certificate_files> renew_certificates(const std::string& folder, unsigned days) {
  if (auto fits = check_days(days); !fits) return fail(fits.error());
  auto files = certificate_files_in(folder);
  if (::access(files.ca_key.c_str(), F_OK) != 0) {
    return fail(errc::not_found, files.ca_key +
                                     " is not there: a certificate is renewed where the "
                                     "authority's key is kept; then copy node.key and "
                                     "node.crt to the nodes, in this order");
  }
  const auto ca = read_public_file("ca", files.ca);
  if (!ca) return fail(ca.error());
  const auto ca_key = read_private_file("ca", files.ca_key);
  if (!ca_key) return fail(ca_key.error());
  const auto old = read_public_file("certificate", files.certificate);
  if (!old) return fail(old.error());
  const auto facts = facts_of(*old);
  if (!facts) return bad_file("certificate", files.certificate, facts.error().message);
  if (facts->cluster.empty())
    return bad_file("certificate", files.certificate, "it names no cluster of Troupe");
  const auto made =
      make_node_certificate({*ca, *ca_key}, facts->cluster, life_of(std::chrono::days{days}));
  if (!made) return fail(errc::invalid_config, folder + ": " + made.error().message);
  if (auto lasts = check_lasts(*made, files.ca, facts->cluster); !lasts) return fail(lasts.error());
  attempt fresh;
  // Write both before renaming the first: the second rename follows within microseconds.
  for (const auto& [path, text] :
       {std::pair{&files.key, &made->key}, std::pair{&files.certificate, &made->certificate}}) {
    ::unlink(file_beside(*path).c_str());  // left by an interrupted attempt
    if (auto done = fresh.write(file_beside(*path), *text); !done) return fail(done.error());
  }
  fresh.keep();
  for (const auto* path : {&files.key, &files.certificate})
    if (auto done = put_in_place(*path); !done) return fail(done.error());
  if (auto synced = sync_folder(folder); !synced) return fail(synced.error());
  return files;
}

}  // namespace troupe::actors
