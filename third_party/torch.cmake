# Torch's headers and the two libraries that the stable ABI's symbols live in: from MINFER_TORCH_DIR (the folder `torch` inside a
# site-packages), else from the Python environment. Any torch >= 2.10 gives the same binary, with CUDA or without.
# Sets MINFER_TORCH_FOUND and, if so, defines the target minfer::torch.
include("${CMAKE_CURRENT_LIST_DIR}/locate.cmake")

set(MINFER_TORCH_DIR "" CACHE PATH
  "Folder of the torch package to build against (default: environment variable MINFER_TORCH_DIR, else the Python environment's)")

set(minfer_torch_dir "${MINFER_TORCH_DIR}")
if(NOT minfer_torch_dir)
  set(minfer_torch_dir "$ENV{MINFER_TORCH_DIR}")
endif()
if(NOT minfer_torch_dir)
  minfer_locate(minfer_torch_dir torch/version.py)
  if(minfer_torch_dir)
    get_filename_component(minfer_torch_dir "${minfer_torch_dir}" DIRECTORY)
  endif()
elseif(NOT EXISTS "${minfer_torch_dir}/version.py")
  message(FATAL_ERROR "MINFER_TORCH_DIR=${minfer_torch_dir} is not a torch package: set it to the folder that `python -c \"import "
    "torch; print(torch.__path__[0])\"` prints.")
endif()

set(MINFER_TORCH_FOUND FALSE)
if(minfer_torch_dir)
  file(STRINGS "${minfer_torch_dir}/version.py" minfer_torch_version REGEX "^__version__ = ")
  string(REGEX REPLACE ".*= *['\"]([0-9]+\\.[0-9]+).*" "\\1" minfer_torch_version "${minfer_torch_version}")
  if(minfer_torch_version VERSION_GREATER_EQUAL 2.10)
    set(MINFER_TORCH_FOUND TRUE)
    set(minfer_torch_state "torch ${minfer_torch_version} at ${minfer_torch_dir}")
  else()
    set(minfer_torch_state "torch ${minfer_torch_version} at ${minfer_torch_dir} is too old")
  endif()
else()
  set(minfer_torch_state "no torch was found beside ${Python3_EXECUTABLE}")
endif()

if(MINFER_TORCH_FOUND)
  # Torch loads its libraries RTLD_LOCAL, so the module's undefined symbols resolve only through NEEDED entries of its own, which a
  # linker under --as-needed would drop for libtorch.so.
  set(CMAKE_LINK_LIBRARY_USING_minfer_needed "LINKER:--push-state,--no-as-needed" "<LINK_ITEM>" "LINKER:--pop-state")
  set(CMAKE_LINK_LIBRARY_USING_minfer_needed_SUPPORTED TRUE)
  set(minfer_torch_libraries "${minfer_torch_dir}/lib/libtorch.so" "${minfer_torch_dir}/lib/libtorch_cpu.so")
  add_library(minfer_torch INTERFACE)
  add_library(minfer::torch ALIAS minfer_torch)
  target_include_directories(minfer_torch SYSTEM INTERFACE
    "${minfer_torch_dir}/include" "${minfer_torch_dir}/include/torch/csrc/api/include")
  target_link_libraries(minfer_torch INTERFACE "$<LINK_LIBRARY:minfer_needed,${minfer_torch_libraries}>")
  target_compile_definitions(minfer_torch INTERFACE TORCH_TARGET_VERSION=0x020a000000000000)  # the stable ABI as of 2.10
endif()
