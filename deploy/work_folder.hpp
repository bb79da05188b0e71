#pragma once

#include <string>

#include "troupe/kvcache/result.hpp"
#include "troupe/transport/owned_fd.hpp"

namespace troupe::deploy {

/// The folder of a run of the demo: `troupe-demo-` and six letters, in TMPDIR. It is locked while
/// its process lives, so that the next run recognises the folder of a killed one.
class work_folder {
 public:
  /// Makes a folder in `base`, after removing those that killed runs of this user left there.
  [[nodiscard]] static result<work_folder> make(const std::string& base);

  /// Removes the folder, unless it is kept: an exception that ends the run leaves nothing behind.
  ~work_folder();
  work_folder(work_folder&&) noexcept = default;
  work_folder& operator=(work_folder&&) = delete;
  work_folder(const work_folder&) = delete;
  work_folder& operator=(const work_folder&) = delete;

  [[nodiscard]] std::string file(const std::string& name) const { return path_ + "/" + name; }
  /// Removes the folder now. An error names what stays; the next run tries again.
  [[nodiscard]] result<void> remove();
  /// Keeps the folder, for its logs, under a name that no run removes.
  void keep();

 private:
  work_folder(std::string path, transport::owned_fd lock) noexcept;
  std::string path_;
  transport::owned_fd lock_;  ///< invalid once the folder is removed or kept
};

}  // namespace troupe::deploy
