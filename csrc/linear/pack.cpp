// Packing happens once per checkpoint: plain loops, which reach memory bandwidth on a few cores.

#include "pack.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "../isa/fp8.h"
#include "../isa/simd.h"
#include "../threads/thread_pool.h"
#include "panel_rows.h"

namespace pdserve::linear {

namespace {

void copy(BFloat16& target, BFloat16 value) { target = value; }
void copy(BFloat16& target, float value) { assign(target, value); }

// Writes the rows of one panel, lane by lane within each unit.
template <class T>
class PackPanel {
public:
    PackPanel(const PackSource& source, const PackTarget& target, int64_t first_row,
        const PanelRows& rows)
        : target_(target),
          rows_(rows),
          layout_(layout_of(target.type, target.num_out, target.num_in, target.is_gated)),
          panel_(target.weights + rows.panel * layout_.panel_bytes),
          end_lane_(rows.end_lane()) {
        for (int i = 0; i < rows.count; ++i) {
            sources_[i] = static_cast<const T*>(source.rows)
                + (rows.row - first_row + i) * source.stride;
        }
    }

    // Whether all values are finite, if that matters.
    bool run() {
        switch (target_.type) {
            case WeightType::kFloat32:
                pack<float, 1>([](float& packed, T value, int) { packed = to_float(value); });
                return true;
            case WeightType::kBFloat16:
                pack<BFloat16, 2>([](BFloat16& packed, T value, int) { copy(packed, value); });
                return true;
            case WeightType::kInt8:
                return quantise(127.0f, [](float ratio) {
                    // Adding 1.5 * 2**23 rounds to an integer, ties to even.
                    return static_cast<int>((ratio + 12582912.0f) - 12582912.0f) + kInt8Zero;
                });
            case WeightType::kFp8:
                return quantise(kLargestFp8, fp8_code_of);
            case WeightType::kCoded: break;  // by pack_codes
        }
        return false;
    }

private:
    // kInputs inputs of an output are together in a unit.
    template <class Packed, int kInputs, class Convert>
    void pack(const Convert& convert) {
        constexpr int64_t kGroupBytes = kPanelOutputs * kInputs * sizeof(Packed);
        const int64_t num_groups = layout_.panel_bytes / kGroupBytes;
        const int64_t num_whole = target_.num_in / kInputs;
        const int end = rows_.lane + rows_.count;
        for (int64_t group = 0; group < num_groups; ++group) {
            auto* lanes = reinterpret_cast<Packed*>(panel_ + group * kGroupBytes);
            const int64_t k = group * kInputs;
            if (group < num_whole && rows_.count == kPanelOutputs) {
                // The usual case, without conditions in the loop.
                for (int i = 0; i < kPanelOutputs; ++i) {
                    for (int j = 0; j < kInputs; ++j) {
                        convert(lanes[i * kInputs + j], sources_[i][k + j], i);
                    }
                }
                continue;
            }
            for (int i = 0; i < rows_.count; ++i) {
                Packed* lane = lanes + (rows_.lane + i) * kInputs;
                for (int j = 0; j < kInputs; ++j) {
                    lane[j] = Packed{};
                    if (k + j < target_.num_in) convert(lane[j], sources_[i][k + j], i);
                }
            }
            std::memset(lanes + end * kInputs, 0, (end_lane_ - end) * kInputs * sizeof(Packed));
        }
    }

    // Rounds to codes, of which that of a row's largest magnitude stands for `largest_code`.
    template <class CodeOf>
    bool quantise(float largest_code, const CodeOf& code_of) {
        float* scales = target_.scales + rows_.panel * kPanelOutputs;
        float divisors[kPanelOutputs];
        bool is_finite = true;
        for (int i = 0; i < rows_.count; ++i) {
            // Magnitudes have the same order as their bits, with infinity and NaN at the end.
            int32_t largest_bits = 0;
            for (int64_t k = 0; k < target_.num_in; ++k) {
                const auto bits = __builtin_bit_cast(int32_t, to_float(sources_[i][k]));
                largest_bits = std::max(largest_bits, bits & 0x7fffffff);
            }
            is_finite = is_finite && largest_bits < 0x7f800000;
            const auto largest = __builtin_bit_cast(float, largest_bits);
            const float scale = largest / largest_code;
            scales[rows_.lane + i] = scale;
            divisors[i] = scale > 0.0f ? scale : 1.0f;
        }
        for (int lane = rows_.lane + rows_.count; lane < end_lane_; ++lane) scales[lane] = 0.0f;
        if (!is_finite) return false;
        pack<uint8_t, 4>([&](uint8_t& packed, T value, int i) {
            // A denormal scale has lost digits, and could lead to larger values.
            const float ratio = to_float(value) / divisors[i];
            packed = static_cast<uint8_t>(
                code_of(std::clamp(ratio, -largest_code, largest_code)));
        });
        return true;
    }

    const PackTarget& target_;
    const PanelRows& rows_;
    const Layout layout_;
    uint8_t* const panel_;
    const int end_lane_;
    const T* sources_[kPanelOutputs];
};

}  // namespace

int64_t pack_rows(const PackSource& source, const PackTarget& target, int64_t first_row) {
    const Runs runs(target.num_out, target.is_gated, first_row, first_row + source.num_rows);
    std::atomic<int64_t> bad_row{-1};
    ThreadPool::instance().parallel_for(runs.count(), [&](int64_t i) {
        const PanelRows rows = runs.at(i);
        const bool is_finite = source.is_bfloat16
            ? PackPanel<BFloat16>(source, target, first_row, rows).run()
            : PackPanel<float>(source, target, first_row, rows).run();
        if (!is_finite) bad_row = rows.row;
    });
    return bad_row;
}

}  // namespace pdserve::linear
