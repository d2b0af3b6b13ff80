# kernel_source(<target> <file> <options>...): kernels of a target, compiled once for each instruction
# set; isa/build_name.h.
# -ffp-contract=fast: fuse multiply-adds, which ISO mode turns off.
# -Wno-maybe-uninitialized, -Wno-uninitialized: GCC's AVX-512 headers trip it (GCC bug 105593).
function(kernel_build target file build)
  get_filename_component(stem ${file} NAME_WE)
  set(objects ${stem}_${build})
  add_library(${objects} OBJECT ${file})
  set_target_properties(
    ${objects} PROPERTIES POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden)
  target_compile_definitions(${objects} PRIVATE PDSERVE_BUILD=${build})
  target_compile_options(${objects} PRIVATE -Wall -Wextra -ffp-contract=fast -Wno-maybe-uninitialized
    -Wno-uninitialized ${ARGN})
  target_sources(${target} PRIVATE $<TARGET_OBJECTS:${objects}>)
endfunction()

set(avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma)

function(kernel_source target file)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64")
    # Scheduled before registers are allocated, loads move up until sums no longer fit.
    list(APPEND ARGN -fno-schedule-insns)
    # Not armv8.6-a: CPUs have BF16 without all the rest of it.
    kernel_build(${target} ${file} NeonBf16 -march=armv8.2-a+bf16 ${ARGN})
  elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    kernel_build(${target} ${file} Avx2 -mavx2 -mfma ${ARGN})
    kernel_build(${target} ${file} Avx512 ${avx512} ${ARGN})
    kernel_build(${target} ${file} Avx512Bf16 ${avx512} -mavx512bf16 ${ARGN})
  endif()
  kernel_build(${target} ${file} Portable ${ARGN})
endfunction()

# tile_source(<target> <file> <options>...): kernels on the tiles of AMX, and the same on emulated ones.
function(tile_source target file)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    set(tiles ${avx512} -mavx512bf16 -mamx-tile -mamx-bf16)
    kernel_build(${target} ${file} Amx ${tiles} -DPDSERVE_TILES ${ARGN})
    kernel_build(${target} ${file} AmxEmulated -DPDSERVE_TILES -Wno-psabi ${ARGN})
  endif()
endfunction()

# integer_source(<target> <file>): kernels of integers, and of floats whose operations are never
# fused, so that all builds have the same results.
function(integer_source target file)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    kernel_build(${target} ${file} Avx2 -mavx2 -ffp-contract=off)
    kernel_build(${target} ${file} Avx512Vnni ${avx512} -mavx512vnni -ffp-contract=off)
  elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64")
    kernel_build(${target} ${file} NeonDot -march=armv8.2-a+dotprod -ffp-contract=off)
    kernel_build(${target} ${file} NeonI8mm -march=armv8.2-a+dotprod+i8mm -ffp-contract=off)
  endif()
  kernel_build(${target} ${file} Portable -ffp-contract=off)
endfunction()
