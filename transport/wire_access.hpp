#pragma once

// The thread sanitizer sees memory, not wires: that a byte was read here before the peer's answer
// arrived there is an order it cannot know when both ends are in one process. So accesses to the
// memory of regions, made on behalf of the peer, are hidden from it; everything else of the
// transport stays in its sight.
#if defined(__SANITIZE_THREAD__)
#define TROUPE_HIDES_ACCESS 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define TROUPE_HIDES_ACCESS 1
#endif
#endif

#ifdef TROUPE_HIDES_ACCESS
extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

namespace troupe::transport {

/// Marks a scope that touches region memory for the peer. Nothing without the thread sanitizer.
class wire_access {
 public:
#ifdef TROUPE_HIDES_ACCESS
  wire_access() {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~wire_access() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
#else
  // Not trivial: an unused one would be warned of.
  wire_access() {}   // NOLINT(modernize-use-equals-default)
  ~wire_access() {}  // NOLINT(modernize-use-equals-default)
#endif
  wire_access(const wire_access&) = delete;
  wire_access& operator=(const wire_access&) = delete;
};

}  // namespace troupe::transport
