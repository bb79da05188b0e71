#pragma once

#include <filesystem>
#include <optional>
#include <vector>

namespace troupe::transport {

/// The paths of what a folder holds, in no order. None: it cannot be read. May run out of memory by an exception, by
/// which the iterators of `std::filesystem` in libstdc++ 12 and 14 would end the process.
[[nodiscard]] std::optional<std::vector<std::filesystem::path>> read_folder(
    const std::filesystem::path& folder);

}  // namespace troupe::transport
