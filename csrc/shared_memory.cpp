// Python's mmap maps at any page, but for huge pages the address and the file offset must be equal
// modulo the huge page size. So this reserves a slightly larger address range, and maps at a
// suitable address in it.

#include "shared_memory.h"

#include <cerrno>
#include <cstdint>
#include <string>

#include <sys/mman.h>
#include <unistd.h>

#include <nanobind/ndarray.h>

#include "tensor_view.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22  // Linux 5.14
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1
#endif

namespace nb = nanobind;

namespace pdserve {
namespace {

constexpr size_t kHugePage = 2 << 20;

using Bytes = nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>;
using ReadOnlyBytes = nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>;
using ReadOnlyRegion = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Region = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

struct Mapping {
    void* address;
    size_t size;
    ~Mapping() { munmap(address, size); }
};

[[noreturn]] void raise_errno() {
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
}

uint8_t* map_aligned(int fd, size_t size, int protection) {
    const size_t room = size + kHugePage;
    void* reserved = mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved == MAP_FAILED) raise_errno();
    const auto first = reinterpret_cast<uintptr_t>(reserved);
    const uintptr_t aligned = (first + kHugePage - 1) / kHugePage * kHugePage;
    void* mapped = mmap(reinterpret_cast<void*>(aligned), size, protection, MAP_SHARED | MAP_FIXED, fd, 0);
    if (mapped == MAP_FAILED) {
        const int error = errno;
        munmap(reserved, room);
        errno = error;
        raise_errno();
    }
    // The kernel rounds lengths up to whole pages; the rest of the reservation starts there.
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const uintptr_t end = (aligned + size + page - 1) / page * page;
    if (aligned > first) munmap(reserved, aligned - first);
    if (first + room > end) munmap(reinterpret_cast<void*>(end), first + room - end);
    madvise(mapped, size, MADV_HUGEPAGE);  // a kernel without them: slower, not wrong
    return static_cast<uint8_t*>(mapped);
}

nb::object map_shared(int fd, size_t size, bool writable) {
    if (size == 0) raise_value_error("size", "> 0", "0");
    uint8_t* address = map_aligned(fd, size, writable ? PROT_READ | PROT_WRITE : PROT_READ);
    nb::capsule owner(new Mapping{address, size},
                      [](void* p) noexcept { delete static_cast<Mapping*>(p); });
    if (writable) return nb::cast(Bytes(address, {size}, owner));
    return nb::cast(ReadOnlyBytes(address, {size}, owner));
}

// Rewrites the existing contents, since others may be using the region.
void touch(const Region& region, size_t step) {
    for (size_t i = 0; i < region.size(); i += step)
        __atomic_fetch_or(region.data() + i, 0, __ATOMIC_RELAXED);
}

// Allocates the missing pages of the region. Returns the errno of a failure, or 0.
int populate(const Region& region) {
    if (madvise(region.data(), region.size(), MADV_POPULATE_WRITE) == 0) return 0;
    if (errno != EINVAL) return errno;
    touch(region, sysconf(_SC_PAGESIZE));  // a kernel that does not know of it
    return 0;
}

// Through a mapping that wants huge pages, the file is read in huge pages, if its file system
// supports them.
bool read_in(ReadOnlyRegion region) {
    nb::gil_scoped_release unlocked;
    return madvise(const_cast<uint8_t*>(region.data()), region.size(), MADV_POPULATE_READ) == 0;
}

bool commit_huge_pages(Region region) {
    bool is_huge;
    int error;
    {
        nb::gil_scoped_release unlocked;
        touch(region, kHugePage);  // collapsing fills the holes around a page, not where none is
        is_huge = madvise(region.data(), region.size(), MADV_COLLAPSE) == 0;
        error = populate(region);
    }
    if (error) {
        errno = error;
        raise_errno();
    }
    return is_huge;
}

// The whole pages in it. What is left of others stays as it is.
void free_pages(Region region) {
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto first = reinterpret_cast<uintptr_t>(region.data());
    const uintptr_t begin = (first + page - 1) / page * page;
    const uintptr_t end = (first + region.size()) / page * page;
    if (begin >= end) return;
    if (madvise(reinterpret_cast<void*>(begin), end - begin, MADV_REMOVE) != 0) raise_errno();
}

}  // namespace

void bind_shared_memory(nb::module_& m) {
    using namespace nb::literals;
    m.def("map_shared", &map_shared, "fd"_a, "size"_a, "writable"_a,
          "The file's first bytes as an array, which owns the mapping; aligned for huge pages.");
    m.def("read_in", &read_in, "region"_a.noconvert(),
          "Read a mapped file into memory, and map all of it; whether the kernel can.");
    m.def("commit_huge_pages", &commit_huge_pages, "region"_a.noconvert(),
          "Give a shared region all of its memory now; whether in huge pages.");
    m.def("free_pages", &free_pages, "region"_a.noconvert(),
          "Give the memory of a shared region back; it is zeroes from then on.");
}

}  // namespace pdserve
