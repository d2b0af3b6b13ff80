// See Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011).

#include "philox.h"

namespace pdserve::sampling {

double uniform(uint64_t key, uint64_t counter) {
    uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
    uint32_t c0 = static_cast<uint32_t>(counter), c1 = static_cast<uint32_t>(counter >> 32);
    uint32_t c2 = 0, c3 = 0;
    for (int round = 0; round < 10; ++round) {
        const uint64_t product0 = uint64_t{0xD2511F53} * c0;
        const uint64_t product1 = uint64_t{0xCD9E8D57} * c2;
        c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ k0;
        c1 = static_cast<uint32_t>(product1);
        c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ k1;
        c3 = static_cast<uint32_t>(product0);
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
    const uint64_t bits = (uint64_t{c0} << 32 | c1) >> 12;
    return static_cast<double>(bits) * 0x1p-52;
}

}  // namespace pdserve::sampling
