# Installs BUILD into WORK/prefix, moves it to where it was not installed to, and builds and runs CONSUMER
# against it there. Run by ctest.

cmake_minimum_required(VERSION 3.25)

function(must)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE said ERROR_VARIABLE said)
  if(NOT status EQUAL 0)
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "${command}\nended with ${status}:\n${said}")
  endif()
  set(said "${said}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE "${WORK}")
file(MAKE_DIRECTORY "${WORK}")
must("${CMAKE_COMMAND}" --install "${BUILD}" --prefix "${WORK}/prefix")
# A package that names the place where it was made would be found only there.
file(RENAME "${WORK}/prefix" "${WORK}/moved")
must("${CMAKE_COMMAND}" -S "${CONSUMER}" -B "${WORK}/build" -G "${GENERATOR}"
     "-DCMAKE_CXX_COMPILER=${COMPILER}" "-DCMAKE_PREFIX_PATH=${WORK}/moved" "-DWANTED=${VERSION}")
must("${CMAKE_COMMAND}" --build "${WORK}/build")
must("${WORK}/build/consumer")
if(NOT said STREQUAL "peer_lost\n")
  message(FATAL_ERROR "the consumer printed '${said}' instead of peer_lost")
endif()
