#include "troupe/kvcache/or_error.hpp"

#include <exception>
#include <new>
#include <string>
#include <system_error>

namespace troupe {

namespace {

/// Whether the system refused because of a limit that can be raised.
bool is_limit(const std::error_code& code) {
  return code == std::errc::resource_unavailable_try_again ||
         code == std::errc::not_enough_memory || code == std::errc::too_many_files_open ||
         code == std::errc::too_many_files_open_in_system;
}

error sentence(std::string_view doing) {
  const std::string prefix = std::string{doing} + ": ";
  try {
    throw;
  } catch (const std::bad_alloc&) {
    return {errc::pool_exhausted, prefix +
                                      "this process could not get the memory that it needs; give "
                                      "it more (ulimit -v, MemoryMax)"};
  } catch (const std::system_error& why) {
    if (is_limit(why.code())) {
      return {errc::overloaded, prefix + why.what() +
                                    "; raise the limits of this process (ulimit -a) or close what "
                                    "is open"};
    }
    return {errc::internal, prefix + why.what()};
  } catch (const std::exception& why) {
    return {errc::internal, prefix + why.what()};
  } catch (...) {
    return {errc::internal, prefix + "an exception of an unknown kind"};
  }
}

}  // namespace

error exception_as_error(std::string_view doing) noexcept {
  try {
    return sentence(doing);
  } catch (...) {                                    // no memory for the sentence either
    return {errc::pool_exhausted, "out of memory"};  // short enough to need none
  }
}

}  // namespace troupe
