# CUTLASS 4.2.0, headers only: from CUTLASS_DIR (a source tree), else from the nvidia-cutlass wheel.
# Defines the target minfer::cutlass and MINFER_CUTLASS_VERSION.
include("${CMAKE_CURRENT_LIST_DIR}/locate.cmake")

set(minfer_cutlass_wanted "4.2.0")  # the kernels are written against this release's collectives
set(CUTLASS_DIR "" CACHE PATH "CUTLASS source tree (default: environment variable CUTLASS_DIR, else the nvidia-cutlass wheel)")

set(minfer_cutlass_dir "${CUTLASS_DIR}")
if(NOT minfer_cutlass_dir)
  set(minfer_cutlass_dir "$ENV{CUTLASS_DIR}")
endif()
if(NOT minfer_cutlass_dir)
  minfer_locate(minfer_cutlass_dir cutlass_library/source)
endif()
if(NOT minfer_cutlass_dir)
  message(FATAL_ERROR "CUTLASS was not found: pip install --no-deps nvidia-cutlass==${minfer_cutlass_wanted}.0, or set CUTLASS_DIR to a "
    "CUTLASS ${minfer_cutlass_wanted} source tree.")
endif()

set(minfer_cutlass_header "${minfer_cutlass_dir}/include/cutlass/version.h")
if(NOT EXISTS "${minfer_cutlass_header}")
  message(FATAL_ERROR "CUTLASS_DIR=${minfer_cutlass_dir} has no include/cutlass/version.h: set it to the root of a CUTLASS "
    "${minfer_cutlass_wanted} source tree.")
endif()
file(STRINGS "${minfer_cutlass_header}" minfer_cutlass_lines REGEX "^#define CUTLASS_(MAJOR|MINOR|PATCH) ")
string(REGEX REPLACE ".*MAJOR ([0-9]+).*MINOR ([0-9]+).*PATCH ([0-9]+).*" "\\1.\\2.\\3" MINFER_CUTLASS_VERSION "${minfer_cutlass_lines}")
if(NOT MINFER_CUTLASS_VERSION VERSION_EQUAL minfer_cutlass_wanted)
  message(FATAL_ERROR "CUTLASS at ${minfer_cutlass_dir} is ${MINFER_CUTLASS_VERSION}, the kernels need ${minfer_cutlass_wanted}: pip "
    "install --no-deps nvidia-cutlass==${minfer_cutlass_wanted}.0, or set CUTLASS_DIR to that release.")
endif()

add_library(minfer_cutlass INTERFACE)
add_library(minfer::cutlass ALIAS minfer_cutlass)
# SYSTEM: our own code is compiled with warnings on.
target_include_directories(minfer_cutlass SYSTEM INTERFACE "${minfer_cutlass_dir}/include" "${minfer_cutlass_dir}/tools/util/include")
