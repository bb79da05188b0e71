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

  [[nodiscard]] std::string file(const std::string& name) const { return path_ + "/" + name; }
  void remove() const;
  /// Keeps the folder, for its logs, under a name that no run removes.
  void keep();

 private:
  work_folder(std::string path, transport::owned_fd lock) noexcept;
  std::string path_;
  transport::owned_fd lock_;
};

}  // namespace troupe::deploy
