# Every kind of wrong include of a public header is reported, and valid ones are not:
#   cmake -DWORK=<empty folder> -P check_public_headers_test.cmake

cmake_minimum_required(VERSION 3.25)

file(REMOVE_RECURSE "${WORK}")
file(WRITE "${WORK}/kvcache/good.hpp" "#include <vector>\n#include \"troupe/kvcache/base.hpp\"\n")
file(WRITE "${WORK}/kvcache/base.hpp" "#include <spdlog/logger.h>\n")
file(WRITE "${WORK}/kvcache/hidden.hpp" "#include <caf/actor.hpp>\n")
file(WRITE "${WORK}/actors/leaks.hpp" "#include \"troupe/kvcache/hidden.hpp\"\n")
file(WRITE "${WORK}/actors/shows.hpp" "#  include <caf/actor.hpp>\n")

execute_process(COMMAND "${CMAKE_COMMAND}" "-DROOT=${WORK}"
                        "-DPUBLIC=kvcache/good.hpp;kvcache/base.hpp;actors/leaks.hpp;actors/shows.hpp;actors/gone.hpp"
                        -P "${CMAKE_CURRENT_LIST_DIR}/check_public_headers.cmake"
                RESULT_VARIABLE status ERROR_VARIABLE said OUTPUT_VARIABLE said)
foreach(line
        "actors/leaks.hpp: includes kvcache/hidden.hpp, which is private"
        "actors/shows.hpp: shows caf/actor.hpp to those who include it"
        "actors/gone.hpp: is not there"
        "3 wrong includes")
  string(FIND "${said}" "${line}" at)
  if(at EQUAL -1)
    message(FATAL_ERROR "expected '${line}' in:\n${said}")
  endif()
endforeach()
if(status EQUAL 0)
  message(FATAL_ERROR "wrong includes were printed, but the check succeeded")
endif()
