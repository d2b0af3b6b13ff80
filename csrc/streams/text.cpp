#include "text.h"

namespace nb = nanobind;

namespace pdserve {

void PieceTable::add(size_t id, std::string_view bytes, bool is_special) {
    if (id >= pieces_.size()) pieces_.resize(id + 1);
    if (pieces_[id].is_known) return;
    pieces_[id] = {static_cast<uint32_t>(bytes_.size()), static_cast<uint32_t>(bytes.size()), true,
                   is_special};
    bytes_.append(bytes);
}

const PieceTable::Piece* PieceTable::find(int32_t id) const {
    const auto at = static_cast<size_t>(id);
    return id >= 0 && at < pieces_.size() && pieces_[at].is_known ? &pieces_[at] : nullptr;
}

bool TextDecoder::gather(const std::vector<int32_t>& ids, std::string& bytes) const {
    for (const int32_t id : ids) {
        const PieceTable::Piece* piece = pieces_->find(id);
        if (piece == nullptr || (piece->is_special && keeps_some_)) return false;
        if (!(piece->is_special && skips_special_)) bytes.append(pieces_->bytes(*piece));
    }
    return true;
}

nb::str TextDecoder::decode(std::string_view bytes) {
    rest_.append(bytes);
    Py_ssize_t num_used = 0;
    PyObject* text = PyUnicode_DecodeUTF8Stateful(
        rest_.data(), static_cast<Py_ssize_t>(rest_.size()), "replace", &num_used);
    if (text == nullptr) throw nb::python_error();
    rest_.erase(0, static_cast<size_t>(num_used));
    return nb::steal<nb::str>(text);
}

nb::str TextDecoder::finish() {
    PyObject* text =
        PyUnicode_DecodeUTF8(rest_.data(), static_cast<Py_ssize_t>(rest_.size()), "replace");
    if (text == nullptr) throw nb::python_error();
    rest_.clear();
    return nb::steal<nb::str>(text);
}

}  // namespace pdserve
