/* The wrapper door: an allocator around PyTorch's native CUDA allocator.
 *
 * Large blocks of devices that are enabled come from the device's core; everything else, and
 * every question that we have no own answer to, goes to the native allocator. setup.py reads
 * the headers that are built against and defines TP_TORCH_HAS_<NAME> for the virtual
 * functions that not every supported torch has; it refuses headers with a virtual function
 * that is unknown here.
 *
 * All pointers handed out carry one deleter, which finds the owner by address. */
#include "bind/torch_glue.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <pybind11/gil.h>

#include <atomic>
#include <cmath>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "bind/torch_entry.h"
#include "bind/torch_history.h"

namespace torchpager {
namespace {

namespace cca = c10::cuda::CUDACachingAllocator;
using c10::CachingAllocator::StatArray;
using c10::CachingAllocator::StatType;

constexpr int kDevices = TP_SLOT_SIM;

/* The native allocator takes memory from the driver in segments of these sizes. */
constexpr size_t kSmallSegment = 2 * TP_MIB;
constexpr size_t kLargeSegment = 20 * TP_MIB;
constexpr size_t kOwnSegmentFrom = 10 * TP_MIB;
constexpr size_t kSmallRequest = 1 * TP_MIB;

/* What the door reads for each request, in one cache line. */
struct alignas(64) Hot {
    std::atomic<cca::CUDAAllocator *> allocator{nullptr}; /* the native one */
    std::atomic<c10::DeleterFnPtr> deleter{nullptr};      /* its own */
    /* No device serves less from our side: most requests end at this one look, for to ask CUDA for
     * the device and the stream costs as much as all the rest of what the door does for them. */
    std::atomic<size_t> least_served{SIZE_MAX};
};
Hot hot;

cca::CUDAAllocator *native() { return hot.allocator.load(std::memory_order_acquire); }

History &history() {
    static auto *instance = new History; /* blocks are freed until the process ends */
    return *instance;
}

void write_down_free(tp_core *core, const void *ptr) noexcept {
    try {
        tp_block_info info;
        if (!tp_block_query(core, addr_of(ptr), &info)) return;
        int slot = 0;
        while (slot < TP_SLOT_MAX && tp_core_at(slot) != core) slot++;
        history().freed(slot, ptr, info.bytes, info.stream, native()->getUserMetadata());
    } catch (...) {
        /* Out of host memory, or Python is gone: an entry less. */
    }
}

void our_free(tp_core *core, void *ptr) {
    if (C10_UNLIKELY(history().enabled())) write_down_free(core, ptr);
    tp_bind_free(core, addr_of(ptr));
}

[[gnu::hot]] void door_delete(void *ptr) {
    tp_core *core =
        C10_UNLIKELY(tp_glance_may_own(addr_of(ptr))) ? tp_core_owning(addr_of(ptr)) : nullptr;
    if (core != nullptr) {
        our_free(core, ptr);
    } else {
        hot.deleter.load(std::memory_order_relaxed)(ptr);
    }
}

void own_deleter(c10::DataPtr &data) {
    (void)data.compare_exchange_deleter(hot.deleter.load(std::memory_order_relaxed),
                                        &door_delete);
}

/* ---- what is known of a device ----------------------------------------------------------- */

struct DeviceState {
    std::atomic<bool> enabled{false};
    std::atomic<size_t> large_min{2 * TP_MIB};
    std::atomic<uint64_t> bytes_ever{0}; /* requested from our side since the process began */

    std::mutex
        mutex; /* protects what follows; no other lock is taken under it but native ones */
    bool shared = false;
    size_t total_bytes = 0;     /* as the native allocator reads it; 0: not asked yet */
    double user_fraction = 1.0; /* what the user set, apart from our cap */
    size_t cap_bytes = TP_NO_LIMIT;
    uint64_t base_allocs = 0, base_frees = 0, base_bytes_in = 0, base_bytes_out = 0;
};

DeviceState &state_of(int device) {
    static auto *states = new DeviceState[kDevices]; /* used until the process ends */
    return states[device];
}

bool known_device(int device) { return device >= 0 && device < kDevices; }

void set_served(int device, bool on, size_t large_min) {
    state_of(device).large_min.store(large_min);
    state_of(device).enabled.store(on);
    size_t least = SIZE_MAX;
    for (int each = 0; each < kDevices; each++) {
        const DeviceState &state = state_of(each);
        if (state.enabled.load()) least = tp_min_size(least, state.large_min.load());
    }
    hot.least_served.store(least);
}

tp_core *core_of(int device) { return known_device(device) ? tp_core_at(device) : nullptr; }

/* ---- the native allocator's share of the budget ------------------------------------------ */

size_t native_reserved_bytes(int device) {
    const auto stats = native()->getDeviceStats(static_cast<c10::DeviceIndex>(device));
    const auto &total = stats.reserved_bytes[static_cast<size_t>(StatType::AGGREGATE)];
    return static_cast<size_t>(total.current);
}

/* The bytes that the native allocator makes of a fraction. */
size_t allowed_by(double fraction, size_t total) {
    return static_cast<size_t>(fraction * static_cast<double>(total));
}

/* A fraction that is nearly `bytes`, raised until it allows them: a byte less would refuse the
 * last segment. */
double raised_to(size_t bytes, double fraction, size_t total) {
    while (allowed_by(fraction, total) < bytes) fraction = std::nextafter(fraction, 2.0);
    return fraction;
}

/* The largest fraction that allows no more than `bytes`. */
double fraction_for(size_t bytes, size_t total) {
    if (bytes >= total) return 1.0;
    double fraction =
        raised_to(bytes, static_cast<double>(bytes) / static_cast<double>(total), total);
    while (fraction > 0.0 && allowed_by(fraction, total) > bytes) {
        fraction = std::nextafter(fraction, 0.0);
    }
    return fraction;
}

/* The native allocator keeps a fraction as bytes, rounded down, and answers bytes / total: setting
 * what it answered can lose a byte each time. This fraction gives the same bytes again. */
double same_bytes_again(double fraction, size_t total) {
    const double exact = fraction * static_cast<double>(total);
    const double bytes = std::round(exact);
    if (std::abs(exact - bytes) > 0.01) return fraction; /* it was no number of bytes */
    return std::min(raised_to(static_cast<size_t>(bytes), fraction, total), 1.0);
}

size_t total_locked(DeviceState &state, int device) {
    if (state.total_bytes == 0) {
        state.total_bytes =
            native()->getMemoryInfo(static_cast<c10::DeviceIndex>(device)).second;
    }
    return state.total_bytes;
}

/* Sets the smaller of the user's fraction and our cap. Needs state.mutex. */
void apply_fraction_locked(DeviceState &state, int device) {
    const auto index = static_cast<c10::DeviceIndex>(device);
    const size_t total = total_locked(state, device);
    double fraction = state.user_fraction;
    if (state.shared && state.cap_bytes != TP_NO_LIMIT) {
        fraction = std::min(fraction, fraction_for(state.cap_bytes, total));
    }
    native()->setMemoryFraction(fraction, index);
}

/* The bound that the native allocator's fraction stands for now. Needs state.mutex. */
size_t bound_locked(DeviceState &state, int device) {
    const double fraction = native()->getMemoryFraction(static_cast<c10::DeviceIndex>(device));
    return static_cast<size_t>(std::llround(fraction * static_cast<double>(state.total_bytes)));
}

size_t foreign_cap(int slot, size_t cap_bytes) {
    DeviceState &state = state_of(slot);
    try {
        const c10::cuda::CUDAStreamCaptureModeGuard during_captures(
            cudaStreamCaptureModeRelaxed);
        const std::lock_guard<std::mutex> guard(state.mutex);
        state.cap_bytes = cap_bytes;
        apply_fraction_locked(state, slot);
        return tp_max_size(bound_locked(state, slot), native_reserved_bytes(slot));
    } catch (...) {
        /* The driver answers no more: believe the worst. */
        return TP_NO_LIMIT;
    }
}

size_t foreign_held(int slot) {
    try {
        return native_reserved_bytes(slot);
    } catch (...) {
        return 0;
    }
}

void foreign_flush(int slot) {
    (void)slot; /* the native call flushes every device */
    try {
        const c10::cuda::CUDAStreamCaptureModeGuard during_captures(
            cudaStreamCaptureModeRelaxed);
        native()->emptyCache();
    } catch (...) {
        /* Nothing was given back; the caller reads what is held again. */
    }
}

const tp_bind_foreign foreign_part = {foreign_cap, foreign_held, foreign_flush};

bool is_shared(int device) {
    DeviceState &state = state_of(device);
    const std::lock_guard<std::mutex> guard(state.mutex);
    return state.shared;
}

/* What the native allocator will ask the driver for to serve a request. */
size_t segment_bytes(size_t bytes) {
    if (bytes <= kSmallRequest) return kSmallSegment;
    if (bytes < kOwnSegmentFrom) return kLargeSegment;
    return tp_round_up(bytes, kSmallSegment);
}

/* Lets the native allocator grow by a request it could not serve. False: no room. */
bool make_room(tp_core *core, size_t bytes, tp_error *error) {
    size_t granted = 0; /* the core has told the native allocator already */
    const size_t needed = segment_bytes(bytes);
    /* A little more if it can be had: a fraction of what the native allocator takes for the
     * device's total stands for a number of bytes only roughly. */
    tp_error refused{};
    if (tp_core_yield_to_foreign(core, needed + kSmallSegment, &granted, &refused) == TP_OK) {
        return true;
    }
    return tp_core_yield_to_foreign(core, needed, &granted, error) == TP_OK;
}

[[noreturn]] void throw_native_oom(tp_core *core, int device, size_t bytes,
                                   const tp_error &error) {
    tp_oom oom{};
    tp_core_oom_figures(core, bytes, &oom);
    oom.foreign_bytes = foreign_held(device);
    tp_error known = error;
    known.status = TP_OUT_OF_MEMORY;
    throw_alloc_error(device, oom, known);
}

/* Whether there is a budget in which to make room for the native allocator. */
bool can_make_room() {
    const int device = c10::cuda::current_device();
    return core_of(device) != nullptr && is_shared(device);
}

/* Calls the native allocator for the current device; when it is out of memory, makes room in the
 * shared budget first without, then with its cache flushed, and tries again. `tried`: it has been
 * called in vain already. Nothing: there is no room, and *error says why. */
template <class Call>
auto native_with_room(size_t bytes, bool tried, std::optional<tp_error> *error, Call call)
    -> std::optional<decltype(call())> {
    for (int attempt = tried ? 1 : 0;; attempt++) {
        if (attempt > 0) {
            /* Outside the handler: making room may wait. */
            const int device = c10::cuda::current_device();
            if (attempt == 2) foreign_flush(device);
            (void)make_room(core_of(device), bytes, &error->emplace());
        }
        try {
            return call();
        } catch (const c10::OutOfMemoryError &) {
            if (!can_make_room()) throw;
        }
        if (attempt == 2) return std::nullopt;
    }
}

/* ---- captures and private pools ---------------------------------------------------------- */

using StreamFilter = std::function<bool(cudaStream_t)>;

struct PoolUse {
    int device;
    c10::MempoolId_t id;
    bool capture; /* the cores have been told of a capture when it began */
    StreamFilter filter;
};

std::mutex pools_mutex; /* protects what follows */
std::vector<PoolUse> pools_in_use;
std::vector<std::vector<tp_core *>> captures; /* the cores told of each capture that is open */
std::atomic<uint32_t> pool_count{0};

bool in_private_pool(int device, cudaStream_t stream) {
    if (pool_count.load(std::memory_order_acquire) == 0) return false;
    const std::lock_guard<std::mutex> guard(pools_mutex);
    for (const PoolUse &use : pools_in_use) {
        if (use.device == device && use.filter(stream)) return true;
    }
    return false;
}

void pool_begin(int device, c10::MempoolId_t id, bool capture, StreamFilter filter) {
    const std::lock_guard<std::mutex> guard(pools_mutex);
    pools_in_use.push_back({device, id, capture, std::move(filter)});
    pool_count.fetch_add(1, std::memory_order_release);
}

/* Whether it was a capture. */
bool pool_end(int device, c10::MempoolId_t id) {
    const std::lock_guard<std::mutex> guard(pools_mutex);
    for (size_t i = pools_in_use.size(); i-- > 0;) {
        if (pools_in_use[i].device != device || pools_in_use[i].id != id) continue;
        const bool capture = pools_in_use[i].capture;
        pools_in_use.erase(pools_in_use.begin() + static_cast<std::ptrdiff_t>(i));
        pool_count.fetch_sub(1, std::memory_order_release);
        return capture;
    }
    return false;
}

/* A torch without markCaptureBegin does not tell captures from other uses of a pool. A capture's
 * filter takes the streams that are part of it, so none of ours; the others take a thread's. */
[[maybe_unused]] bool is_capture(int device, const StreamFilter &filter) {
    tp_core *core = core_of(device);
    if (core == nullptr) return true;
    try {
        return !filter(static_cast<cudaStream_t>(tp_core_device(core)->check_stream));
    } catch (...) {
        return true;
    }
}

/* During a capture nothing can be evicted to make room for what it allocates, all of it native: the
 * native allocator may grow by all that is free before it begins. */
void widen_for_capture(tp_core *core, int device) {
    if (!is_shared(device)) return;
    tp_stats stats;
    tp_core_stats(core, &stats);
    const size_t room =
        tp_sub_floor(stats.device_budget, stats.reserved.current + foreign_held(device));
    size_t granted = 0;
    tp_error error{};
    const tp_status widened = tp_core_yield_to_foreign(core, room, &granted, &error);
    (void)widened; /* refused, the capture has to do with what it has */
}

void capture_begin() {
    std::vector<tp_core *> told;
    for (int device = 0; device < kDevices; device++) {
        tp_core *core = tp_core_at(device);
        if (core == nullptr) continue;
        tp_bind_bring_back(core);
        widen_for_capture(core, device);
        tp_capture_begin(core);
        told.push_back(core);
    }
    const std::lock_guard<std::mutex> guard(pools_mutex);
    captures.push_back(std::move(told));
}

void capture_end() {
    std::vector<tp_core *> told;
    {
        const std::lock_guard<std::mutex> guard(pools_mutex);
        if (captures.empty()) return;
        told = std::move(captures.back());
        captures.pop_back();
    }
    for (tp_core *core : told) tp_capture_end(core);
}

/* ---- the allocator ----------------------------------------------------------------------- */

void write_down_alloc(tp_core *core, int device, const void *ptr,
                      cudaStream_t stream) noexcept {
    try {
        tp_block_info info;
        if (!tp_block_query(core, addr_of(ptr), &info)) return;
        history().allocated(device, ptr, info.bytes, stream, native()->getUserMetadata());
    } catch (...) {
        /* Out of host memory: an entry less. */
    }
}

/* Whom PyTorch tells that an allocation failed for good, as memory snapshots want to know. */
std::mutex observers_mutex; /* protects what follows */
std::vector<cca::OutOfMemoryObserver> oom_observers;

void tell_observers(int device, size_t bytes) {
    std::vector<cca::OutOfMemoryObserver> observers;
    {
        const std::lock_guard<std::mutex> guard(observers_mutex);
        observers = oom_observers;
    }
    if (observers.empty()) return;
    const auto [free_bytes, total_bytes] =
        native()->getMemoryInfo(static_cast<c10::DeviceIndex>(device));
    for (const auto &observer : observers) observer(device, bytes, total_bytes, free_bytes);
}

void *our_alloc(tp_core *core, int device, size_t bytes, cudaStream_t stream) {
    void *ptr = nullptr;
    try {
        ptr = alloc_or_throw(core, device, bytes, static_cast<tp_stream>(stream));
    } catch (const c10::OutOfMemoryError &) {
        tell_observers(device, bytes);
        throw;
    }
    state_of(device).bytes_ever.fetch_add(bytes, std::memory_order_relaxed);
    if (C10_UNLIKELY(history().enabled())) write_down_alloc(core, device, ptr, stream);
    return ptr;
}

bool capturing_now() {
    return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

/* The core that can serve requests on this stream now, or null. */
tp_core *core_for(int device, cudaStream_t stream) {
    if (!known_device(device)) return nullptr;
    if (!state_of(device).enabled.load(std::memory_order_relaxed)) return nullptr;
    tp_core *core = tp_core_at(device);
    if (core == nullptr || in_private_pool(device, stream) || capturing_now()) return nullptr;
    return core;
}

cudaStream_t stream_now(int device) {
    return c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device)).stream();
}

bool may_serve(size_t bytes) {
    return bytes >= hot.least_served.load(std::memory_order_relaxed);
}

/* The core that serves the request, or null: the native allocator does. */
tp_core *serving_core(int device, size_t bytes, cudaStream_t stream) {
    if (!known_device(device)) return nullptr;
    if (bytes < state_of(device).large_min.load(std::memory_order_relaxed)) return nullptr;
    return core_for(device, stream);
}

/* Whom to ask for what the native allocator has no room for: it takes more from the driver than one
 * request needs, and what it has taken cannot be moved. */
tp_core *core_instead(int device, size_t bytes, cudaStream_t stream, const tp_error &error) {
    tp_core *core = core_for(device, stream);
    if (core == nullptr) throw_native_oom(core_of(device), device, bytes, error);
    return core;
}

void add_stat(StatArray &array, uint64_t current, uint64_t peak, uint64_t in, uint64_t out) {
    for (const StatType type : {StatType::AGGREGATE, StatType::LARGE_POOL}) {
        auto &stat = array[static_cast<size_t>(type)];
        stat.current += static_cast<int64_t>(current);
        /* The sum of two peaks: an upper bound on the peak of the sum. */
        stat.peak += static_cast<int64_t>(peak);
        stat.allocated += static_cast<int64_t>(in);
        stat.freed += static_cast<int64_t>(out);
    }
}

struct Totals {
    uint64_t allocs, frees, bytes_in, bytes_out;
};

Totals totals_of(const DeviceState &state, const tp_stats &stats) {
    const uint64_t bytes = state.bytes_ever.load(std::memory_order_relaxed);
    return {stats.alloc_count, stats.free_count, bytes,
            tp_sub_floor(bytes, stats.allocated.current)};
}

void add_our_stats(int device, c10::CachingDeviceAllocator::DeviceStats &out) {
    tp_core *core = core_of(device);
    if (core == nullptr) return;
    tp_stats stats;
    tp_core_stats(core, &stats);
    DeviceState &state = state_of(device);
    const std::lock_guard<std::mutex> guard(state.mutex);
    Totals totals = totals_of(state, stats);
    totals.allocs = tp_sub_floor(totals.allocs, state.base_allocs);
    totals.frees = tp_sub_floor(totals.frees, state.base_frees);
    totals.bytes_in = tp_sub_floor(totals.bytes_in, state.base_bytes_in);
    totals.bytes_out = tp_sub_floor(totals.bytes_out, state.base_bytes_out);
    for (StatArray *counts : {&out.allocation, &out.active}) {
        add_stat(*counts, stats.block_count, stats.live_peak_count, totals.allocs,
                 totals.frees);
    }
    for (StatArray *sizes : {&out.allocated_bytes, &out.requested_bytes}) {
        add_stat(*sizes, stats.allocated.current, stats.allocated.peak, totals.bytes_in,
                 totals.bytes_out);
    }
    add_stat(out.active_bytes, stats.active.current, stats.active.peak, totals.bytes_in,
             totals.bytes_out);
    add_stat(out.reserved_bytes, stats.reserved.current, stats.reserved.peak,
             stats.frame_creates.bytes, stats.frame_releases.bytes);
    out.num_ooms += static_cast<int64_t>(stats.ooms);
}

void append_segment(void *ctx, const tp_block_info *info) {
    auto *segments = static_cast<std::vector<cca::SegmentInfo> *>(ctx);
    cca::SegmentInfo segment;
    segment.address = info->addr;
    segment.total_size = info->bytes;
    segment.requested_size = info->requested_bytes;
    segment.allocated_size = info->bytes;
    segment.active_size = info->bytes;
    segment.stream = info->stream;
    segment.is_large = true;
    cca::BlockInfo block;
    block.size = info->bytes;
    block.requested_size = info->requested_bytes;
    block.allocated = true;
    block.active = true;
    block.context_when_allocated = history().context_of(info->addr);
    segment.context_when_allocated = block.context_when_allocated;
    segment.blocks.push_back(std::move(block));
    segments->push_back(std::move(segment));
}

void append_our_segments(std::vector<cca::SegmentInfo> &segments) {
    for (int device = 0; device < kDevices; device++) {
        tp_core *core = tp_core_at(device);
        if (core == nullptr) continue;
        const size_t first = segments.size();
        (void)tp_block_visit(core, append_segment, &segments);
        for (size_t i = first; i < segments.size(); i++) {
            segments[i].device = static_cast<c10::DeviceIndex>(device);
        }
    }
}

void fill_if_asked(void *ptr, size_t bytes, cudaStream_t stream) {
    const unsigned char byte = tp_bind_filler();
    if (C10_LIKELY(byte == 0) || ptr == nullptr) return;
    C10_CUDA_CHECK(cudaMemsetAsync(ptr, byte, bytes, stream));
}

void fill_if_asked(void *ptr, size_t bytes) {
    if (C10_LIKELY(!tp_glance_asks())) return;
    fill_if_asked(ptr, bytes, stream_now(c10::cuda::current_device()));
}

class CudaDoor final : public cca::CUDAAllocator {
  public:
    using Device = c10::DeviceIndex;
    using Pool = c10::MempoolId_t;
    using cca::CUDAAllocator::recordStream;

    /* c10::Allocator */
    [[gnu::hot]] c10::DataPtr allocate(size_t n) override {
        bool tried = false;
        if (C10_LIKELY(!may_serve(n) && !tp_glance_asks())) {
            try {
                c10::DataPtr data = native()->allocate(n);
                own_deleter(data);
                return data;
            } catch (const c10::OutOfMemoryError &) {
                if (!can_make_room()) throw;
                tried = true;
            }
        }
        return allocate_slowly(n, tried);
    }
    bool is_simple_data_ptr(const c10::DataPtr &data) const override {
        return data.get() == data.get_context();
    }
    c10::DeleterFnPtr raw_deleter() const override { return &door_delete; }
    void copy_data(void *dest, const void *src, std::size_t count) const override {
        native()->copy_data(dest, src, count);
    }

    /* c10::DeviceAllocator */
    bool initialized() override { return native()->initialized(); }
    void emptyCache(Pool pool = {0, 0}) override {
        native()->emptyCache(pool);
        if (pool != Pool{0, 0}) return;
        for (int device = 0; device < kDevices; device++) {
            tp_core *core = tp_core_at(device);
            if (core != nullptr) tp_core_empty_cache(core);
        }
    }
    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(Device device) override {
        auto stats = native()->getDeviceStats(device);
        add_our_stats(device, stats);
        return stats;
    }
    void resetAccumulatedStats(Device device) override {
        native()->resetAccumulatedStats(device);
        tp_core *core = core_of(device);
        if (core == nullptr) return;
        tp_stats stats;
        tp_core_stats(core, &stats);
        DeviceState &state = state_of(device);
        const std::lock_guard<std::mutex> guard(state.mutex);
        const Totals totals = totals_of(state, stats);
        state.base_allocs = totals.allocs;
        state.base_frees = totals.frees;
        state.base_bytes_in = totals.bytes_in;
        state.base_bytes_out = totals.bytes_out;
    }
    void resetPeakStats(Device device) override {
        native()->resetPeakStats(device);
        if (tp_core *core = core_of(device)) tp_core_reset_stats(core, true, false);
    }
    std::pair<size_t, size_t> getMemoryInfo(Device device) override {
        return native()->getMemoryInfo(device);
    }

    /* c10::cuda::CUDACachingAllocator::CUDAAllocator */
    void *raw_alloc(size_t nbytes) override {
        if (nbytes == 0) return nullptr;
        const Device device = c10::cuda::current_device();
        return raw_on(device, nbytes, stream_now(device),
                      [nbytes] { return native()->raw_alloc(nbytes); });
    }
    void *raw_alloc_with_stream(size_t nbytes, cudaStream_t stream) override {
        if (nbytes == 0) return nullptr;
        return raw_on(c10::cuda::current_device(), nbytes, stream, [nbytes, stream] {
            return native()->raw_alloc_with_stream(nbytes, stream);
        });
    }
    void raw_delete(void *ptr) override {
        tp_core *core = tp_core_owning(addr_of(ptr));
        if (core != nullptr) {
            our_free(core, ptr);
        } else {
            native()->raw_delete(ptr);
        }
    }
    void init(int device_count) override { native()->init(device_count); }
    double getMemoryFraction(Device device) override {
        if (!known_device(device)) return native()->getMemoryFraction(device);
        DeviceState &state = state_of(device);
        const std::lock_guard<std::mutex> guard(state.mutex);
        return state.shared ? state.user_fraction : native()->getMemoryFraction(device);
    }
    void setMemoryFraction(double fraction, Device device) override {
        if (!known_device(device) || !(fraction >= 0.0 && fraction <= 1.0)) {
            native()->setMemoryFraction(fraction, device); /* raises */
            return;
        }
        DeviceState &state = state_of(device);
        const std::lock_guard<std::mutex> guard(state.mutex);
        state.user_fraction = fraction;
        apply_fraction_locked(state, device);
    }
    std::vector<cca::StreamSegmentSize> getExpandableSegmentSizes(Device device) override {
        return native()->getExpandableSegmentSizes(device);
    }
    void enable(bool value) override { native()->enable(value); }
    bool isEnabled() const override { return native()->isEnabled(); }
    void cacheInfo(Device device, size_t *largest) override {
        native()->cacheInfo(device, largest);
    }
    void *getBaseAllocation(void *ptr, size_t *size) override {
        tp_core *core = tp_core_owning(addr_of(ptr));
        tp_block_info info;
        if (core == nullptr || !tp_block_query(core, addr_of(ptr), &info)) {
            return native()->getBaseAllocation(ptr, size);
        }
        if (size != nullptr) *size = info.bytes;
        return reinterpret_cast<void *>(info.addr);
    }
    void recordStream(const c10::DataPtr &data, c10::cuda::CUDAStream stream) override {
        tp_core *core = tp_core_owning(addr_of(data.get()));
        if (core != nullptr) {
            tp_record_stream(core, addr_of(data.get()),
                             static_cast<tp_stream>(stream.stream()));
            return;
        }
        record_native(data, stream);
    }
    cca::SnapshotInfo snapshot(Pool pool = {0, 0}, bool include_traces = true) override {
        cca::SnapshotInfo info = native()->snapshot(pool, include_traces);
        if (pool != Pool{0, 0}) return info;
        append_our_segments(info.segments);
        if (include_traces) history().merge_into(info.device_traces);
        return info;
    }
    void beginAllocateToPool(Device device, Pool pool, StreamFilter filter) override {
        native()->beginAllocateToPool(device, pool, filter);
#ifdef TP_TORCH_HAS_markCaptureBegin
        const bool capture = false; /* it says so itself */
#else
        const bool capture = is_capture(device, filter);
#endif
        if (capture) capture_begin();
        pool_begin(device, pool, capture, std::move(filter));
    }
    void endAllocateToPool(Device device, Pool pool) override {
        native()->endAllocateToPool(device, pool);
        if (pool_end(device, pool)) capture_end();
    }
#ifdef TP_TORCH_HAS_markCaptureBegin
    void markCaptureBegin(Device device) override {
        native()->markCaptureBegin(device);
        capture_begin();
    }
#endif
#ifdef TP_TORCH_HAS_markCaptureEnd
    void markCaptureEnd(Device device) override {
        native()->markCaptureEnd(device);
        capture_end();
    }
#endif
    void releasePool(Device device, Pool pool) override { native()->releasePool(device, pool); }
    int getPoolUseCount(Device device, Pool pool) override {
        return native()->getPoolUseCount(device, pool);
    }
    void createOrIncrefPool(Device device, Pool pool,
                            std::shared_ptr<cca::CUDAAllocator> allocator = nullptr) override {
        native()->createOrIncrefPool(device, pool, std::move(allocator));
    }
    void setUseOnOOM(Device device, Pool pool, bool use_on_oom) override {
        native()->setUseOnOOM(device, pool, use_on_oom);
    }
    void setNoSplit(Device device, Pool pool) override { native()->setNoSplit(device, pool); }
    bool checkPoolLiveAllocations(Device device, Pool pool,
                                  const std::unordered_set<void *> &expected) override {
        return native()->checkPoolLiveAllocations(device, pool, expected);
    }
    cca::ShareableHandle shareIpcHandle(void *ptr) override {
        if (tp_core_owning(addr_of(ptr)) != nullptr) {
            throw c10::Error(
                {__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
                "this tensor's memory belongs to torchpager, which moves it and so does not "
                "share it with another process: make it outside torchpager's contexts, or "
                "inside torch.cuda.use_mem_pool(), where clone() gives a copy that can be "
                "shared");
        }
        return native()->shareIpcHandle(ptr);
    }
    std::shared_ptr<void> getIpcDevPtr(std::string handle) override {
        return native()->getIpcDevPtr(std::move(handle));
    }
    bool isHistoryEnabled() override { return native()->isHistoryEnabled(); }
#ifdef TP_TORCH_HAS_getContextForPointer
    std::shared_ptr<c10::GatheredContext> getContextForPointer(const void *ptr) override {
        if (tp_core_owning(addr_of(ptr)) != nullptr) return history().context_of(addr_of(ptr));
        return native()->getContextForPointer(ptr);
    }
#endif
    void recordHistory(bool enabled, cca::CreateContextFn recorder, size_t max_entries,
                       cca::RecordContext when, bool clear_history,
                       const std::vector<std::string> &skip_actions) override {
        native()->recordHistory(enabled, recorder, max_entries, when, clear_history,
                                skip_actions);
        history().record(enabled, recorder, max_entries, when, clear_history, skip_actions);
    }
    void
    recordAnnotation(const std::vector<std::pair<std::string, std::string>> &data) override {
        native()->recordAnnotation(data);
    }
    void pushCompileContext(std::string &context) override {
        native()->pushCompileContext(context);
    }
    void popCompileContext() override { native()->popCompileContext(); }
#ifdef TP_TORCH_HAS_supportsUserMetadata
    bool supportsUserMetadata() override { return native()->supportsUserMetadata(); }
#endif
    void setUserMetadata(const std::string &metadata) override {
        native()->setUserMetadata(metadata);
    }
    std::string getUserMetadata() override { return native()->getUserMetadata(); }
#ifdef TP_TORCH_HAS_annotateMemory
    void annotateMemory(const void *ptr, const std::string &metadata) override {
        native()->annotateMemory(ptr, metadata);
    }
#endif
    void attachOutOfMemoryObserver(cca::OutOfMemoryObserver observer) override {
        {
            const std::lock_guard<std::mutex> guard(observers_mutex);
            oom_observers.push_back(observer);
        }
        native()->attachOutOfMemoryObserver(std::move(observer));
    }
#ifdef TP_TORCH_HAS_attachOomRejectionObserver
    void attachOomRejectionObserver(cca::OomRejectionObserver observer) override {
        native()->attachOomRejectionObserver(std::move(observer));
    }
#endif
    void attachAllocatorTraceTracker(cca::AllocatorTraceTracker tracker) override {
        native()->attachAllocatorTraceTracker(std::move(tracker));
    }
    void enablePeerAccess(Device device, Device device_to_access) override {
        native()->enablePeerAccess(device, device_to_access);
    }
    cudaError_t memcpyAsync(void *dst, int dst_device, const void *src, int src_device,
                            size_t count, cudaStream_t stream, bool p2p_enabled) override {
        const bool ours =
            tp_core_owning(addr_of(dst)) != nullptr || tp_core_owning(addr_of(src)) != nullptr;
        if (ours && dst_device != src_device) {
            /* Our mappings are visible to their own device only. */
            return cudaMemcpyPeerAsync(dst, dst_device, src, src_device, count, stream);
        }
        return native()->memcpyAsync(dst, dst_device, src, src_device, count, stream,
                                     p2p_enabled);
    }
    std::shared_ptr<cca::AllocatorState> getCheckpointState(Device device, Pool id) override {
        return native()->getCheckpointState(device, id);
    }
    cca::CheckpointDelta
    setCheckpointPoolState(Device device, std::shared_ptr<cca::AllocatorState> pps) override {
        cca::CheckpointDelta delta = native()->setCheckpointPoolState(device, std::move(pps));
        for (c10::DataPtr &data : delta.dataptrs_allocd) own_deleter(data);
        return delta;
    }
#ifdef TP_TORCH_HAS_allocateWithAddress
    c10::DataPtr allocateWithAddress(size_t size, void *addr) override {
        c10::DataPtr data = native()->allocateWithAddress(size, addr);
        own_deleter(data);
        return data;
    }
#endif
    /* What callers compare with: to PyTorch's code this is the native allocator. */
    std::string name() override { return native()->name(); }

  private:
    [[gnu::noinline]] c10::DataPtr allocate_slowly(size_t n, bool tried) {
        throw_if_memory_lacks();
        tp_core *core = nullptr;
        if (may_serve(n)) {
            const Device device = c10::cuda::current_device();
            core = serving_core(device, n, stream_now(device));
        }
        std::optional<tp_error> error;
        if (core == nullptr) {
            auto data =
                native_with_room(n, tried, &error, [n] { return native()->allocate(n); });
            if (C10_LIKELY(data.has_value())) {
                own_deleter(*data);
                fill_if_asked(data->get(), n);
                return std::move(*data);
            }
        }
        const Device device = c10::cuda::current_device();
        const cudaStream_t stream = stream_now(device);
        if (core == nullptr) core = core_instead(device, n, stream, *error);
        void *ptr = our_alloc(core, device, n, stream);
        c10::DataPtr data(ptr, ptr, &door_delete, c10::Device(c10::DeviceType::CUDA, device));
        fill_if_asked(ptr, n);
        return data;
    }

    template <class Call>
    void *raw_on(Device device, size_t bytes, cudaStream_t stream, Call call) {
        void *ptr = raw_unfilled(device, bytes, stream, call);
        fill_if_asked(ptr, bytes, stream);
        return ptr;
    }

    template <class Call>
    void *raw_unfilled(Device device, size_t bytes, cudaStream_t stream, Call call) {
        tp_core *core = serving_core(device, bytes, stream);
        if (core == nullptr) {
            std::optional<tp_error> error;
            const auto ptr = native_with_room(bytes, false, &error, call);
            if (C10_LIKELY(ptr.has_value())) return *ptr;
            core = core_instead(device, bytes, stream, *error);
        }
        return our_alloc(core, device, bytes, stream);
    }

    /* The native allocator records only pointers that carry its own deleter. */
    static void record_native(const c10::DataPtr &data, c10::cuda::CUDAStream stream) {
        if (data.get_deleter() != &door_delete) {
            native()->recordStream(data, stream);
            return;
        }
        c10::DataPtr view(data.get(), data.get_context(),
                          hot.deleter.load(std::memory_order_relaxed), data.device());
        try {
            native()->recordStream(view, stream);
        } catch (...) {
            (void)view.release_context(); /* the view owns nothing */
            throw;
        }
        (void)view.release_context();
    }
};

CudaDoor &door() {
    static auto *instance = new CudaDoor; /* storages point at it until the process ends */
    return *instance;
}

/* ---- installing -------------------------------------------------------------------------- */

std::mutex install_mutex; /* never held while Python runs */
bool is_installed = false;

bool registry_set(c10::Allocator *allocator) {
    return registry_swap(
        [](c10::Allocator *each, uint8_t priority) {
            c10::SetAllocator(c10::DeviceType::CUDA, each, priority);
        },
        [] { return c10::GetAllocator(c10::DeviceType::CUDA); }, allocator);
}

/* An empty text, or why the door cannot be installed. */
std::string install_door() {
    const std::lock_guard<std::mutex> guard(install_mutex);
    if (is_installed) return "the CUDA door is installed already";
    cca::CUDAAllocator *found = cca::allocator.load();
    const std::string name = found->name();
    if (found == &door() || name != "native") {
        return "torchpager wraps PyTorch's native CUDA allocator, but the allocator in place "
               "is \"" +
               name + "\"";
    }
    const c10::DeleterFnPtr known = hot.deleter.load();
    if (known != nullptr && known != found->raw_deleter()) {
        return "another CUDA allocator has taken the native one's place";
    }
    hot.deleter.store(found->raw_deleter());
    hot.allocator.store(found);
    if (!registry_set(&door())) return "PyTorch refused another CUDA allocator";
    cca::allocator.store(&door());
    is_installed = true;
    return "";
}

std::string uninstall_door() {
    const std::lock_guard<std::mutex> guard(install_mutex);
    if (!is_installed) return "";
    if (cca::allocator.load() != &door()) {
        return "another CUDA allocator has been installed since; take that one out first";
    }
    cca::allocator.store(native());
    registry_set(native());
    is_installed = false;
    return "";
}

/* ---- adopting ---------------------------------------------------------------------------- */

const char *refuses(c10::StorageImpl *storage, const c10::DataPtr &data) {
    const c10::DeleterFnPtr known = hot.deleter.load();
    if (!data.device().is_cuda()) return "the tensor is not on a CUDA device";
    if (known == nullptr) return "the CUDA door has never been installed";
    if (storage->received_cuda()) return "its memory belongs to another process";
    if (data.get() != data.get_context() ||
        (data.get_deleter() != known && data.get_deleter() != &door_delete)) {
        return "its memory does not belong to PyTorch's allocator (DLPack, a foreign buffer or "
               "a lazy copy): clone() it first";
    }
    if (!storage->resizable()) return "its storage has a fixed address";
    return nullptr;
}

void move_storage(c10::StorageImpl *storage, tp_core *core) {
    c10::DataPtr &data = storage->_mutable_data_ptr_no_checks();
    const auto device = data.device().index();
    const c10::cuda::CUDAGuard guard(device);
    const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream(device);
    const size_t bytes = storage->nbytes();
    void *ptr = our_alloc(core, device, bytes, stream.stream());
    c10::DataPtr moved(ptr, ptr, &door_delete, data.device());
    tp_error error{};
    if (tp_touch(core, addr_of(ptr), true, stream.stream(), &error) != TP_OK) {
        throw_alloc_error(device, tp_oom{}, error);
    }
    {
        const pybind11::gil_scoped_release released;
        c10::cuda::device_synchronize(); /* writers on any stream */
        C10_CUDA_CHECK(native()->memcpyAsync(ptr, device, data.get(), device, bytes,
                                             stream.stream(), true));
        stream.synchronize();
    }
    storage->set_data_ptr_noswap(std::move(moved));
    storage->set_allocator(&door());
    tp_mark_seen(core, addr_of(ptr));
}

/* ---- the module -------------------------------------------------------------------------- */

PyObject *raise_runtime(const char *text) {
    PyErr_SetString(PyExc_RuntimeError, text);
    return nullptr;
}

PyObject *none_or_runtime(const std::string &problem) {
    if (!problem.empty()) return raise_runtime(problem.c_str());
    Py_RETURN_NONE;
}

bool device_from(PyObject *args, const char *format, int *device, void *value) {
    const bool parsed = value == nullptr ? PyArg_ParseTuple(args, format, device) != 0
                                         : PyArg_ParseTuple(args, format, device, value) != 0;
    if (!parsed) return false;
    if (known_device(*device)) return true;
    PyErr_Format(PyExc_ValueError, "no CUDA device has the number %d", *device);
    return false;
}

/* The native allocator, also before the door was ever installed. */
cca::CUDAAllocator *native_or_current() {
    cca::CUDAAllocator *wrapped = native();
    return wrapped != nullptr ? wrapped : cca::allocator.load();
}

/* The history may have been switched on or off while the door was out. */
void follow_native_history() {
    if (native()->isHistoryEnabled()) {
        history().join();
    } else if (history().enabled()) {
        history().record(false, nullptr, 1, History::When::NEVER, true, {});
    }
}

PyObject *cuda_install(PyObject *, PyObject *) {
    HANDLE_TH_ERRORS
    PyObject *cuda = PyImport_ImportModule("torch.cuda");
    if (cuda == nullptr) return nullptr;
    PyObject *answer = PyObject_CallMethod(cuda, "init", nullptr);
    Py_DECREF(cuda);
    if (answer == nullptr) return nullptr;
    Py_DECREF(answer);
    const std::string problem = install_door();
    if (problem.empty()) follow_native_history();
    return none_or_runtime(problem);
    END_HANDLE_TH_ERRORS
}

PyObject *cuda_uninstall(PyObject *, PyObject *) {
    HANDLE_TH_ERRORS
    return none_or_runtime(uninstall_door());
    END_HANDLE_TH_ERRORS
}

PyObject *cuda_installed(PyObject *, PyObject *) {
    const std::lock_guard<std::mutex> guard(install_mutex);
    return PyBool_FromLong(is_installed && cca::allocator.load() == &door());
}

PyObject *cuda_enable(PyObject *, PyObject *args, PyObject *kwargs) {
    static char device_name[] = "device", on_name[] = "on", large_name[] = "large_min";
    static char *names[] = {device_name, on_name, large_name, nullptr};
    int device = 0, on = 0;
    Py_ssize_t large_min = 2 * static_cast<Py_ssize_t>(TP_MIB);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "ip|n", names, &device, &on, &large_min)) {
        return nullptr;
    }
    if (!known_device(device) || large_min <= 0) {
        PyErr_SetString(PyExc_ValueError, "no such CUDA device, or large_min is not positive");
        return nullptr;
    }
    set_served(device, on != 0, static_cast<size_t>(large_min));
    Py_RETURN_NONE;
}

PyObject *cuda_adopt(PyObject *, PyObject *object) {
    HANDLE_TH_ERRORS
    c10::StorageImpl *storage = storage_of(object);
    if (storage == nullptr) return nullptr;
    const c10::DataPtr &data = storage->_mutable_data_ptr_no_checks();
    if (data.get() == nullptr) return PyLong_FromLong(0);
    if (tp_core_owning(addr_of(data.get())) != nullptr) return PyLong_FromLong(0);
    if (const char *problem = refuses(storage, data)) return raise_runtime(problem);
    const int device = data.device().index();
    if (!known_device(device) || storage->nbytes() < state_of(device).large_min.load()) {
        return PyLong_FromLong(0);
    }
    tp_core *core = core_of(device);
    if (core == nullptr) return raise_runtime("no core is open on the tensor's device");
    move_storage(storage, core);
    return PyLong_FromSize_t(storage->nbytes());
    END_HANDLE_TH_ERRORS
}

PyObject *native_bytes(PyObject *args,
                       StatArray c10::CachingDeviceAllocator::DeviceStats::*member) {
    HANDLE_TH_ERRORS
    int device = 0;
    if (!device_from(args, "i", &device, nullptr)) return nullptr;
    const auto stats =
        native_or_current()->getDeviceStats(static_cast<c10::DeviceIndex>(device));
    return PyLong_FromLongLong(
        (stats.*member)[static_cast<size_t>(StatType::AGGREGATE)].current);
    END_HANDLE_TH_ERRORS
}

PyObject *cuda_native_reserved(PyObject *, PyObject *args) {
    return native_bytes(args, &c10::CachingDeviceAllocator::DeviceStats::reserved_bytes);
}

PyObject *cuda_native_allocated(PyObject *, PyObject *args) {
    return native_bytes(args, &c10::CachingDeviceAllocator::DeviceStats::allocated_bytes);
}

PyObject *cuda_native_empty_cache(PyObject *, PyObject *) {
    HANDLE_TH_ERRORS {
        const pybind11::gil_scoped_release released;
        native_or_current()->emptyCache();
    }
    Py_RETURN_NONE;
    END_HANDLE_TH_ERRORS
}

PyObject *cuda_native_fraction(PyObject *, PyObject *args) {
    HANDLE_TH_ERRORS
    int device = 0;
    if (!device_from(args, "i", &device, nullptr)) return nullptr;
    return PyFloat_FromDouble(
        native_or_current()->getMemoryFraction(static_cast<c10::DeviceIndex>(device)));
    END_HANDLE_TH_ERRORS
}

PyObject *cuda_set_native_fraction(PyObject *, PyObject *args) {
    HANDLE_TH_ERRORS
    int device = 0;
    double fraction = 0.0;
    if (!device_from(args, "id", &device, &fraction)) return nullptr;
    native_or_current()->setMemoryFraction(fraction, static_cast<c10::DeviceIndex>(device));
    Py_RETURN_NONE;
    END_HANDLE_TH_ERRORS
}

/* Starts or ends sharing in the glue; the core learns of it afterwards. */
void set_shared(int device, bool on) {
    DeviceState &state = state_of(device);
    const std::lock_guard<std::mutex> guard(state.mutex);
    if (state.shared == on) return;
    if (on) {
        state.user_fraction =
            same_bytes_again(native()->getMemoryFraction(static_cast<c10::DeviceIndex>(device)),
                             total_locked(state, device));
        state.cap_bytes = TP_NO_LIMIT;
    }
    state.shared = on;
    if (!on) apply_fraction_locked(state, device);
}

PyObject *cuda_share_budget(PyObject *, PyObject *args) {
    HANDLE_TH_ERRORS
    int device = 0, on = 0;
    if (!device_from(args, "ip", &device, &on)) return nullptr;
    if (native() == nullptr) return raise_runtime("the CUDA door has never been installed");
    /* The core must not call a hook that is being switched off, nor be without one that is
     * on. */
    if (on == 0) tp_bind_set_foreign(device, nullptr);
    set_shared(device, on != 0);
    if (on != 0) tp_bind_set_foreign(device, &foreign_part);
    Py_RETURN_NONE;
    END_HANDLE_TH_ERRORS
}

PyObject *cuda_set_oom_prefix(PyObject *, PyObject *arg) {
    const char *text = PyUnicode_AsUTF8(arg);
    if (text == nullptr) return nullptr;
    tp_oom_text_set_prefix(text);
    Py_RETURN_NONE;
}

void throw_text(const char *text) {
    throw c10::OutOfMemoryError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
                                std::string(text));
}

PyObject *cuda_pluggable_install_thrower(PyObject *, PyObject *) {
    tp_torch_set_thrower(throw_text);
    Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"install", cuda_install, METH_NOARGS, nullptr},
    {"uninstall", cuda_uninstall, METH_NOARGS, nullptr},
    {"installed", cuda_installed, METH_NOARGS, nullptr},
    {"enable", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(cuda_enable)),
     METH_VARARGS | METH_KEYWORDS, nullptr},
    {"adopt", cuda_adopt, METH_O, nullptr},
    {"native_reserved", cuda_native_reserved, METH_VARARGS, nullptr},
    {"native_allocated", cuda_native_allocated, METH_VARARGS, nullptr},
    {"native_empty_cache", cuda_native_empty_cache, METH_NOARGS, nullptr},
    {"native_fraction", cuda_native_fraction, METH_VARARGS, nullptr},
    {"set_native_fraction", cuda_set_native_fraction, METH_VARARGS, nullptr},
    {"share_budget", cuda_share_budget, METH_VARARGS, nullptr},
    {"set_oom_prefix", cuda_set_oom_prefix, METH_O, nullptr},
    {"pluggable_install_thrower", cuda_pluggable_install_thrower, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

tp_stream current_stream(int slot) {
    return static_cast<tp_stream>(
        c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(slot)).stream());
}

int module_exec(PyObject *module) {
    if (!check_torch_version("torchpager._torch_cuda")) return -1;
    PyObject *hook =
        PyImport_ImportModule("torchpager._torch_cpu"); /* brings the operator hook */
    if (hook == nullptr) return -1;
    Py_DECREF(hook);
    tp_bind_set_current_stream(current_stream);
    return PyModule_AddStringConstant(module, "TORCH_VERSION", TP_TORCH_VERSION);
}

PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, reinterpret_cast<void *>(module_exec)},
#ifdef Py_mod_multiple_interpreters
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
    {0, nullptr},
};

PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    "torchpager._torch_cuda",
    "The wrapper door.",
    0,
    methods,
    module_slots,
    nullptr,
    nullptr,
    nullptr,
};

} // namespace
} // namespace torchpager

PyMODINIT_FUNC PyInit__torch_cuda(void) { return PyModuleDef_Init(&torchpager::module_def); }
