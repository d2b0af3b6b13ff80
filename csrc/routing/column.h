// A borrowed array of the router. Much cheaper than nb::ndarray: a decision reads two dozen of
// them.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>

#include <nanobind/nanobind.h>

#include "../tensor_view.h"

namespace pdserve::routing {

template <class T>
class Column {
    static_assert(std::is_same_v<std::remove_const_t<T>, double> ||
        std::is_same_v<std::remove_const_t<T>, int64_t>);

public:
    // Raises TypeError unless it is a contiguous array of T with this many dimensions, writable
    // unless T is const.
    Column(nanobind::handle array, const char* name, int num_dims = 1) {
        const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT;
        const int access = std::is_const_v<T> ? flags : flags | PyBUF_WRITABLE;
        if (PyObject_GetBuffer(array.ptr(), &buffer_, access) != 0) {
            PyErr_Clear();
            raise_type_error(name, "a contiguous array", nanobind::inst_name(array).c_str());
        }
        const std::string format = buffer_.format;
        const bool is_float = format == "d", is_int = format == "l" || format == "q";
        constexpr bool kIsFloat = std::is_same_v<std::remove_const_t<T>, double>;
        if (buffer_.ndim != num_dims || (kIsFloat ? !is_float : !is_int)) {
            const std::string found = std::to_string(buffer_.ndim) + " of " + format;
            PyBuffer_Release(&buffer_);
            raise_type_error(name,
                std::to_string(num_dims) + " axes of " + (kIsFloat ? "float64" : "int64"), found);
        }
    }
    ~Column() { PyBuffer_Release(&buffer_); }
    Column(const Column&) = delete;
    Column& operator=(const Column&) = delete;

    T& operator[](int64_t index) const { return data()[index]; }
    T* data() const { return static_cast<T*>(buffer_.buf); }
    int64_t size(int dim = 0) const { return buffer_.shape[dim]; }

    // Raises ValueError.
    void expect_size(int64_t expected, const char* name, int dim = 0) const {
        if (size(dim) == expected) return;
        raise_value_error(name, std::to_string(expected) + " elements on axis " +
            std::to_string(dim), std::to_string(size(dim)));
    }

private:
    Py_buffer buffer_;
};

}  // namespace pdserve::routing
