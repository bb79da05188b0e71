# Which GPUs the xgmi backend is built for. Sets TROUPE_GPU_KIND (cuda, hip, none) and TROUPE_GPU_LIBRARIES, and
# defines what transport/ adds to its library.
#
# The default is none, not auto: the tools that happen to be on a build machine's PATH must not change the product or
# the tests of continuous integration. With GPUs, use -DTROUPE_GPU=auto.
set(TROUPE_GPU none CACHE STRING "Build the xgmi backend for: auto (cuda where nvcc is, else hip where hipcc is, else \
none), cuda, hip, none")
set_property(CACHE TROUPE_GPU PROPERTY STRINGS auto cuda hip none)
set(TROUPE_CUDA_ARCHITECTURES "80;90" CACHE STRING "GPUs of NVIDIA to compile kernels for (90: H100, H200)")
set(TROUPE_HIP_ARCHITECTURES "gfx90a" CACHE STRING "GPUs of AMD to compile kernels for (gfx90a: MI210, MI250)")

if(NOT TROUPE_GPU MATCHES "^(auto|cuda|hip|none)$")
  message(FATAL_ERROR "TROUPE_GPU is '${TROUPE_GPU}', expected auto, cuda, hip or none")
endif()
find_program(TROUPE_NVCC nvcc HINTS /usr/local/cuda/bin)
find_program(TROUPE_HIPCC hipcc HINTS /opt/rocm/bin)
mark_as_advanced(TROUPE_NVCC TROUPE_HIPCC)

set(TROUPE_GPU_KIND "${TROUPE_GPU}")
if(TROUPE_GPU STREQUAL "auto")
  if(TROUPE_NVCC)
    set(TROUPE_GPU_KIND cuda)
  elseif(TROUPE_HIPCC)
    set(TROUPE_GPU_KIND hip)
  else()
    set(TROUPE_GPU_KIND none)
    message(STATUS "the xgmi backend is not built: neither nvcc nor hipcc is there")
  endif()
endif()
if(TROUPE_GPU_KIND STREQUAL "cuda" AND NOT TROUPE_NVCC)
  message(FATAL_ERROR "TROUPE_GPU is cuda and nvcc was not found; put it on the PATH, or set TROUPE_NVCC")
endif()
if(TROUPE_GPU_KIND STREQUAL "hip" AND NOT TROUPE_HIPCC)
  message(FATAL_ERROR "TROUPE_GPU is hip and hipcc was not found; install hipcc and libamdhip64-dev "
                      "(deploy/install-packages gpu)")
endif()

# The include root of the folders, for the device compilers, which do not use CMake targets.
set(TROUPE_GPU_INCLUDES "-I${PROJECT_BINARY_DIR}/include/transport" "-I${PROJECT_BINARY_DIR}/include/kvcache")

# troupe_gpu_compile_command(<out> <kind> <source> <object>): how the kernels are compiled.
function(troupe_gpu_compile_command out kind source object)
  if(kind STREQUAL "cuda")
    set(targets)
    foreach(architecture IN LISTS TROUPE_CUDA_ARCHITECTURES)
      list(APPEND targets "-gencode=arch=compute_${architecture},code=sm_${architecture}")
    endforeach()
    # The newest architecture also as PTX, which the driver compiles for later GPUs.
    list(GET TROUPE_CUDA_ARCHITECTURES -1 newest)
    list(APPEND targets "-gencode=arch=compute_${newest},code=compute_${newest}")
    set(command "${TROUPE_NVCC}" -x cu -std=c++17 -O3 -DTROUPE_GPU_CUDA ${targets}
                -Xcompiler -fPIC,-Wall,-Wextra -Werror all-warnings)
  else()
    set(targets)
    foreach(architecture IN LISTS TROUPE_HIP_ARCHITECTURES)
      list(APPEND targets "--offload-arch=${architecture}")
    endforeach()
    set(command "${TROUPE_HIPCC}" -x hip -std=c++17 -O3 -DTROUPE_GPU_HIP -D__HIP_PLATFORM_AMD__ ${targets}
                -fPIC -Wall -Wextra -Werror)
  endif()
  set(${out} ${command} ${TROUPE_GPU_INCLUDES} -c "${source}" -o "${object}" PARENT_SCOPE)
endfunction()

set(TROUPE_GPU_LIBRARIES)
if(TROUPE_GPU_KIND STREQUAL "cuda")
  find_package(CUDAToolkit REQUIRED)
  # Static: the runtime looks for the driver when the program runs, so the program also starts without a driver.
  set(TROUPE_GPU_LIBRARIES CUDA::cudart_static)
elseif(TROUPE_GPU_KIND STREQUAL "hip")
  set(TROUPE_GPU_LIBRARIES ${CMAKE_DL_LIBS})  # libamdhip64 is opened at run time: xgmi/hip_library.cpp
endif()

# troupe_gpu_sources(<out>): the sources of the chosen runtime, and its kernels.
function(troupe_gpu_sources out)
  if(TROUPE_GPU_KIND STREQUAL "none")
    set(${out} xgmi/gpu_runtime_none.cpp PARENT_SCOPE)
    return()
  endif()
  set(kernels "${CMAKE_CURRENT_SOURCE_DIR}/xgmi/scatter_kernel.hip")
  set(object "${CMAKE_CURRENT_BINARY_DIR}/scatter_kernel.o")
  troupe_gpu_compile_command(command ${TROUPE_GPU_KIND} "${kernels}" "${object}")
  add_custom_command(OUTPUT "${object}" COMMAND ${command} VERBATIM
                     COMMENT "Compiling the copy kernels for ${TROUPE_GPU_KIND}"
                     DEPENDS "${kernels}" xgmi/scatter_kernel.hpp xgmi/copy_item.hpp xgmi/hip_on_cuda.hpp)
  set_source_files_properties("${object}" PROPERTIES EXTERNAL_OBJECT TRUE GENERATED TRUE)
  set(sources xgmi/gpu_runtime_hip.cpp "${object}")
  if(TROUPE_GPU_KIND STREQUAL "cuda")
    list(APPEND sources xgmi/cuda_driver.cpp xgmi/nvml_library.cpp)
  else()
    list(APPEND sources xgmi/hip_library.cpp)
  endif()
  set(${out} ${sources} PARENT_SCOPE)
endfunction()

# troupe_gpu_settings(<target>): the settings for the runtime's own sources.
function(troupe_gpu_settings target)
  if(TROUPE_GPU_KIND STREQUAL "cuda")
    target_compile_definitions(${target} PRIVATE TROUPE_GPU_CUDA)
    target_include_directories(${target} SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
  elseif(TROUPE_GPU_KIND STREQUAL "hip")
    target_compile_definitions(${target} PRIVATE TROUPE_GPU_HIP __HIP_PLATFORM_AMD__)
  endif()
endfunction()
