# Every kind of wrong include is reported, and valid ones are not:
#   cmake -DWORK=<empty folder> -P check_includes_test.cmake

cmake_minimum_required(VERSION 3.25)

file(REMOVE_RECURSE "${WORK}")
file(WRITE "${WORK}/kvcache/good.hpp" "#pragma once\n#include \"troupe/kvcache/a.hpp\"\n#include <vector>\n")
file(WRITE "${WORK}/actors/messages/types.hpp" "#pragma once\n#include <caf/config.hpp>\n#if CAF_VERSION >= 1800\n#endif\n")
file(WRITE "${WORK}/kvcache/up.hpp" "#pragma once\n#include \"troupe/transport/a.hpp\"\n")
file(WRITE "${WORK}/transport/sideways.cpp" "  #  include \"troupe/config/a.hpp\"\n")
file(WRITE "${WORK}/transport/relative.cpp" "#include \"../kvcache/a.hpp\"\n")
file(WRITE "${WORK}/transport/bare.cpp" "#include \"b.hpp\"\n")
file(WRITE "${WORK}/config/angle.cpp" "#include <troupe/config/a.hpp>\n")
file(WRITE "${WORK}/transport/tcp/deep.cpp" "#include <caf/actor.hpp>\n")
file(WRITE "${WORK}/config/twice.hpp" "struct twice {};\n")
file(WRITE "${WORK}/config/late.hpp" "#pragma once\n")
file(WRITE "${WORK}/config/late.cpp" "#include <vector>\n#include \"troupe/config/late.hpp\"\n")
file(WRITE "${WORK}/config/early.hpp" "#pragma once\n")
file(WRITE "${WORK}/config/early.cpp" "#include \"troupe/config/early.hpp\"\n#include <vector>\n")
file(WRITE "${WORK}/actors/shown.hpp" "#pragma once\n")
file(WRITE "${WORK}/actors/room/shown.cpp" "#include <vector>\n#include \"troupe/actors/shown.hpp\"\n")
file(WRITE "${WORK}/actors/gate.cpp" "#if CAF_VERSION >= 1800\n#endif\n")
file(WRITE "${WORK}/actors/io/good.hpp" "#pragma once\n#include \"troupe/actors/door/door.hpp\"\n")
file(WRITE "${WORK}/actors/io/good.cpp" "#include \"troupe/io/good.hpp\"\n#include \"troupe/transport/a.hpp\"\n")
file(WRITE "${WORK}/actors/io/actor.cpp" "#include <caf/actor.hpp>\n#include \"troupe/actors/node.hpp\"\n")
file(WRITE "${WORK}/actors/down.cpp" "#include \"troupe/io/good.hpp\"\n")

execute_process(COMMAND "${CMAKE_COMMAND}" "-DROOT=${WORK}" -P "${CMAKE_CURRENT_LIST_DIR}/check_includes.cmake"
                RESULT_VARIABLE status ERROR_VARIABLE said OUTPUT_VARIABLE said)
set(expected
  "config/angle.cpp: includes troupe/config/a.hpp in angle brackets"
  "kvcache/up.hpp: kvcache may not include transport"
  "transport/bare.cpp: includes b.hpp, write troupe/transport/b.hpp"
  "transport/relative.cpp: includes ../kvcache/a.hpp by a relative path"
  "transport/sideways.cpp: transport may not include config"
  "transport/tcp/deep.cpp: only actors may include CAF"
  "actors/gate.cpp: CAF_VERSION belongs into actors/messages/types.hpp"
  "config/twice.hpp: has no #pragma once"
  "config/late.cpp: does not include troupe/config/late.hpp before anything else"
  "actors/room/shown.cpp: does not include troupe/actors/shown.hpp before anything else"
  "actors/io/actor.cpp: only actors may include CAF"
  "actors/io/actor.cpp: io may include of actors the door only (troupe/actors/node.hpp)"
  "actors/down.cpp: actors may not include io"
  "13 wrong includes")
foreach(line IN LISTS expected)
  string(FIND "${said}" "${line}" at)
  if(at EQUAL -1)
    message(FATAL_ERROR "expected '${line}' in:\n${said}")
  endif()
endforeach()
if(status EQUAL 0)
  message(FATAL_ERROR "wrong includes were printed, but the check succeeded")
endif()
