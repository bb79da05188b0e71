# Every kind of wrong include is found, and right ones are not:
#   cmake -DWORK=<empty folder> -P check_includes_test.cmake

cmake_minimum_required(VERSION 3.25)

file(REMOVE_RECURSE "${WORK}")
file(WRITE "${WORK}/kvcache/good.hpp" "#include \"troupe/kvcache/a.hpp\"\n#include <vector>\n")
file(WRITE "${WORK}/actors/types.hpp" "#include <caf/config.hpp>\n#if CAF_VERSION >= 1800\n#endif\n")
file(WRITE "${WORK}/kvcache/up.hpp" "#include \"troupe/transport/a.hpp\"\n")
file(WRITE "${WORK}/transport/sideways.cpp" "  #  include \"troupe/config/a.hpp\"\n")
file(WRITE "${WORK}/transport/relative.cpp" "#include \"../kvcache/a.hpp\"\n")
file(WRITE "${WORK}/transport/bare.cpp" "#include \"b.hpp\"\n")
file(WRITE "${WORK}/config/angle.cpp" "#include <troupe/config/a.hpp>\n")
file(WRITE "${WORK}/transport/tcp/deep.cpp" "#include <caf/actor.hpp>\n")
file(WRITE "${WORK}/actors/gate.cpp" "#if CAF_VERSION >= 1800\n#endif\n")

execute_process(COMMAND "${CMAKE_COMMAND}" "-DROOT=${WORK}" -P "${CMAKE_CURRENT_LIST_DIR}/check_includes.cmake"
                RESULT_VARIABLE status ERROR_VARIABLE said OUTPUT_VARIABLE said)
set(expected
  "config/angle.cpp: includes troupe/config/a.hpp in angle brackets"
  "kvcache/up.hpp: kvcache may not include transport"
  "transport/bare.cpp: includes b.hpp, write troupe/transport/b.hpp"
  "transport/relative.cpp: includes ../kvcache/a.hpp by a relative path"
  "transport/sideways.cpp: transport may not include config"
  "transport/tcp/deep.cpp: only actors may include CAF"
  "actors/gate.cpp: CAF_VERSION belongs into actors/types.hpp"
  "7 wrong includes")
foreach(line IN LISTS expected)
  string(FIND "${said}" "${line}" at)
  if(at EQUAL -1)
    message(FATAL_ERROR "expected '${line}' in:\n${said}")
  endif()
endforeach()
if(status EQUAL 0)
  message(FATAL_ERROR "wrong includes were printed, but the check succeeded")
endif()
