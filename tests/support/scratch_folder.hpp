#pragma once

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>

namespace troupe::testing {

/// An empty folder that is removed with all its contents.
class scratch_folder {
 public:
  /// `user` is part of its name.
  explicit scratch_folder(const std::string& user = "test")
      : path_{(std::filesystem::temp_directory_path() / ("troupe-" + user + "-XXXXXX")).string()} {
    if (::mkdtemp(path_.data()) == nullptr)
      throw std::system_error{errno, std::generic_category(), "no folder " + path_};
  }
  ~scratch_folder() {
    std::error_code ignored;
    if (!kept_) std::filesystem::remove_all(path_, ignored);
  }
  scratch_folder(const scratch_folder&) = delete;
  scratch_folder& operator=(const scratch_folder&) = delete;

  [[nodiscard]] const std::string& path() const { return path_; }
  /// Keeps the folder when the object is destroyed.
  void keep() { kept_ = true; }

 private:
  std::string path_;
  bool kept_{false};
};

}  // namespace troupe::testing
