#pragma once

namespace troupe::actors {

/// Held while a thread that is not the actor system's own spawns actors in it, has a
/// `caf::scoped_actor` of it, makes it or runs its actors. CAF lets each thread keep the logger of
/// the system that it used last, and a system's end waits until nobody has its logger: a thread that
/// had asked one question, and lives on, would keep it from ending for ever.
class caf_thread_scope {
 public:
  caf_thread_scope() = default;
  ~caf_thread_scope();
  caf_thread_scope(const caf_thread_scope&) = delete;
  caf_thread_scope& operator=(const caf_thread_scope&) = delete;
};

}  // namespace troupe::actors
