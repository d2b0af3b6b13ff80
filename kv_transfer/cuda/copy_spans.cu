// Copies many pieces of memory in one launch, where cudaMemcpyAsync would take a call for each.
//
// Compiled by NVRTC when a process first copies (cupy_driver.py). No shared memory and no barriers:
// each thread is independent, so tests also run this file on a CPU, thread after thread.

namespace {

constexpr int kWarp = 32;
constexpr int kUnrolled = 4;  // loads in flight per thread: memory behind a link is far away

__device__ void copy_vectors(uint4* to, const uint4* from, long long count, int lane) {
    long long i = lane;
    for (; i + (kUnrolled - 1) * kWarp < count; i += kUnrolled * kWarp) {
        uint4 held[kUnrolled];
#pragma unroll
        for (int k = 0; k < kUnrolled; ++k) held[k] = from[i + k * kWarp];
#pragma unroll
        for (int k = 0; k < kUnrolled; ++k) to[i + k * kWarp] = held[k];
    }
    for (; i < count; i += kWarp) to[i] = from[i];
}

__device__ void copy_bytes(unsigned char* to, const unsigned char* from, long long count, int lane) {
    for (long long i = lane; i < count; i += kWarp) to[i] = from[i];
}

}  // namespace

// pieces: [num_pieces][3] (source offset, destination offset, nbytes), checked by the caller.
// A warp takes a piece at a time; blockDim.x is a multiple of 32.
extern "C" __global__ void copy_spans(unsigned char* destination, const unsigned char* source,
                                      const long long* pieces, int num_pieces) {
    const int lane = threadIdx.x % kWarp;
    const int warps_per_block = blockDim.x / kWarp;
    const int num_warps = gridDim.x * warps_per_block;
    for (int p = blockIdx.x * warps_per_block + threadIdx.x / kWarp; p < num_pieces; p += num_warps) {
        const unsigned char* from = source + pieces[3 * p];
        unsigned char* to = destination + pieces[3 * p + 1];
        const long long nbytes = pieces[3 * p + 2];
        const unsigned long long misaligned =
            (reinterpret_cast<unsigned long long>(from) | reinterpret_cast<unsigned long long>(to)) %
            sizeof(uint4);
        // KV rows are multiples of 16 bytes in every usual layout; the rest is for correctness.
        const long long vectors = misaligned ? 0 : nbytes / sizeof(uint4);
        const long long done = vectors * sizeof(uint4);
        copy_vectors(reinterpret_cast<uint4*>(to), reinterpret_cast<const uint4*>(from), vectors, lane);
        copy_bytes(to + done, from + done, nbytes - done, lane);
    }
}
