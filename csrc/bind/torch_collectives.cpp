#include "bind/torch_collectives.h"

#include <ATen/core/class_type.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <iterator>
#include <list>
#include <mutex>
#include <utility>

namespace torchpager {
namespace {

constexpr int64_t kIntervalNs = 500000;

struct Held {
    CollectiveWork work;
    std::vector<tp_op> ops;
};

/* They outlive every thread, and the interpreter. */
std::list<Held> &held() {
    static auto *list = new std::list<Held>;
    return *list;
}
std::mutex held_mutex;   /* of the list; nothing is called under it */
std::mutex settle_mutex; /* one thread at a time asks, with the list in its own hands */
std::atomic<size_t> held_count{0};
std::atomic<int64_t> asked_ns{0};
std::atomic<int> deferred_count{0};

void end_all(Held &one) {
    for (tp_op &op : one.ops) {
        tp_op_end(&op, nullptr, 0, nullptr);
        tp_op_fini(&op);
    }
}

bool asked_just_now() {
    const int64_t now = std::chrono::steady_clock::now().time_since_epoch().count();
    int64_t last = asked_ns.load(std::memory_order_relaxed);
    if (now - last < kIntervalNs) return true;
    return !asked_ns.compare_exchange_strong(last, now, std::memory_order_relaxed);
}

/* Moves what `chosen` says to the returned list. Needs settle_mutex. */
template <class Chosen> std::list<Held> take(Chosen chosen) {
    std::list<Held> all, taken;
    {
        const std::lock_guard<std::mutex> guard(held_mutex);
        all.swap(held());
    }
    for (auto it = all.begin(); it != all.end();) {
        const auto next = std::next(it);
        if (chosen(*it)) taken.splice(taken.end(), all, it);
        it = next;
    }
    const std::lock_guard<std::mutex> guard(held_mutex);
    held().splice(held().begin(), all);
    held_count.store(held().size(), std::memory_order_relaxed);
    return taken;
}

} // namespace

bool collective_work(const c10::IValue &value, CollectiveWork *work) {
    if (!value.isObject()) return false;
    const auto object = value.toObject();
    const auto name = object->type()->name();
    if (!name.has_value() || name->qualifiedName() != "__torch__.torch.classes.c10d.Work") {
        return false;
    }
    *work = object->getSlot(0).toCapsule();
    return true;
}

bool collective_done(const CollectiveWork &work, tp_core *core) {
    if (tp_capturing(core)) return false;
    try {
        return static_cast<c10d::Work *>(work.get())->isCompleted();
    } catch (...) {
        return false;
    }
}

void collectives_hold(const CollectiveWork &work, std::vector<tp_op> &&ops) {
    std::list<Held> one;
    one.push_back({work, {}});
    one.front().ops = std::move(ops);
    const std::lock_guard<std::mutex> guard(held_mutex);
    held().splice(held().end(), one);
    held_count.store(held().size(), std::memory_order_relaxed);
}

void collectives_settle(bool now) {
    if (held_count.load(std::memory_order_relaxed) == 0) return;
    if (!now && asked_just_now()) return;
    std::list<Held>
        done; /* lets go of the works, and so perhaps of tensors, with no lock held */
    const std::unique_lock<std::mutex> guard(settle_mutex, std::try_to_lock);
    if (!guard.owns_lock()) return;
    done = take([](const Held &one) { return collective_done(one.work, one.ops[0].core); });
    for (Held &one : done) end_all(one);
}

void collectives_forget(tp_core *core) {
    std::list<Held> gone;
    const std::lock_guard<std::mutex> guard(settle_mutex);
    gone = take([core](const Held &one) {
        for (const tp_op &op : one.ops) {
            if (op.core == core) return true;
        }
        return false;
    });
    for (Held &one : gone) end_all(one);
}

void collectives_defer(int change) {
    int count = deferred_count.load();
    while (!deferred_count.compare_exchange_weak(count, std::max(count + change, 0))) continue;
}

bool collectives_deferred() { return deferred_count.load() > 0; }

} // namespace torchpager
