/* torch_history: the memory history of our blocks, for PyTorch's snapshots.
 *
 * PyTorch's allocator writes down what it allocates and frees when it is told to
 * (recordHistory); our blocks never reach it, so the wrapper door keeps a list of its own here,
 * and a snapshot gets both in the order of time. C++ only, header only. Own locking: one mutex,
 * under which neither Python nor PyTorch's allocator is called. */
#ifndef TP_BIND_TORCH_HISTORY_H
#define TP_BIND_TORCH_HISTORY_H

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/ApproximateClock.h>
#include <torch/csrc/profiler/combined_traceback.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace torchpager {

class History {
  public:
    using Entry = c10::CachingDeviceAllocator::TraceEntry;
    using Context = std::shared_ptr<c10::GatheredContext>;
    using Recorder = c10::CachingDeviceAllocator::CreateContextFn;
    using When = c10::CachingDeviceAllocator::RecordContext;

    bool enabled() const { return enabled_.load(std::memory_order_relaxed); }

    /* As recordHistory of PyTorch's allocator. */
    void record(bool enabled, Recorder recorder, size_t max_entries, When when, bool clear,
                const std::vector<std::string> &skipped_actions) {
        auto clock =
            enabled ? std::make_unique<c10::ApproximateClockToUnixTimeConverter>() : nullptr;
        std::deque<Entry> dropped; /* contexts are destroyed outside the lock */
        std::unordered_map<size_t, Context> forgotten;
        {
            const std::lock_guard<std::mutex> guard(mutex_);
            if (clock != nullptr) clock_ = std::move(clock);
            recorder_ = recorder;
            max_entries_ = std::max<size_t>(max_entries, 1);
            when_ = when;
            skipped_.clear();
            for (const std::string &name : skipped_actions) {
                skipped_.push_back(c10::CachingDeviceAllocator::parseTraceEntryAction(name));
            }
            if (!enabled || clear) entries_.swap(dropped);
            if (!enabled) born_.swap(forgotten);
        }
        enabled_.store(enabled, std::memory_order_relaxed);
    }

    /* PyTorch's allocator was told before we were there: with what we do not know, so all is
     * kept. */
    void join() {
        if (!enabled()) record(true, gather, SIZE_MAX, When::ALL, false, {});
    }

    void allocated(int device, const void *ptr, size_t bytes, void *stream,
                   const std::string &metadata) {
        Context context = context_for(When::STATE);
        add(Entry::ALLOC, device, ptr, bytes, stream, context, metadata);
        const std::lock_guard<std::mutex> guard(mutex_);
        std::swap(born_[reinterpret_cast<size_t>(ptr)], context); /* one may have been left */
    }

    void freed(int device, const void *ptr, size_t bytes, void *stream,
               const std::string &metadata) {
        const Context context = context_for(When::ALL);
        add(Entry::FREE_REQUESTED, device, ptr, bytes, stream, context, metadata);
        add(Entry::FREE_COMPLETED, device, ptr, bytes, stream, context, metadata);
        Context forgotten;
        const std::lock_guard<std::mutex> guard(mutex_);
        const auto found = born_.find(reinterpret_cast<size_t>(ptr));
        if (found == born_.end()) return;
        forgotten = std::move(found->second);
        born_.erase(found);
    }

    /* Where a live block was allocated; null if that was not written down. */
    Context context_of(size_t address) const {
        const std::lock_guard<std::mutex> guard(mutex_);
        const auto found = born_.find(address);
        return found != born_.end() ? found->second : nullptr;
    }

    /* Puts our entries among those of a snapshot. */
    void merge_into(std::vector<std::vector<Entry>> &traces) const {
        if (!enabled()) return;
        {
            const std::lock_guard<std::mutex> guard(mutex_);
            const auto nanoseconds = clock_->makeConverter();
            for (const Entry &entry : entries_) {
                const auto device = static_cast<size_t>(entry.device_);
                if (device >= traces.size()) traces.resize(device + 1);
                traces[device].push_back(entry);
                /* As PyTorch's own entries in a snapshot: microseconds. */
                traces[device].back().time_.t_ = nanoseconds(entry.time_.approx_t_) / 1000;
            }
        }
        for (std::vector<Entry> &trace : traces) {
            std::stable_sort(trace.begin(), trace.end(), [](const Entry &a, const Entry &b) {
                return a.time_.t_ < b.time_.t_;
            });
        }
    }

  private:
    static Context gather() { return torch::CapturedTraceback::gather(true, true, false); }

    /* Walks Python's stack, so never under the lock. */
    Context context_for(When least) const {
        Recorder recorder = nullptr;
        {
            const std::lock_guard<std::mutex> guard(mutex_);
            if (when_ >= least) recorder = recorder_;
        }
        return recorder != nullptr ? recorder() : nullptr;
    }

    void add(Entry::Action action, int device, const void *ptr, size_t bytes, void *stream,
             const Context &context, const std::string &metadata) {
        const auto now = c10::getApproximateTime();
        std::deque<Entry> dropped;
        const std::lock_guard<std::mutex> guard(mutex_);
        if (std::find(skipped_.begin(), skipped_.end(), action) != skipped_.end()) return;
        entries_.emplace_back(action, static_cast<c10::DeviceIndex>(device),
                              reinterpret_cast<size_t>(ptr), bytes, stream,
                              c10::MempoolId_t{0, 0}, now,
                              when_ >= When::ALLOC ? context : nullptr, "", metadata);
        while (entries_.size() > max_entries_) {
            dropped.push_back(std::move(entries_.front()));
            entries_.pop_front();
        }
    }

    std::atomic<bool> enabled_{false};
    mutable std::mutex mutex_; /* protects what follows */
    std::unique_ptr<c10::ApproximateClockToUnixTimeConverter> clock_;
    Recorder recorder_ = nullptr;
    size_t max_entries_ = 1;
    When when_ = When::NEVER;
    std::vector<Entry::Action> skipped_;
    std::deque<Entry> entries_;
    std::unordered_map<size_t, Context> born_; /* live blocks, by address */
};

} // namespace torchpager

#endif
