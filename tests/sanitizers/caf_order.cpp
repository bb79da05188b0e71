// Tells the thread sanitizer what CAF orders. The packaged library is not instrumented: the
// sanitizer sees its mutexes, since they are the C library's, but not the atomics of its mailboxes
// and reference counts. Without these annotations every message looks like a race between its
// sender and its receiver.
//
// Each function below takes the place of a CAF 0.17 function of the same name (the linker prefers a
// program's symbol to a library's, also for calls inside the library). It declares what the
// original's atomics order, and usually calls the original. A function that another CAF does not
// have is never called.
// - enqueue: what happened before a message was sent ...
// - activate, reactivate: ... happens before the message is received; also, one turn of an actor
//   happens before its next one.
// - cleanup: the same for the last turn, at whose end the scheduler may destroy the actor. It drops
//   messages that nobody received; messages that reach the mailbox meanwhile are not examined.
// - mailbox_visitor: the receiving side of a scoped actor.
// - intrusive_ptr_release, deref: what a holder did before its release happens before the last
//   holder destroys the object; what was sent to an actor happens before the actor is destroyed
//   with it. These do not call the originals, but replace them.
// The atomics order at least this much, so no report is false. Every race over data that is neither
// in a message nor an actor's own is reported; planted_race.cpp checks this.
//
// Compiled into troupe_actors in the thread sanitizer's build only.

#include <atomic>
#include <cstddef>

#include <caf/actor_control_block.hpp>
#include <caf/ref_counted.hpp>
#include <dlfcn.h>

// The mangled names of CAF's functions.
#define ORDERED_ENQUEUE \
  "7enqueueESt10unique_ptrINS_15mailbox_elementENS_6detail8disposerEEPNS_14execution_unitE"
#define SCHEDULED_ENQUEUE "_ZN3caf15scheduled_actor" ORDERED_ENQUEUE
#define BLOCKING_ENQUEUE "_ZN3caf14blocking_actor" ORDERED_ENQUEUE
#define ACTIVATE "_ZN3caf15scheduled_actor8activateEPNS_14execution_unitE"
#define ACTIVATE_WITH \
  "_ZN3caf15scheduled_actor8activateEPNS_14execution_unitERNS_15mailbox_elementE"
#define REACTIVATE "_ZN3caf15scheduled_actor10reactivateERNS_15mailbox_elementE"
#define CLEANUP "_ZN3caf15scheduled_actor7cleanupEONS_5errorEPNS_14execution_unitE"
#define BLOCKING_VISIT "_ZN3caf14blocking_actor15mailbox_visitorclERNS_15mailbox_elementE"
#define RELEASE "_ZN3caf21intrusive_ptr_releaseEPNS_19actor_control_blockE"
#define RELEASE_WEAK "_ZN3caf26intrusive_ptr_release_weakEPNS_19actor_control_blockE"
#define DEREF "_ZNK3caf11ref_counted5derefEv"

extern "C" {
void __tsan_acquire(void* address);  // NOLINT(bugprone-reserved-identifier)
void __tsan_release(void* address);  // NOLINT(bugprone-reserved-identifier)
void __tsan_ignore_thread_begin();   // NOLINT(bugprone-reserved-identifier)
void __tsan_ignore_thread_end();     // NOLINT(bugprone-reserved-identifier)

// The parameters as the ABI passes them: `this` first; references, and objects that are not
// trivially copied, as pointers.
void scheduled_enqueue(void* self, void* element, void* unit) __asm__(SCHEDULED_ENQUEUE);
void blocking_enqueue(void* self, void* element, void* unit) __asm__(BLOCKING_ENQUEUE);
bool activate(void* self, void* unit) __asm__(ACTIVATE);
int activate_with(void* self, void* unit, void* element) __asm__(ACTIVATE_WITH);
int reactivate(void* self, void* element) __asm__(REACTIVATE);
bool cleanup(void* self, void* error, void* unit) __asm__(CLEANUP);
int blocking_visit(void** visitor, void* element) __asm__(BLOCKING_VISIT);
void intrusive_release(caf::actor_control_block* control) __asm__(RELEASE);
void intrusive_release_weak(caf::actor_control_block* control) __asm__(RELEASE_WEAK);
void deref(caf::ref_counted* counted) __asm__(DEREF);

/// options.cpp checks its address: the sanitizer asks for its options before any instrumented
/// function may run.
extern const char troupe_caf_is_here;
const char troupe_caf_is_here = 1;
}

namespace {

/// The CAF function of this name.
template <class Function>
Function* original(Function* /*ours*/, const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

/// Counts the holders of objects that CAF counts.
struct counter : caf::ref_counted {
  static std::atomic<std::size_t>& of(caf::ref_counted& counted) {
    return counted.*(&counter::rc_);
  }
};

/// One turn of an actor.
class turn {
 public:
  explicit turn(void* actor) : actor_{actor} { __tsan_acquire(actor_); }
  ~turn() { __tsan_release(actor_); }
  turn(const turn&) = delete;
  turn& operator=(const turn&) = delete;

 private:
  void* actor_;
};

}  // namespace

// -- messages and turns

void scheduled_enqueue(void* self, void* element, void* unit) {
  static auto* const caf = original(scheduled_enqueue, SCHEDULED_ENQUEUE);
  __tsan_release(self);
  caf(self, element, unit);
}

void blocking_enqueue(void* self, void* element, void* unit) {
  static auto* const caf = original(blocking_enqueue, BLOCKING_ENQUEUE);
  __tsan_release(self);
  caf(self, element, unit);
}

bool activate(void* self, void* unit) {
  static auto* const caf = original(activate, ACTIVATE);
  const turn one{self};
  return caf(self, unit);
}

int activate_with(void* self, void* unit, void* element) {
  static auto* const caf = original(activate_with, ACTIVATE_WITH);
  const turn one{self};
  return caf(self, unit, element);
}

int reactivate(void* self, void* element) {
  static auto* const caf = original(reactivate, REACTIVATE);
  const turn one{self};
  return caf(self, element);
}

bool cleanup(void* self, void* error, void* unit) {
  static auto* const caf = original(cleanup, CLEANUP);
  const turn one{self};
  __tsan_ignore_thread_begin();
  const bool done = caf(self, error, unit);
  __tsan_ignore_thread_end();
  return done;
}

int blocking_visit(void** visitor, void* element) {
  static auto* const caf = original(blocking_visit, BLOCKING_VISIT);
  const turn one{*visitor};  // the actor is its first member
  return caf(visitor, element);
}

// -- references

// Counted here and not by CAF: the atomic count itself orders every holder's last use before the
// end, even if two holders release at once. An acquire and release around CAF's function would
// leave a gap between them.

void intrusive_release(caf::actor_control_block* control) {
  if (control->strong_refs.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  __tsan_acquire(control->get());
  control->data_dtor(control->get());
  caf::intrusive_ptr_release_weak(control);
}

void intrusive_release_weak(caf::actor_control_block* control) {
  if (control->weak_refs.fetch_sub(1, std::memory_order_acq_rel) == 1) control->block_dtor(control);
}

void deref(caf::ref_counted* counted) {
  if (counter::of(*counted).fetch_sub(1, std::memory_order_acq_rel) == 1)
    counted->request_deletion(true);
}
