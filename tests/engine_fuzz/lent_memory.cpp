#include "lent_memory.hpp"

#include <algorithm>
#include <utility>

#include <sys/mman.h>

#include "cache_model.hpp"

namespace troupe::engine_fuzz {

bool lent_memory::is(std::span<const std::byte> other) const {
  return std::ranges::equal(given_, other);
}

namespace {

std::span<std::byte> map_pages(std::size_t bytes) {
  // mmap refuses a size of 0, and a value may be empty.
  auto* at = ::mmap(nullptr, std::max<std::size_t>(bytes, 1), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return {static_cast<std::byte*>(at), bytes};
}

void unmap_pages(std::span<std::byte> memory) {
  ::munmap(memory.data(), std::max<std::size_t>(memory.size(), 1));
}

class lent_pages final : public lent_memory {
 public:
  lent_pages(std::size_t bytes, std::uint64_t seed, memory_end end)
      : lent_memory{map_pages(bytes)}, seed_{seed}, end_{end} {
    pattern(seed_, memory_);
    lend();
  }
  ~lent_pages() override {
    if (mapped_) unmap_pages(memory_);
  }

  void take_back() override {
    switch (end_) {
      case memory_end::overwritten: pattern(seed_ + 1, memory_); return;
      case memory_end::unreadable:
        // A later read of this memory fails in the kernel.
        ::mprotect(memory_.data(), std::max<std::size_t>(memory_.size(), 1), PROT_NONE);
        return;
      case memory_end::unmapped:
        unmap_pages(memory_);
        mapped_ = false;
        return;
    }
  }

 private:
  std::uint64_t seed_;
  memory_end end_;
  bool mapped_{true};
};

class block_loan final : public lent_memory {
 public:
  block_loan(lent_block block, std::size_t most, bool freed_early)
      : lent_memory{block.bytes.first(std::min(block.bytes.size(), most))},
        block_{std::move(block)},
        freed_early_{freed_early} {
    lend();
  }
  void put_began() override {
    if (freed_early_ && block_.swap) block_.swap();
  }
  void take_back() override { block_.give_back(); }

 private:
  lent_block block_;
  bool freed_early_;
};

}  // namespace

/// One piece of memory that is used for one value after another.
struct memory_lender::slab {
  static constexpr std::size_t size = 4U << 20U;
  slab() : memory{map_pages(size)} {}
  ~slab() { unmap_pages(memory); }
  slab(const slab&) = delete;
  slab& operator=(const slab&) = delete;

  class loan final : public lent_memory {
   public:
    loan(std::shared_ptr<slab> of, std::size_t bytes, std::uint64_t seed)
        : lent_memory{of->memory.first(bytes)}, of_{std::move(of)}, seed_{seed} {
      of_->lent = true;
      pattern(seed_, memory_);
      lend();
    }
    void take_back() override {
      pattern(seed_ + 1, memory_);
      of_->lent = false;
    }

   private:
    std::shared_ptr<slab> of_;
    std::uint64_t seed_;
  };

  std::span<std::byte> memory;
  bool lent{false};
};

memory_lender::memory_lender(block_lender blocks) : blocks_{std::move(blocks)} {}

memory_lender::~memory_lender() = default;

std::unique_ptr<lent_memory> memory_lender::lend(const put_plan& put, std::uint64_t seed) {
  if (put.memory == value_memory::block) {
    if (auto block = blocks_())
      return std::make_unique<block_loan>(std::move(*block), 2U << 20U, put.frees_early());
  }
  if (put.memory == value_memory::slab) {
    if (!slab_) slab_ = std::make_shared<slab>();
    if (!slab_->lent) return std::make_unique<slab::loan>(slab_, put.bytes, seed);
  }
  return std::make_unique<lent_pages>(put.bytes, seed, put.end);
}

}  // namespace troupe::engine_fuzz
