// Reads tensors from Python, and words all errors about them.

#include "tensor_view.h"

#include <algorithm>

#include "dlpack_exchange.h"

namespace nb = nanobind;

namespace pdserve {

namespace {

constexpr int kCpuDevice = 1;  // DLPack's kDLCPU

ElementType element_type(nb::dlpack::dtype dtype) {
    using Code = nb::dlpack::dtype_code;
    if (dtype.lanes != 1) return ElementType::kOther;
    const auto code = static_cast<Code>(dtype.code);
    if (code == Code::Float && dtype.bits == 32) return ElementType::kFloat32;
    if (code == Code::Bfloat && dtype.bits == 16) return ElementType::kBFloat16;
    if (code == Code::Int && dtype.bits == 8) return ElementType::kInt8;
    if (code == Code::UInt && dtype.bits == 8) return ElementType::kUInt8;
    if (code == Code::Int && dtype.bits == 32) return ElementType::kInt32;
    if (code == Code::Int && dtype.bits == 64) return ElementType::kInt64;
    if (code == Code::UInt && dtype.bits == 64) return ElementType::kUInt64;
    return ElementType::kOther;
}

const char* type_text(ElementType type) {
    switch (type) {
        case ElementType::kFloat32: return "float32";
        case ElementType::kBFloat16: return "bfloat16";
        case ElementType::kInt8: return "int8";
        case ElementType::kUInt8: return "uint8";
        case ElementType::kInt32: return "int32";
        case ElementType::kInt64: return "int64";
        case ElementType::kUInt64: return "uint64";
        case ElementType::kOther: break;
    }
    return "another dtype";
}

std::string list_text(const int64_t* values, int count, const char* any = nullptr) {
    std::string text = "[";
    for (int i = 0; i < count; ++i) {
        if (i > 0) text += ", ";
        text += any != nullptr && values[i] < 0 ? any : std::to_string(values[i]);
    }
    return text + "]";
}

}  // namespace

void raise_value_error(
    const std::string& what, const std::string& expected, const std::string& found) {
    throw nb::value_error((what + ": expected " + expected + ", found " + found).c_str());
}

void raise_type_error(
    const std::string& what, const std::string& expected, const std::string& found) {
    throw nb::type_error((what + ": expected " + expected + ", found " + found).c_str());
}

TensorView::TensorView(nb::handle object, const char* name, Access access) : name_(name) {
    if (const dlpack::ExchangeApi* api = dlpack::exchange_api(object)) {
        nb::dlpack::dltensor tensor;
        if (api->tensor_from_object(object.ptr(), &tensor) != 0) {
            PyErr_Clear();  // torch's message is a C++ stack trace
            raise_type_error(name, "a dense CPU tensor", "a tensor that DLPack cannot describe");
        }
        read(tensor);
        return;
    }
    nb::ndarray<> writable;
    if (access == Access::kWrite && nb::try_cast(object, writable, false)) {
        owner_ = nb::ndarray<nb::ro>(writable);
    } else if (const bool is_readable = nb::try_cast(object, owner_, false);
               access == Access::kWrite || !is_readable) {
        raise_type_error(name, access == Access::kWrite ? "a writable CPU tensor" : "a CPU tensor",
            (is_readable ? "a read-only " : "") + std::string(nb::inst_name(object).c_str()));
    }
    nb::dlpack::dltensor tensor;
    tensor.data = const_cast<void*>(owner_.data_handle());
    tensor.device.device_type = owner_.device_type();
    tensor.ndim = static_cast<int32_t>(owner_.ndim());
    tensor.dtype = owner_.dtype();
    tensor.shape = const_cast<int64_t*>(owner_.shape_ptr());
    tensor.strides = const_cast<int64_t*>(owner_.stride_ptr());
    tensor.byte_offset = owner_.byte_offset();
    read(tensor);
}

void TensorView::read(const nb::dlpack::dltensor& tensor) {
    if (tensor.device.device_type != kCpuDevice) {
        raise_type_error(name_, "a CPU tensor",
            "DLPack device type " + std::to_string(tensor.device.device_type));
    }
    if (tensor.ndim > kMaxDims) {
        raise_value_error(name_, "at most " + std::to_string(kMaxDims) + " dimensions",
            std::to_string(tensor.ndim));
    }
    data_ = static_cast<char*>(tensor.data) + tensor.byte_offset;
    type_ = element_type(tensor.dtype);
    type_code_ = tensor.dtype.code;
    element_bits_ = tensor.dtype.bits;
    num_dims_ = tensor.ndim;
    int64_t contiguous_stride = 1;
    for (int i = num_dims_ - 1; i >= 0; --i) {
        shape_[i] = tensor.shape[i];
        strides_[i] = tensor.strides != nullptr ? tensor.strides[i] : contiguous_stride;
        contiguous_stride *= shape_[i];
    }
}

std::string TensorView::type_name() const {
    if (type_ != ElementType::kOther) return type_text(type_);
    static const char* kCodes[] = {"int", "uint", "float", "opaque", "bfloat", "complex", "bool"};
    std::string code = type_code_ < 7 ? kCodes[type_code_] : "float8 or smaller, DLPack code ";
    return code + std::to_string(type_code_ < 7 ? element_bits_ : type_code_);
}

std::string TensorView::shape_text() const { return list_text(shape_, num_dims_); }

std::string TensorView::strides_text() const {
    return "shape " + shape_text() + " with strides " + list_text(strides_, num_dims_);
}

bool TensorView::is_contiguous_from(int dim) const {
    if (std::find(shape_, shape_ + num_dims_, 0) != shape_ + num_dims_) return true;
    int64_t expected = 1;
    for (int i = num_dims_ - 1; i >= dim; --i) {
        // The stride of a dimension of size 1 is never used; torch may leave any value there.
        if (shape_[i] != 1 && strides_[i] != expected) return false;
        expected *= shape_[i];
    }
    return true;
}

void TensorView::expect_type(std::initializer_list<ElementType> allowed) const {
    if (std::find(allowed.begin(), allowed.end(), type_) != allowed.end()) return;
    std::string expected = "dtype ";
    for (ElementType type : allowed) {
        expected += (type == *allowed.begin() ? "" : " or ") + std::string(type_text(type));
    }
    raise_type_error(name_, expected, type_name());
}

void TensorView::expect_type_of(const TensorView& other) const {
    if (type_ == other.type_) return;
    raise_type_error(
        name_, "dtype " + other.type_name() + ", that of " + other.name_, type_name());
}

void TensorView::expect_shape(std::initializer_list<int64_t> sizes, const char* meaning) const {
    bool matches = num_dims_ == static_cast<int>(sizes.size());
    for (int i = 0; matches && i < num_dims_; ++i) {
        const int64_t expected = sizes.begin()[i];
        matches = expected < 0 || shape_[i] == expected;
    }
    if (matches) return;
    raise_value_error(name_,
        "shape " + std::string(meaning) + " = "
            + list_text(sizes.begin(), static_cast<int>(sizes.size()), "any"),
        shape_text());
}

void TensorView::expect_contiguous() const {
    if (!is_contiguous_from(0)) raise_value_error(name_, "contiguous memory", strides_text());
}

void TensorView::expect_contiguous_last_dim() const {
    if (!is_contiguous_from(num_dims_ - 1)) {
        raise_value_error(name_, "a contiguous last dimension", strides_text());
    }
}

}  // namespace pdserve
