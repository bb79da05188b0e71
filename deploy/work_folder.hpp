#pragma once

#include <string>

#include "troupe/kvcache/result.hpp"
#include "troupe/transport/owned_fd.hpp"

namespace troupe::deploy {

/// The folder of a run of the demo: `troupe-demo-` and six letters, in TMPDIR. It is locked while its
/// process lives, so that the next run knows what a killed one left behind.
class work_folder {
 public:
  /// Makes one in `base`, after it has removed there what killed runs of this user left behind.
  [[nodiscard]] static result<work_folder> make(const std::string& base);

  [[nodiscard]] std::string file(const std::string& name) const { return path_ + "/" + name; }
  void remove() const;
  /// It stays for its logs, under a name that no run removes.
  void keep();

 private:
  work_folder(std::string path, transport::owned_fd lock) noexcept;
  std::string path_;
  transport::owned_fd lock_;
};

}  // namespace troupe::deploy
