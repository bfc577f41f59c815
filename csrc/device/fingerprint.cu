// The fingerprint of base/fingerprint.c on a CUDA device. Not compiled with the package:
// `make ptx` turns it into device/fingerprint_ptx.h, which is checked in.
//
// Every block writes the sum of what it has read to partials[blockIdx.x]; the host adds them up. So
// there is no memory to clear first and no atomic operation on memory of the host.

typedef unsigned long long word64;

static constexpr word64 KEY_LOW = 0x9E3779B97F4A7C15u;
static constexpr word64 KEY_HIGH = 0xC2B2AE3D27D4EB4Fu;
static constexpr int THREADS = 512;
static constexpr int AHEAD = 4; // loads in flight a thread

struct sum128 {
    word64 low, high;
};

static __device__ __forceinline__ void add_word(sum128 &sum, ulonglong2 word, word64 low,
                                                word64 high) {
    const word64 a = word.x ^ low ^ (low >> 32);
    const word64 b = word.y ^ high ^ (high >> 32);
    sum.low += a * b + word.y;
    sum.high += __umul64hi(a, b) + word.x;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    tp_fingerprint(const ulonglong2 *data, word64 words, sum128 *partials) {
    __shared__ sum128 of_warp[THREADS / 32];
    const word64 step = (word64)gridDim.x * THREADS;
    word64 i = (word64)blockIdx.x * THREADS + threadIdx.x;
    word64 low = (i + 1) * KEY_LOW, high = (i + 1) * KEY_HIGH;
    const word64 low_step = step * KEY_LOW, high_step = step * KEY_HIGH;
    sum128 sum = {0, 0};
    // Through the second-level cache only: the first level may hold what was there before.
    for (; i + (AHEAD - 1) * step < words; i += AHEAD * step) {
        ulonglong2 word[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++) word[k] = __ldcg(data + i + k * step);
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            add_word(sum, word[k], low, high);
            low += low_step;
            high += high_step;
        }
    }
    for (; i < words; i += step) {
        add_word(sum, __ldcg(data + i), low, high);
        low += low_step;
        high += high_step;
    }
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        sum.low += __shfl_down_sync(0xFFFFFFFFu, sum.low, lanes);
        sum.high += __shfl_down_sync(0xFFFFFFFFu, sum.high, lanes);
    }
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int k = 1; k < THREADS / 32; k++) {
        sum.low += of_warp[k].low;
        sum.high += of_warp[k].high;
    }
    partials[blockIdx.x] = sum;
}
