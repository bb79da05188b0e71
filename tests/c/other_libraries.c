/* Stands for other releases of spdlog and fmt in the process, under the names that all releases
 * share. A library that calls one of these has mistaken them for its own, and the process ends. */

#include <stdio.h>
#include <stdlib.h>

static void taken(const char* name) {
  fprintf(stderr, "another library's %s was called\n", name);
  abort();
}

#define OTHER(name, symbol)        \
  void name(void) __asm__(symbol); \
  void name(void) {                \
    taken(symbol);                 \
  }

OTHER(log_it, "_ZN6spdlog6logger7log_it_ERKNS_7details7log_msgEbb")
OTHER(set_level, "_ZN6spdlog6logger9set_levelENS_5level10level_enumE")
OTHER(flush_on, "_ZN6spdlog6logger8flush_onENS_5level10level_enumE")
OTHER(should_log, "_ZNK6spdlog5sinks4sink10should_logENS_5level10level_enumE")
OTHER(enabled, "_ZNK6spdlog7details10backtracer7enabledEv")
OTHER(sink, "_ZN6spdlog5sinks11stderr_sinkINS_7details13console_mutexEEC1Ev")
OTHER(base, "_ZN6spdlog5sinks9base_sinkISt5mutexEC2Ev")
OTHER(log_, "_ZN6spdlog5sinks9base_sinkISt5mutexE3logERKNS_7details7log_msgE")
OTHER(flush, "_ZN6spdlog5sinks9base_sinkISt5mutexE5flushEv")
OTHER(message,
      "_ZN6spdlog7details7log_msgC1ENS_10source_locEN3fmt2v917basic_string_viewIcEENS_"
      "5level10level_enumES6_")
OTHER(vformat,
      "_ZN3fmt2v97vformatB5cxx11ENS0_17basic_string_viewIcEENS0_17basic_format_argsINS0_20basic_"
      "format_context"
      "INS0_8appenderEcEEEE")
OTHER(printable, "_ZN3fmt2v96detail12is_printableEj")
