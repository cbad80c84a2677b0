// SPDX-License-Identifier: Apache-2.0
//
// A persistent multi-CTA radix top-k, written for dsv4-repro from a description of the algorithm (README and docs name the public
// issues). It has the interface of the kernel that hangs in vLLM #51593: the same 56 bytes of parameters, the same 3088-byte row
// state, the same thresholds, the same six barriers a long row, the same early exit of peers. Each defect of the family and each
// repair is a compile-time switch, so that a hang and its control differ in one line of source.
//
// What it computes: for every row of logits [num_rows, stride] the positions of its TopK largest values among the first `length`,
// int32 [num_rows, TopK], in no particular order; a row shorter than TopK gives 0 .. length-1 and then -1.
// Order of values: by the IEEE bits, so -0.0 < +0.0 (equal to a reader who compares values), -inf lowest, +inf above all finite
// numbers, and every NaN, whatever its sign and payload, above +inf. Of several equal values at the edge any may be chosen.
//
// No CUDA header is included: NVRTC's wheel brings none, and everything used here is built into the compiler.
//
// Switches (-D):
//   none                       the guard: the length is kept signed until it is known not to be negative, then bounded by
//                              min(stride, max_seq_len), so that leader and peers cannot disagree
//   DSV4_UNGUARDED_LENGTH      the defect of vLLM #51593: the int32 length is read into a uint32, -1 becomes 4294967295
//   DSV4_GUARD_AFTER_CAST      a guard that comes too late: max(., 0) on the uint32 (the compiler drops it; it hangs as well)
//   DSV4_GUARD_MIN_ONLY        min(., min(stride, max_seq_len)) on the uint32: no hang, but -1 selects from a whole row of nothing
//   DSV4_GUARD_STRIDE_ONLY     bounded by the stride alone: leader and peers can disagree where stride > 32768 >= max_seq_len
//   DSV4_GUARD_MAX_SEQ_ONLY    bounded by max_seq_len alone: they agree, but a row can be read past its end
//   DSV4_GUARD_ONE_PATH        guards the single-CTA paths; the way into the multi-CTA path is decided on the raw length
//   DSV4_BOUNDED_SPIN          a wait gives up after DSV4_SPIN_LIMIT polls, names itself in the row state, and the CTA leaves
//   DSV4_INIT_RACE             the leader zeroes the row state inside the kernel (vLLM #41444): a peer's arrival can be lost
//   DSV4_RESET_RACE            the leader zeroes the counter at the end (FlashInfer #3610): a peer may still poll its last wait
//   DSV4_MISSING_FENCE         nothing orders a CTA's histogram before its arrival (aiter #4841)
//   DSV4_EARLY_ARRIVAL         thread 0 arrives before its CTA has converged (FlashInfer #4131)
//   DSV4_EARLY_EXIT            a row stops its rounds once a bin is taken whole; healthy alone, and what turns the two switches
//                              above (which imply it) from a wrong result into a hang: members leave at different phases
//   DSV4_RING_MISALIGNED       the histogram ring counts all rows of the group, not the long ones (vLLM #49139): wrong result
//   DSV4_WIDEN_US=N            the racing side of the chosen race waits N microseconds at the critical place

typedef unsigned int u32;
typedef int i32;
typedef unsigned long long u64;

#if defined(DSV4_MISSING_FENCE) || defined(DSV4_EARLY_ARRIVAL)
#define DSV4_EARLY_EXIT 1
#endif
#ifndef DSV4_SPIN_LIMIT
#define DSV4_SPIN_LIMIT 2097152u  // about 1.5 s at the 0.7 us that a poll of L2 takes
#endif

namespace dsv4_repro {
namespace persistent {

inline constexpr u32 kThreads = 1024;
inline constexpr u32 kBins = 256;
inline constexpr u32 kRadixThreshold = 32768;    // longer rows are shared by the CTAs of a group
inline constexpr u32 kShortThreshold = 8192;     // rows up to this length are kept in one CTA's shared memory
inline constexpr u32 kBarriersPerRow = 6;        // one at the start, four rounds, one before ties are collected
inline constexpr u32 kRounds = 4;
inline constexpr u32 kArrivalOffset = 3080;

// One a group, in global memory, zeroed by the host before every launch.
struct RadixRowState {
    u32 histogram[3][kBins];
    u32 remaining_k;
    u32 prefix;
    i32 arrival_counter;
    i32 output_counter;
};
static_assert(sizeof(RadixRowState) == 3088, "row state ABI");

struct PersistentTopKParams {
    const float* input;
    i32* output;
    const i32* lengths;
    RadixRowState* row_states;
    u32 num_rows;
    u32 stride;
    u32 top_k;
    u32 chunk_size;
    u32 ctas_per_group;
    u32 max_seq_len;
};
static_assert(sizeof(PersistentTopKParams) == 56, "parameter ABI");

// The fixed part of dynamic shared memory; the keys of this CTA follow it.
struct Scratch {
    u32 histogram[kBins];  // this CTA's counts
    u32 merged[kBins];     // the group's counts
    u32 bin;               // the bin in which the last wanted element falls
    u32 left;              // how many of that bin are wanted
    u32 bin_count;         // how many it holds
    u32 next_slot[2];      // of the output: [0] for elements equal to the pivot, [1] for those above it (single-CTA paths)
    u32 gave_up;
    u32 phase;             // barriers passed and rounds done (DSV4_EARLY_EXIT)
    u32 ring;
};
static_assert(sizeof(Scratch) == 2080, "shared memory plan");

extern __shared__ __align__(16) unsigned char dynamic_shared[];

// ------------------------------------------------------------------------------------------------------------------ memory order

// ld.acquire at GPU scope: on the machine a strong load followed by an invalidation of L1.
__device__ __forceinline__ i32 load_arrivals(const RadixRowState* state) {
    i32 value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1+%2];" : "=r"(value) : "l"(state), "n"(kArrivalOffset) : "memory");
    return value;
}

__device__ __forceinline__ void add_arrival(RadixRowState* state) {
    asm volatile("red.relaxed.gpu.global.add.s32 [%0+%1], 1;" : : "l"(state), "n"(kArrivalOffset) : "memory");
}

// Past L1: another CTA wrote it.
__device__ __forceinline__ u32 load_shared_count(const u32* address) {
    u32 value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ void widen() {
#ifdef DSV4_WIDEN_US
    for (u32 i = 0; i < DSV4_WIDEN_US; ++i) __nanosleep(1000);
#endif
}

// ------------------------------------------------------------------------------------------------------------------------- barrier

// Barrier number `phase` of a group's launch: the counter is never reset, so the wait is for (phase + 1) * ctas arrivals. Thread 0
// alone arrives and polls; the other 1023 stand at the CTA barrier. False: the wait gave up (DSV4_BOUNDED_SPIN), leave the kernel.
__device__ __forceinline__ bool group_barrier(RadixRowState* state, u32 phase, u32 ctas, Scratch& scratch) {
#if !defined(DSV4_EARLY_ARRIVAL)
    __syncthreads();  // the whole CTA has written what it announces
#endif
    if (threadIdx.x == 0) {
#if !defined(DSV4_MISSING_FENCE) && !defined(DSV4_EARLY_ARRIVAL)
        __threadfence();  // what the CTA wrote is visible before its arrival is
#endif
        add_arrival(state);
        const i32 target = static_cast<i32>((phase + 1) * ctas);
#ifdef DSV4_RESET_RACE
        if (blockIdx.x % ctas != 0 && phase % kBarriersPerRow == kBarriersPerRow - 1) widen();
#endif
#ifdef DSV4_BOUNDED_SPIN
        u32 polls = 0;
        i32 seen;
        do {
            seen = load_arrivals(state);
        } while (seen < target && ++polls < DSV4_SPIN_LIMIT);
        scratch.gave_up = seen < target;
        if (seen < target) {
            // The wait names itself where every capture looks: in the row state, as a word that no count can be. The low 12 bits are
            // the barrier's phase. The counter itself stays as it was found.
            volatile RadixRowState* record = state;
            record->remaining_k = blockIdx.x;
            record->prefix = static_cast<u32>(target);
            record->output_counter = static_cast<i32>(0xB0DED000u | (phase & 0xfffu));
            __threadfence();
        }
#else
        while (load_arrivals(state) < target) {
        }
#endif
    }
    __syncthreads();
#ifdef DSV4_BOUNDED_SPIN
    return scratch.gave_up == 0;
#else
    return true;
#endif
}

// ---------------------------------------------------------------------------------------------------------------------------- keys

// A float's bits as an unsigned number with the same order (see the head of this file for zeros and NaN).
__device__ __forceinline__ u32 ordered_key(u32 bits) {
    const u32 key = bits ^ ((bits >> 31) ? 0xffffffffu : 0x80000000u);
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0xffffffffu : key;
}

template <unsigned Vec>
struct Words;
template <>
struct Words<1> {
    u32 v[1];
};
template <>
struct __align__(8) Words<2> {
    u32 v[2];
};
template <>
struct __align__(16) Words<4> {
    u32 v[4];
};

// Calls visit(position, key) for every position in [begin, end) of a row in global memory, Vec values a load. The caller makes
// sure that begin is a multiple of Vec and that the row is aligned to Vec values. Nothing beyond `end` is read.
template <unsigned Vec, class Visit>
__device__ __forceinline__ void visit_global(const float* row, u32 begin, u32 end, Visit visit) {
    const u32* words = reinterpret_cast<const u32*>(row);
    const u32 whole = begin < end ? begin + (end - begin) / Vec * Vec : begin;
#pragma unroll 1
    for (u32 i = begin + threadIdx.x * Vec; i < whole; i += kThreads * Vec) {
        const Words<Vec> loaded = *reinterpret_cast<const Words<Vec>*>(words + i);
#pragma unroll
        for (u32 j = 0; j < Vec; ++j) visit(i + j, ordered_key(loaded.v[j]));
    }
    if (Vec > 1) {
        const u32 i = whole + threadIdx.x;
        if (i < end) visit(i, ordered_key(words[i]));
    }
}

// The same for keys that this CTA holds in shared memory; positions count from 0.
template <class Visit>
__device__ __forceinline__ void visit_shared(const u32* keys, u32 count, Visit visit) {
#pragma unroll 1
    for (u32 i = threadIdx.x; i < count; i += kThreads) visit(i, keys[i]);
}

template <unsigned Vec>
struct RowInGlobal {
    const float* row;
    u32 length;
    template <class Visit>
    __device__ __forceinline__ void operator()(Visit visit) const {
        visit_global<Vec>(row, 0, length, visit);
    }
};

struct RowInShared {
    const u32* keys;
    u32 length;
    template <class Visit>
    __device__ __forceinline__ void operator()(Visit visit) const {
        visit_shared(keys, length, visit);
    }
};

// --------------------------------------------------------------------------------------------------------------------- radix round

// Warp 0: the bin in which the `wanted`-th largest candidate falls, and how many of that bin are wanted, into scratch. `counts`
// (shared) are the candidates by bin. With fewer candidates than wanted (only a wrong length can do that): bin 0.
__device__ __forceinline__ void find_bin(Scratch& scratch, const u32* counts, u32 wanted) {
    const u32 lane = threadIdx.x;
    u32 mine = 0;
#pragma unroll
    for (u32 j = 0; j < 8; ++j) mine += counts[lane * 8 + j];
    u32 above = mine;  // inclusive suffix sum over lanes
#pragma unroll
    for (u32 distance = 1; distance < 32; distance *= 2) {
        const u32 other = __shfl_down_sync(0xffffffffu, above, distance);
        if (lane + distance < 32) above += other;
    }
    above -= mine;
    if (lane == 0) {
        scratch.bin = 0;
        scratch.left = wanted;
        scratch.bin_count = 0;
    }
    __syncwarp();
#pragma unroll
    for (u32 j = 8; j-- > 0;) {
        const u32 count = counts[lane * 8 + j];
        if (above < wanted && wanted <= above + count) {
            scratch.bin = lane * 8 + j;
            scratch.left = wanted - above;
            scratch.bin_count = count;
        }
        above += count;
    }
}

__device__ __forceinline__ void clear_histogram(Scratch& scratch) {
    if (threadIdx.x < kBins) scratch.histogram[threadIdx.x] = 0;
    __syncthreads();
}

// ---------------------------------------------------------------------------------------------------------------- single-CTA paths

// Exact for any data: four rounds over all keys, then one pass that writes. Slots [0, above) go to keys above the pivot, the rest
// to keys equal to it.
template <int TopK, class Row>
__device__ __forceinline__ void select_alone(Row row, i32* output, Scratch& scratch) {
    u32 pattern = 0;  // the bits of the pivot found so far, in place
    u32 mask = 0;
    u32 wanted = TopK;
#pragma unroll 1
    for (u32 shift = 24; mask != 0xffffffffu; shift -= 8) {
        clear_histogram(scratch);
        row([&](u32, u32 key) {
            if ((key & mask) == pattern) atomicAdd(&scratch.histogram[(key >> shift) & 255u], 1u);
        });
        __syncthreads();
        if (threadIdx.x < 32) find_bin(scratch, scratch.histogram, wanted);
        __syncthreads();
        pattern |= scratch.bin << shift;
        mask |= 255u << shift;
        wanted = scratch.left;
    }
    if (threadIdx.x == 0) {
        scratch.next_slot[0] = TopK - wanted;
        scratch.next_slot[1] = 0;
    }
    __syncthreads();
    row([&](u32 position, u32 key) {
        if (key < pattern) return;
        const u32 slot = atomicAdd(&scratch.next_slot[key > pattern], 1u);
        if (slot < TopK) output[slot] = static_cast<i32>(position);
    });
}

template <int TopK>
__device__ __forceinline__ void take_all(u32 length, i32* output) {
    for (u32 i = threadIdx.x; i < TopK; i += kThreads) output[i] = i < length ? static_cast<i32>(i) : -1;
}

// ------------------------------------------------------------------------------------------------------------------ multi-CTA path

// A long row, by all CTAs of a group: CTA c holds the keys of positions [c * chunk, (c + 1) * chunk) in shared memory. Each round
// adds the local histograms into the group's, passes a barrier, and every CTA finds the same bin by itself. The group's histogram
// is a ring of three: round g counts in g % 3 while the leader clears (g + 1) % 3, which was last read before barrier g - 1.
// `long_rows` and `all_rows` count the rows that this group has done before. False: a wait gave up.
template <int TopK, unsigned Vec>
__device__ __forceinline__ bool select_together(const PersistentTopKParams& p, RadixRowState* state, u32 row, u32 length, u32 cta,
                                                u32 long_rows, u32 all_rows, Scratch& scratch, u32* keys) {
    const u32 begin = cta * p.chunk_size;
    const u32 end = min(begin + p.chunk_size, length);
    const u32 count = begin < end ? end - begin : 0;
    i32* output = p.output + static_cast<u64>(row) * TopK;
    const bool leader = cta == 0;

    visit_global<Vec>(p.input + static_cast<u64>(row) * p.stride, begin, end,
                      [&](u32 position, u32 key) { keys[position - begin] = key; });

#if defined(DSV4_EARLY_EXIT)
    u32 phase = scratch.phase;  // rows do not take a fixed number of barriers here
    u32 ring = scratch.ring;
#elif defined(DSV4_RING_MISALIGNED)
    u32 phase = long_rows * kBarriersPerRow;
    u32 ring = all_rows * kRounds;
#else
    u32 phase = long_rows * kBarriersPerRow;
    u32 ring = long_rows * kRounds;
#endif
    (void)all_rows;

    // Everyone has finished the row before: only now may the leader touch what ties were collected with.
    if (!group_barrier(state, phase++, p.ctas_per_group, scratch)) return false;
    if (leader && threadIdx.x == 0) state->output_counter = 0;

    u32 pattern = 0;
    u32 mask = 0;
    u32 wanted = TopK;
#pragma unroll 1
    for (u32 shift = 24; mask != 0xffffffffu; shift -= 8, ++ring) {
        clear_histogram(scratch);
        visit_shared(keys, count, [&](u32, u32 key) {
            if ((key & mask) == pattern) atomicAdd(&scratch.histogram[(key >> shift) & 255u], 1u);
        });
        __syncthreads();
        u32* counts = state->histogram[ring % 3];
        if (threadIdx.x < kBins) {
            if (leader) state->histogram[(ring + 1) % 3][threadIdx.x] = 0;
#if defined(DSV4_EARLY_ARRIVAL) && defined(DSV4_WIDEN_US)
            if (threadIdx.x >= 32) widen();
#endif
            const u32 mine = scratch.histogram[threadIdx.x];
            if (mine != 0) atomicAdd(&counts[threadIdx.x], mine);
        }
        if (!group_barrier(state, phase++, p.ctas_per_group, scratch)) return false;
        if (threadIdx.x < kBins) scratch.merged[threadIdx.x] = load_shared_count(&counts[threadIdx.x]);
        __syncthreads();
        if (threadIdx.x < 32) find_bin(scratch, scratch.merged, wanted);
        __syncthreads();
        pattern |= scratch.bin << shift;
        mask |= 255u << shift;
        wanted = scratch.left;
        if (leader && threadIdx.x == 0) {  // for whoever reads the row state of a hang
            state->prefix = pattern;
            state->remaining_k = wanted;
        }
#ifdef DSV4_EARLY_EXIT
        if (scratch.bin_count == wanted) {  // the bin is taken whole: everything from its lowest key on
            pattern -= 1;
            mask = 0xffffffffu;
        }
#endif
    }

    visit_shared(keys, count, [&](u32 position, u32 key) {
        if (key <= pattern) return;
        const u32 slot = static_cast<u32>(atomicAdd(&state->output_counter, 1));
        if (slot < TopK) output[slot] = static_cast<i32>(begin + position);
    });
    if (!group_barrier(state, phase++, p.ctas_per_group, scratch)) return false;
    visit_shared(keys, count, [&](u32 position, u32 key) {
        if (key != pattern) return;
        const u32 slot = static_cast<u32>(atomicAdd(&state->output_counter, 1));
        if (slot < TopK) output[slot] = static_cast<i32>(begin + position);
    });
#ifdef DSV4_EARLY_EXIT
    __syncthreads();
    if (threadIdx.x == 0) {
        scratch.phase = phase;
        scratch.ring = ring;
    }
#endif
    return true;
}

// -------------------------------------------------------------------------------------------------------------------------- kernel

// The length that a row is treated as having, from lengths[row].
__device__ __forceinline__ u32 bounded_length(i32 raw, const PersistentTopKParams& p) {
#if defined(DSV4_UNGUARDED_LENGTH)
    (void)p;
    return static_cast<u32>(raw);
#elif defined(DSV4_GUARD_AFTER_CAST)
    (void)p;
    return max(static_cast<u32>(raw), 0u);
#elif defined(DSV4_GUARD_MIN_ONLY)
    return min(static_cast<u32>(raw), min(p.stride, p.max_seq_len));
#elif defined(DSV4_GUARD_STRIDE_ONLY)
    return min(static_cast<u32>(max(raw, 0)), p.stride);
#elif defined(DSV4_GUARD_MAX_SEQ_ONLY)
    return min(static_cast<u32>(max(raw, 0)), p.max_seq_len);
#else
    return min(static_cast<u32>(max(raw, 0)), min(p.stride, p.max_seq_len));
#endif
}

template <int TopK, unsigned Vec>
__global__ __launch_bounds__(1024, 2) void persistent_topk_kernel(PersistentTopKParams p) {
    Scratch& scratch = *reinterpret_cast<Scratch*>(dynamic_shared);
    u32* keys = reinterpret_cast<u32*>(dynamic_shared + sizeof(Scratch));

    const u32 groups = gridDim.x / p.ctas_per_group;
    const u32 group = blockIdx.x / p.ctas_per_group;
    const u32 cta = blockIdx.x - group * p.ctas_per_group;
    if (group >= groups) return;
    // No row is longer than max_seq_len, says the host: then there is nothing to do for the peers of a leader. This decision and the
    // leader's, row by row from device memory, must never differ.
    if (cta != 0 && p.max_seq_len <= kRadixThreshold) return;

    RadixRowState* state = p.row_states + group;
#ifdef DSV4_INIT_RACE
    if (cta == 0) {
        if (threadIdx.x == 0) widen();
        __syncthreads();
        u32* words = reinterpret_cast<u32*>(state);
        for (u32 i = threadIdx.x; i < sizeof(RadixRowState) / 4; i += kThreads) words[i] = 0;
    }
    __syncthreads();
#endif
#ifdef DSV4_EARLY_EXIT
    if (threadIdx.x == 0) scratch.phase = scratch.ring = 0;
    __syncthreads();
#endif

    u32 long_rows = 0;
    u32 all_rows = 0;
#pragma unroll 1
    for (u32 row = group; row < p.num_rows; row += groups, ++all_rows) {
        const i32 raw = p.lengths[row];
#ifdef DSV4_GUARD_ONE_PATH
        const bool together = static_cast<u32>(raw) > kRadixThreshold;
        const u32 length = together ? static_cast<u32>(raw) : bounded_length(raw, p);
#else
        const u32 length = bounded_length(raw, p);
        const bool together = length > kRadixThreshold;
#endif
        if (together) {
            if (!select_together<TopK, Vec>(p, state, row, length, cta, long_rows, all_rows, scratch, keys)) return;
            ++long_rows;
        } else if (cta == 0) {
            const float* values = p.input + static_cast<u64>(row) * p.stride;
            i32* output = p.output + static_cast<u64>(row) * TopK;
            if (length <= TopK) {
                take_all<TopK>(length, output);
            } else if (length <= kShortThreshold) {
                visit_global<Vec>(values, 0, length, [&](u32 position, u32 key) { keys[position] = key; });
                select_alone<TopK>(RowInShared{keys, length}, output, scratch);
            } else {
                select_alone<TopK>(RowInGlobal<Vec>{values, length}, output, scratch);
            }
        }
        __syncthreads();  // the next row reuses shared memory
    }
#ifdef DSV4_RESET_RACE
    if (cta == 0 && threadIdx.x == 0 && long_rows != 0) *const_cast<volatile i32*>(&state->arrival_counter) = 0;
#endif
}

}  // namespace persistent
}  // namespace dsv4_repro
