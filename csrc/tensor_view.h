// A borrowed view of a Python tensor, and the checks every launcher makes before its kernel runs.
//
// torch exports a table of C functions (DLPack's "exchange API") that describes a tensor in tens of
// nanoseconds. __dlpack__ takes microseconds, for each tensor of each layer of a decode step. All
// other arrays (NumPy, older torch) are read by nb::ndarray.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

namespace pdserve {

enum class ElementType { kFloat32, kBFloat16, kInt8, kUInt8, kInt32, kInt64, kUInt64, kOther };

enum class Access { kRead, kWrite };

class TensorView {
public:
    static constexpr int kMaxDims = 8;

    // `object` must outlive the view; `name` is the argument's name, for errors.
    // Raises TypeError: not a tensor, not on the CPU, or read-only where it is to be written.
    TensorView(nanobind::handle object, const char* name, Access access = Access::kRead);

    int64_t size(int dim) const { return shape_[dim]; }
    int64_t stride(int dim) const { return strides_[dim]; }  // in elements
    ElementType type() const { return type_; }
    size_t element_bytes() const { return element_bits_ / 8; }

    template <class T>
    T* data() const {
        return static_cast<T*>(data_);
    }

    // Raise TypeError.
    void expect_type(std::initializer_list<ElementType> allowed) const;
    void expect_type_of(const TensorView& other) const;

    // Raise ValueError. A size of -1 matches any; `meaning` is the shape in words.
    void expect_shape(std::initializer_list<int64_t> sizes, const char* meaning) const;
    void expect_contiguous() const;
    void expect_contiguous_last_dim() const;

private:
    void read(const nanobind::dlpack::dltensor& tensor);
    bool is_contiguous_from(int dim) const;
    std::string type_name() const;
    std::string shape_text() const;
    std::string strides_text() const;

    const char* name_;
    nanobind::ndarray<nanobind::ro> owner_;  // only where there is no exchange API
    void* data_ = nullptr;
    ElementType type_ = ElementType::kOther;
    uint8_t type_code_ = 0;
    uint8_t element_bits_ = 0;
    int num_dims_ = 0;
    int64_t shape_[kMaxDims] = {};
    int64_t strides_[kMaxDims] = {};
};

// Raise "<what>: expected <expected>, found <found>".
[[noreturn]] void raise_value_error(
    const std::string& what, const std::string& expected, const std::string& found);
[[noreturn]] void raise_type_error(
    const std::string& what, const std::string& expected, const std::string& found);

}  // namespace pdserve
