# Every header PUBLIC of the installation at WORK/moved compiles by itself. Run by ctest.

cmake_minimum_required(VERSION 3.25)
include("${CMAKE_CURRENT_LIST_DIR}/must.cmake")
string(REPLACE "," ";" PUBLIC "${PUBLIC}")

file(REMOVE_RECURSE "${WORK}/headers")
must("${CMAKE_COMMAND}" -S "${CMAKE_CURRENT_LIST_DIR}/headers" -B "${WORK}/headers" -G "${GENERATOR}"
     "-DCMAKE_CXX_COMPILER=${COMPILER}" "-DCMAKE_PREFIX_PATH=${WORK}/moved" "-DHEADERS=${PUBLIC}")
must("${CMAKE_COMMAND}" --build "${WORK}/headers")
