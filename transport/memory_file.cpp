#include "troupe/transport/memory_file.hpp"

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "troupe/transport/folder.hpp"
#include "troupe/transport/numa.hpp"
#include "troupe/transport/os_error.hpp"

namespace troupe::transport {

namespace {

/// How often signals may interrupt the reservation of pages, which then resumes where it was.
constexpr int most_interruptions = 1000;

std::string free_memory(std::optional<std::uint32_t> node) {
  const auto bytes = available_bytes(node);
  const auto where = node ? " on NUMA node " + std::to_string(*node) : std::string{};
  return bytes == UINT64_MAX ? "an unknown amount is free" + where
                             : std::to_string(bytes >> 20U) + " MiB are free" + where;
}

std::uint64_t ordinary_page() {
  return static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

/// The word in brackets in a kernel setting: "always within_size advise [never] deny force".
std::string chosen_word(const std::filesystem::path& file) {
  const auto line = line_of(file);
  const auto begin = line.find('[');
  const auto end = line.find(']', begin);
  return end == std::string::npos ? std::string{} : line.substr(begin + 1, end - begin - 1);
}

/// Whether the kernel backs shared memory with transparent huge pages on advice.
bool transparent_pages() {
  const std::filesystem::path folder{"/sys/kernel/mm/transparent_hugepage"};
  const auto of_size = "hugepages-" + std::to_string(huge_pages_now().size >> 10U) + "kB";
  for (const auto& file : {folder / "shmem_enabled", folder / of_size / "shmem_enabled"}) {
    const auto word = chosen_word(file);
    if (word == "always" || word == "within_size" || word == "advise" || word == "force")
      return true;
  }
  return false;
}

/// Rounded up to whole pages; 0 where that wraps.
std::uint64_t whole_pages(std::uint64_t size, std::uint64_t page) {
  const auto rounded = (size + page - 1) / page * page;
  return rounded < size ? 0 : rounded;
}

/// Why huge pages are not worth trying for a region; empty if they are.
std::string not_worth_it(std::uint64_t size, const huge_pages& pages) {
  if (pages.size == 0) return "the kernel has no huge pages";
  const auto rounded = whole_pages(size, pages.size);
  if (rounded == 0 || rounded - size > size / 8) {
    return "a region of " + std::to_string(size) + " bytes would leave too much of huge pages of " +
           page_text(pages.size) + " unused";
  }
  return {};
}

/// Why huge pages that were worth trying are not available, and what to do about it.
std::string refused_huge_pages(std::uint64_t needed, const huge_pages& pages,
                               const std::string& failed_call) {
  const auto what_to_do =
      needed > pages.free
          ? "raise vm.nr_hugepages"
          : "free ones are not enough: look for a limit of this process (ulimit -v, ulimit -f) or "
            "of its control group (hugetlb.*.max)";
  return std::to_string(needed) + " huge pages of " + page_text(pages.size) +
         " were needed for a region and " + std::to_string(pages.free) + " are free (" +
         failed_call + "); " + what_to_do;
}

}  // namespace

std::string page_text(std::uint64_t bytes) {
  if (bytes >= std::uint64_t{1} << 30U) return std::to_string(bytes >> 30U) + " GiB";
  if (bytes >= std::uint64_t{1} << 20U) return std::to_string(bytes >> 20U) + " MiB";
  return std::to_string(bytes >> 10U) + " KiB";
}

huge_pages huge_pages_now(std::optional<std::uint32_t> node) {
  huge_pages pages;
  std::uint64_t promised = 0;
  std::ifstream in{"/proc/meminfo"};
  for (std::string word; in >> word;) {
    if (word == "HugePages_Free:") in >> pages.free;
    if (word == "HugePages_Rsvd:") in >> promised;
    if (word == "Hugepagesize:" && in >> pages.size) pages.size <<= 10U;
  }
  pages.free -= std::min(pages.free, promised);
  if (node && pages.size > 0) {
    std::ifstream of_node{"/sys/devices/system/node/node" + std::to_string(*node) +
                          "/hugepages/hugepages-" + std::to_string(pages.size >> 10U) +
                          "kB/free_hugepages"};
    std::uint64_t there = 0;
    if (of_node >> there) pages.free = std::min(pages.free, there);
  }
  return pages;
}

result<std::shared_ptr<memory_file>> memory_file::make(const std::string& name, std::uint64_t size,
                                                       std::uint64_t mapped_size, unsigned flags,
                                                       const host_memory_options& how) {
  const auto refused = [](const char* call) {
    const int number = errno;
    return fail(errc::pool_exhausted, std::string{call} + ": " + what_errno(number));
  };
  // On a failure below, its destructor releases what was acquired so far.
  std::shared_ptr<memory_file> made{new memory_file};
  made->fd_ = ::memfd_create(("troupe:" + name.substr(0, 200)).c_str(),
                             MFD_CLOEXEC | MFD_ALLOW_SEALING | flags);
  if (made->fd_ < 0) return refused("memfd_create");
  if (mapped_size > static_cast<std::uint64_t>(INT64_MAX) ||
      ::ftruncate(made->fd_, static_cast<off_t>(mapped_size)) != 0) {
    return refused("ftruncate");
  }
  void* at = ::mmap(nullptr, mapped_size, PROT_READ | PROT_WRITE, MAP_SHARED, made->fd_, 0);
  if (at == MAP_FAILED) return refused("mmap");
  made->at_ = static_cast<std::byte*>(at);
  made->size_ = size;
  made->mapped_size_ = mapped_size;
  const auto scope = numa_scope::enter(how.numa_node);
  if (!scope) return fail(scope.error());
  const bool ordinary = (flags & MFD_HUGETLB) == 0;
  if (ordinary && how.pages == page_choice::huge_if_available && transparent_pages()) {
    // The advice applies to pages that the mapping faults in, not to those that fallocate
    // allocates.
    (void)::madvise(at, mapped_size, MADV_HUGEPAGE);
    (void)::madvise(at, mapped_size, MADV_POPULATE_WRITE);
  }
  // Reserves the pages now, so that an OS out of memory fails here and not by a signal later.
  int reserved = -1;
  for (int tries = 0; tries < most_interruptions && reserved != 0; ++tries) {
    reserved = ::fallocate(made->fd_, 0, 0, static_cast<off_t>(mapped_size));
    if (reserved != 0 && errno != EINTR) break;
  }
  if (reserved != 0) return refused("fallocate");
  if (::fcntl(made->fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return refused("fcntl(F_ADD_SEALS)");
  }
  return made;
}

result<std::shared_ptr<const memory_file>> memory_file::create(const std::string& name,
                                                               std::uint64_t size,
                                                               const host_memory_options& how) {
  // Checked before huge pages are tried: a wrong node must not look like a lack of huge pages.
  if (auto there = numa_scope::enter(how.numa_node); !there) return fail(there.error());
  std::string why_not;
  if (how.pages == page_choice::huge_if_available) {
    const auto pages = huge_pages_now(how.numa_node);
    why_not = not_worth_it(size, pages);
    if (why_not.empty()) {
      const auto rounded = whole_pages(size, pages.size);
      auto made = make(name, size, rounded, MFD_HUGETLB, how);
      if (made) {
        (*made)->huge_ = true;
        return std::shared_ptr<const memory_file>{std::move(*made)};
      }
      why_not = refused_huge_pages(rounded / pages.size, pages, made.error().message);
    }
  }
  // Checked first: fallocate takes all that it can get before it fails, and on a machine without
  // swap it takes the memory that other processes need.
  if (size > available_bytes(how.numa_node)) {
    return fail(errc::pool_exhausted,
                "region '" + name + "' of " + std::to_string(size) +
                    " bytes is more than this machine has left: " + free_memory(how.numa_node));
  }
  auto made = make(name, size, size, 0, how);
  if (!made) {
    return fail(made.error().code, "region '" + name + "' of " + std::to_string(size) + " bytes: " +
                                       made.error().message + "; " + free_memory(how.numa_node));
  }
  (*made)->why_not_huge_ = std::move(why_not);
  return std::shared_ptr<const memory_file>{std::move(*made)};
}

memory_file::~memory_file() {
  if (at_ != nullptr) ::munmap(at_, mapped_size_);
  if (fd_ >= 0) ::close(fd_);
}

result<void> check_room_for(std::uint64_t bytes, std::size_t regions,
                            const host_memory_options& how) {
  if (auto there = numa_scope::enter(how.numa_node); !there) return fail(there.error());
  auto left = available_bytes(how.numa_node);
  if (how.pages == page_choice::huge_if_available) {
    const auto pages = huge_pages_now(how.numa_node);
    const auto huge = pages.size * pages.free;
    left = left > UINT64_MAX - huge ? UINT64_MAX : left + huge;
  }
  if (bytes <= left) return {};
  return fail(errc::pool_exhausted,
              std::to_string(bytes >> 20U) + " MiB for " + std::to_string(regions) +
                  (regions == 1 ? " region" : " regions") +
                  " are more than this machine has left: " + free_memory(how.numa_node));
}

std::string describe_pages(std::span<const std::shared_ptr<const memory_file>> files,
                           const host_memory_options& how) {
  std::uint64_t bytes = 0;
  std::uint64_t huge = 0;
  std::string why_not;
  for (const auto& file : files) {
    bytes += file->mapped_size();
    if (file->huge()) huge += file->mapped_size();
    if (why_not.empty()) why_not = file->why_not_huge();
  }
  std::string text;
  if (huge > 0) text = "huge pages of " + page_text(huge_pages_now().size);
  if (huge > 0 && huge < bytes) {
    text += " (" + std::to_string(huge >> 20U) + " of " + std::to_string(bytes >> 20U) + " MiB), ";
  }
  if (huge < bytes) text += "pages of " + page_text(ordinary_page());
  if (how.numa_node) text += ", NUMA node " + std::to_string(*how.numa_node);
  if (why_not.empty()) return text;
  if (transparent_pages()) text += ", transparent huge ones where the kernel had them";
  return text + ": " + why_not;
}

}  // namespace troupe::transport
