// Runs a command to which the kernel refuses some calls, as a container or a setting of the machine
// does:
//
//   restricted ptrace|namespaces|ipv6 COMMAND...
//
// The command and all its children get the error that they would get on such a machine. If the
// calls cannot be refused here, exits with 125 and a sentence.

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string_view>
#include <vector>

#include <linux/audit.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/sched.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

#if defined(__x86_64__)
constexpr std::uint32_t architecture = AUDIT_ARCH_X86_64;
#elif defined(__aarch64__)
constexpr std::uint32_t architecture = AUDIT_ARCH_AARCH64;
#else
#error "say here what AUDIT_ARCH_ this machine has"
#endif

constexpr int cannot = 125;
constexpr std::uint32_t every_namespace = CLONE_NEWCGROUP | CLONE_NEWIPC | CLONE_NEWNET |
                                          CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWUSER | CLONE_NEWUTS;

/// Which calls are refused: all, those whose first argument has one of the bits, or those where it
/// equals the value.
enum class where : std::uint8_t { always, has_bits, equals };

struct refusal {
  long call;
  int error;
  where when{where::always};
  std::uint32_t value{0};
};

struct restriction {
  std::string_view name;
  std::vector<refusal> refusals;
  /// Capabilities that root loses.
  std::vector<unsigned long> capabilities;
};

std::vector<restriction> all_restrictions() {
  return {
      {"ptrace",
       {{SYS_ptrace, EPERM}, {SYS_process_vm_readv, EPERM}, {SYS_process_vm_writev, EPERM}},
       {CAP_SYS_PTRACE}},
      // The C library falls back to clone, whose flags a filter can see.
      {"namespaces",
       {{SYS_unshare, EPERM, where::has_bits, every_namespace | CLONE_NEWTIME},
        {SYS_clone, EPERM, where::has_bits, every_namespace},
        {SYS_clone3, ENOSYS},
        {SYS_setns, EPERM}},
       {CAP_SYS_ADMIN}},
      {"ipv6", {{SYS_socket, EAFNOSUPPORT, where::equals, AF_INET6}}, {}},
  };
}

sock_filter load(std::size_t offset) {
  return BPF_STMT(BPF_LD | BPF_W | BPF_ABS, static_cast<std::uint32_t>(offset));
}

sock_filter jump_on(std::uint16_t test, std::uint32_t value, std::uint8_t yes, std::uint8_t no) {
  return BPF_JUMP(static_cast<std::uint16_t>(BPF_JMP | test | BPF_K), value, yes, no);
}

sock_filter result(std::uint32_t what) {
  return BPF_STMT(BPF_RET | BPF_K, what);
}

void add(std::vector<sock_filter>& program, const refusal& refused) {
  const auto when = refused.when;
  // `always` compares with 0, which every value reaches. The low half of the argument comes first
  // on these machines.
  const std::uint16_t test = when == where::always     ? BPF_JGE
                             : when == where::has_bits ? BPF_JSET
                                                       : BPF_JEQ;
  program.push_back(load(offsetof(seccomp_data, nr)));
  program.push_back(jump_on(BPF_JEQ, static_cast<std::uint32_t>(refused.call), 0, 3));
  program.push_back(load(offsetof(seccomp_data, args[0])));
  program.push_back(jump_on(test, refused.value, 0, 1));
  program.push_back(result(SECCOMP_RET_ERRNO | static_cast<std::uint32_t>(refused.error)));
}

bool install(const restriction& chosen) {
  std::vector<sock_filter> program{load(offsetof(seccomp_data, arch)),
                                   jump_on(BPF_JEQ, architecture, 1, 0), result(SECCOMP_RET_ALLOW)};
  for (const auto& refused : chosen.refusals) add(program, refused);
  program.push_back(result(SECCOMP_RET_ALLOW));
  const sock_fprog whole{static_cast<unsigned short>(program.size()), program.data()};
  const auto put = [&] { return ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &whole, 0, 0) == 0; };
  // Without root's capabilities, a filter may be installed only if no program gains privileges.
  return put() || (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && put());
}

int run(const restriction& chosen, char** command) {
  if (!install(chosen)) {
    std::fprintf(stderr, "restricted: this kernel accepts no filter of system calls: %s\n",
                 std::strerror(errno));
    return cannot;
  }
  // Only root has capabilities to lose, and loses them when the command starts.
  for (const auto capability : chosen.capabilities) ::prctl(PR_CAPBSET_DROP, capability, 0, 0, 0);
  ::execvp(command[0], command);
  std::fprintf(stderr, "restricted: %s: %s\n", command[0], std::strerror(errno));
  return cannot;
}

}  // namespace

int main(int count, char** words) {
  if (count > 2) {
    for (const auto& one : all_restrictions())
      if (one.name == words[1]) return run(one, words + 2);
  }
  std::fputs("usage: restricted ptrace|namespaces|ipv6 COMMAND...\n", stderr);
  return cannot;
}
