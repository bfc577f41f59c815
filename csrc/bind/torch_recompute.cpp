#include "bind/torch_recompute.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <new>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "bind/cores.h"
#include "bind/torch_glue.h"
#include "bind/torch_hook.h"
#include "bind/torch_numerics.h"

namespace torchpager {

std::atomic<uint32_t> recompute_tracked{0};

namespace {

std::atomic<uint32_t> rules_off{0};
bool in_force(RecomputeRule rule) {
    return (rules_off.load(std::memory_order_relaxed) & rule) == 0;
}

/* ---- which operators may run again --------------------------------------------------------- */

/* Functional, and not the same bits each time: PyTorch says so of them on CUDA
 * (torch.use_deterministic_algorithms). */
const char *const kNotTheSame[] = {"aten::bincount",
                                   "aten::cumsum",
                                   "aten::cumprod",
                                   "aten::logcumsumexp",
                                   "aten::_logcumsumexp",
                                   "aten::ctc_loss",
                                   "aten::_ctc_loss",
                                   "aten::histc",
                                   "aten::histogram",
                                   "aten::index_add",
                                   "aten::index_copy",
                                   "aten::index_put",
                                   "aten::index_reduce",
                                   "aten::kthvalue",
                                   "aten::masked_scatter",
                                   "aten::median",
                                   "aten::nanmedian",
                                   "aten::nll_loss2d_forward",
                                   "aten::put",
                                   "aten::scatter",
                                   "aten::scatter_add",
                                   "aten::scatter_reduce",
                                   "aten::sparse_sampled_addmm",
                                   "aten::_embedding_bag",
                                   "aten::_embedding_bag_forward_only",
                                   "aten::_sparse_mm_reduce_impl",
                                   "aten::segment_reduce",
                                   "aten::_segment_reduce"};

/* What they hold is not made by them. */
const char *const kMakesNothing[] = {"aten::resize", "aten::lift", "aten::lift_fresh"};

/* Random only with dropout. */
const char *const kAttention[] = {"aten::_scaled_dot_product_flash_attention",
                                  "aten::_scaled_dot_product_efficient_attention",
                                  "aten::_scaled_dot_product_cudnn_attention",
                                  "aten::_scaled_dot_product_flash_attention_for_cpu",
                                  "aten::_flash_attention_forward",
                                  "aten::_efficient_attention_forward",
                                  "aten::_cudnn_attention_forward"};

template <size_t N> bool listed(const char *const (&list)[N], const char *name) {
    return std::any_of(list, list + N,
                       [name](const char *each) { return std::strcmp(each, name) == 0; });
}

bool is_functional(const c10::FunctionSchema &schema) {
    for (const auto &argument : schema.arguments()) {
        if (argument.alias_info() != nullptr) return false;
    }
    for (const auto &result : schema.returns()) {
        if (result.alias_info() != nullptr) return false;
    }
    return !schema.returns().empty();
}

bool is_random(const c10::OperatorHandle &op) {
    return op.hasTag(at::Tag::nondeterministic_seeded) && in_force(kRuleRandom);
}

NoRecipe refused_by_schema(const c10::OperatorHandle &op, bool writes_unannotated,
                           bool makes_empty) {
    const c10::FunctionSchema &schema = op.schema();
    const char *name = schema.name().c_str();
    if (std::strncmp(name, "aten::", 6) != 0) return NoRecipe::FOREIGN;
    if (!is_functional(schema)) return NoRecipe::WRITES;
    if (listed(kNotTheSame, name) && in_force(kRuleNotTheSame)) return NoRecipe::DIFFERS;
    if (writes_unannotated && in_force(kRuleStatistics)) return NoRecipe::STATISTICS;
    if (makes_empty || listed(kMakesNothing, name)) return NoRecipe::EMPTY;
    if (op.hasTag(at::Tag::data_dependent_output)) return NoRecipe::DATA;
    const bool without_dropout =
        listed(kAttention, name) && schema.argumentIndexWithName("dropout_p").has_value();
    return is_random(op) && !without_dropout ? NoRecipe::RANDOM : NoRecipe::NONE;
}

} // namespace

Rerunnable rerunnable(const c10::OperatorHandle &op, bool writes_unannotated,
                      bool makes_empty) {
    const c10::FunctionSchema &schema = op.schema();
    const char *name = schema.name().c_str();
    Rerunnable use;
    use.why = refused_by_schema(op, writes_unannotated, makes_empty);
    if (use.why != NoRecipe::NONE) return use;
    if (is_random(op)) {
        use.dropout = schema.argumentIndexWithName("dropout_p").value_or(-1);
    }
    use.possible = true;
    use.arguments = schema.arguments().size();
    use.autocast_cuda = op.hasKernelForDispatchKey(c10::DispatchKey::AutocastCUDA);
    use.autocast_cpu = op.hasKernelForDispatchKey(c10::DispatchKey::AutocastCPU);
    use.convolution = std::strstr(name, "conv") != nullptr;
    return use;
}

namespace {

/* ---- the records ---------------------------------------------------------------------------- */

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;
using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

struct Dropped;

/* A node of autograd, which each version of torch counts in its own way. */
template <class Pointer> struct Weak;
template <class T> struct Weak<std::shared_ptr<T>> {
    Weak() = default;
    explicit Weak(const std::shared_ptr<T> &strong) : pointer(strong) {}
    bool expired() const { return pointer.expired(); }
    std::weak_ptr<T> pointer;
};
template <class T> struct Weak<c10::intrusive_ptr<T>> {
    Weak() = default;
    explicit Weak(const c10::intrusive_ptr<T> &strong) : pointer(strong) {}
    bool expired() const { return !pointer.has_value() || pointer->use_count() == 0; }
    std::optional<c10::weak_intrusive_ptr<T>> pointer;
};
using WeakNode = Weak<std::decay_t<decltype(std::declval<const at::Tensor &>().grad_fn())>>;

/* References to a tensor that a node of autograd has, until it runs or goes. */
struct Save {
    WeakNode node;
    uint64_t key = 0; /* node_key */
    size_t count = 0;
};

/* A tensor over a storage. */
struct Known {
    explicit Known(WeakTensor its) : tensor(std::move(its)) {}
    WeakTensor tensor;
    c10::SmallVector<Save, 2> saves;
    const c10::TensorImpl *base = nullptr; /* that it is a view of */
    size_t base_count = 0;                 /* its references to that */
    const void *thread = nullptr;          /* this_thread() of the last that counted */
    bool shared = false;                   /* another one has, too */
};

/* A storage that a recipe has made. */
struct Made {
    explicit Made(WeakStorage its) : storage(std::move(its)) {}
    WeakStorage storage;
    std::shared_ptr<Recipe> recipe;
    uint32_t output = 0; /* among the tensors that the recipe returns */
    tp_core *core = nullptr;
    tp_addr addr = 0; /* 0: it is dropped, or gone */
    size_t bytes = 0;
    Save own; /* references to the storage that the operator itself left behind: what autograd
                 keeps of results */
    size_t held = 0;            /* ours: it is needed by what is dropped */
    std::vector<Known> tensors; /* the result, and the views of it that operators made */
    bool refused = false;       /* code that we cannot see has used it */
    bool cast_of_leaf = false;  /* autocast keeps it until it is left */
    Dropped *dropped = nullptr;
};

struct Geometry {
    c10::SmallVector<int64_t, 5> sizes, strides;
    int64_t offset = 0;
    caffe2::TypeMeta dtype;
    c10::DispatchKeySet keys;
    bool wrapped_number = false;
};

struct Input {
    explicit Input(WeakStorage its) : storage(std::move(its)) {}
    uint32_t argument = 0;
    int32_t item = -1; /* of a list; -1: the argument itself */
    Geometry geometry;
    WeakStorage storage;
    c10::Storage kept; /* small ones are kept */
    tp_addr addr = 0;
    size_t bytes = 0;
    std::shared_ptr<Made> made; /* null: there is no recipe for it */
};

constexpr size_t kKeptBytes = 64 << 10;
/* Dead inputs in a row that a rerun may have to make again; and how many recipes in a row keep
 * one another, so that a network over time does not keep them all. */
constexpr uint32_t kChainMax = 3;
constexpr uint32_t kDepthMax = 16;

} // namespace

class Recipe {
  public:
    Recipe(const c10::OperatorHandle &op, const Numerics &settings, c10::Stream on)
        : handle(op), numerics(settings), stream(on) {}

    c10::OperatorHandle handle;
    Numerics numerics;
    c10::Stream stream;
    std::vector<c10::IValue> stack; /* None where a tensor goes */
    std::vector<Input> inputs;
    std::vector<std::weak_ptr<Made>> outputs;
    /* Some operators take another way, with other bits, where nothing is to be differentiated. */
    bool grad_mode = c10::GradMode::is_enabled();
    uint64_t kind = 0;
    uint32_t depth = 0;        /* recipes in a row that it keeps */
    bool of_leaf = false;      /* its last operand is one that gradients are for */
    bool for_autocast = false; /* autocast called it, which keeps what it has cast */
    bool valid = true;         /* no input has been written */
};

namespace {

/* What stands in a storage's place of memory while it has none. */
struct Dropped {
    std::shared_ptr<Made> made;
    tp_dropped *token = nullptr;
    c10::DeleterFnPtr deleter =
        nullptr;                      /* of its memory, if it is parked; null: it is dropped */
    std::vector<c10::Storage> leaves; /* what its rerun reads */
};

struct Pending {
    std::weak_ptr<Made> made;
    int tries;
    bool park;
};

/* How many operators a drop is tried at. */
constexpr int kTries = 64;

/* Whether recipes of one kind make the same bits again. There may have been no memory to see that. */
enum class Trial { SAME, DIFFERENT, NO_MEMORY };
struct Kind {
    Trial last = Trial::NO_MEMORY;
    int tries = 0;
    bool is_decided() const { return last != Trial::NO_MEMORY || tries == 16; }
};

/* Everything below, but for what runs an operator. Never held while one runs, nor while a
 * storage or a tensor is let go of. */
struct Registry {
    std::recursive_mutex mutex;
    std::unordered_map<tp_addr, std::shared_ptr<Made>> live;
    std::unordered_map<const c10::StorageImpl *, std::vector<std::weak_ptr<Recipe>>> readers;
    std::unordered_map<const c10::StorageImpl *, std::vector<Made *>> dependents;
    std::unordered_set<Dropped *> dropped;
    std::unordered_map<uint64_t, std::vector<std::weak_ptr<Made>>> savers; /* by node_key */
    size_t readers_limit = 1024, savers_limit = 1024; /* where they are swept */
    std::vector<Pending> pending;
    std::atomic<bool> has_pending{false};
    std::unordered_map<uint64_t, Kind> kinds;
    RecomputeCounts counts{};
};

Registry &registry() {
    static auto *instance = new Registry; /* storages refer to it until the process ends */
    return *instance;
}

/* Takes a mutex as whoever holds the GIL must: never waiting for it with the GIL. So one may wait for
 * the GIL with the mutex, which reading a tensor's references can mean. */
class Guard {
  public:
    explicit Guard(std::recursive_mutex &mutex) : mutex_(mutex) {
        if (mutex_.try_lock()) return;
        void *token = tp_bind_release_gil();
        mutex_.lock();
        tp_bind_take_gil(token);
    }
    ~Guard() { mutex_.unlock(); }
    Guard(const Guard &) = delete;
    Guard &operator=(const Guard &) = delete;

  private:
    std::recursive_mutex &mutex_;
};

std::atomic<int> mode{kRecomputeOff};
std::atomic<bool> disabled{false}; /* after a fork */
std::atomic<int> holds{0};         /* threads between finding addresses and pinning them */
std::atomic<bool> dropping{false};
thread_local bool rerunning = false;
thread_local bool trying = false; /* a rerun beside a kept result */
/* To make again what the operator in progress uses. */
thread_local bool lacks_memory = false;
thread_local std::string no_memory; /* says so */

const char *const kGivenUp =
    "torchpager gave up the bytes of this tensor, which can be made again, and ";
const char *const kParked =
    "torchpager has moved the bytes of this tensor, which only autograd had, to the host, and ";

/* One rerun at a time: what they do is short, and they bring back for each other. */
std::recursive_mutex &rerun_mutex() {
    static auto *instance = new std::recursive_mutex;
    return *instance;
}

void count_tracked(Registry &r) {
    recompute_tracked.store(static_cast<uint32_t>(r.live.size() + r.dropped.size()),
                            std::memory_order_relaxed);
}

int slot_of(const c10::Device &device) {
    return device.is_cuda() ? device.index() : static_cast<int>(TP_SLOT_SIM);
}

/* What the calling thread launches on. */
tp_stream stream_for(const c10::StorageImpl *storage) {
    return tp_bind_current_stream(slot_of(storage->device()));
}

/* ---- a storage without bytes --------------------------------------------------------------- */

void forget_dependents(Registry &r, const Dropped *dropped) {
    for (const c10::Storage &leaf : dropped->leaves) {
        const auto found = r.dependents.find(leaf.unsafeGetStorageImpl());
        if (found == r.dependents.end()) continue;
        auto &list = found->second;
        list.erase(std::remove(list.begin(), list.end(), dropped->made.get()), list.end());
        if (list.empty()) r.dependents.erase(found);
    }
}

const std::shared_ptr<Made> *live_at(Registry &r, const c10::StorageImpl *storage);

void hold_leaves(Registry &r, const Dropped *dropped, int by) {
    for (const c10::Storage &leaf : dropped->leaves) {
        const auto *made = live_at(r, leaf.unsafeGetStorageImpl());
        if (made != nullptr) (*made)->held += static_cast<size_t>(by);
    }
}

/* Its storage has ended. */
void dropped_ended(void *ctx) {
    auto *dropped = static_cast<Dropped *>(ctx);
    Registry &r = registry();
    {
        const Guard guard(r.mutex);
        forget_dependents(r, dropped);
        hold_leaves(r, dropped, -1);
        r.dropped.erase(dropped);
        count_tracked(r);
        dropped->made->dropped = nullptr;
        if (!disabled.load()) tp_drop_end(dropped->made->core, dropped->token);
    }
    delete dropped;
}

Dropped *dropped_of(c10::StorageImpl *storage) {
    const c10::DataPtr &data = storage->_mutable_data_ptr_no_checks();
    if (C10_LIKELY(data.get() != nullptr) || data.get_deleter() != &dropped_ended) {
        return nullptr;
    }
    return static_cast<Dropped *>(data.get_context());
}

/* Null: it has its bytes. What the storage holds ends when they come back, this does not. */
std::shared_ptr<Made> dropped_made(c10::StorageImpl *storage) {
    const Guard guard(registry().mutex);
    const Dropped *dropped = dropped_of(storage);
    return dropped != nullptr ? dropped->made : nullptr;
}

tp_addr addr_of_storage(c10::StorageImpl *storage) {
    return reinterpret_cast<tp_addr>(storage->_mutable_data_ptr_no_checks().get());
}

const std::shared_ptr<Made> *live_at(Registry &r, const c10::StorageImpl *storage) {
    const tp_addr addr = addr_of_storage(const_cast<c10::StorageImpl *>(storage));
    const auto found = addr != 0 ? r.live.find(addr) : r.live.end();
    if (found != r.live.end()) return &found->second;
    Dropped *dropped = dropped_of(const_cast<c10::StorageImpl *>(storage));
    return dropped != nullptr ? &dropped->made : nullptr;
}

/* Not every torch has a way back for a storage that refuses its pointer. An explicit instantiation
 * may name a private member. */
template <class Tag, typename Tag::type Member> struct Reach {
    friend typename Tag::type member_of(Tag) { return Member; }
};
struct RefusesTag {
    using type = bool c10::StorageImpl::*;
    friend type member_of(RefusesTag);
};
template struct Reach<RefusesTag, &c10::StorageImpl::throw_on_immutable_data_ptr_>;

void refuse_pointer(c10::StorageImpl *storage, std::string why) {
    storage->release_data_and_set_meta_custom_data_ptr_error_msg_(std::move(why));
}

/* The storage hands its pointer out again: `data`, in place of what stood there for want of bytes,
 * whose deleter is not called. */
void give_pointer(c10::StorageImpl *storage, c10::DataPtr &&data) {
    storage->*member_of(RefusesTag{}) = false;
    (void)storage->_mutable_data_ptr_no_checks().release_context();
    storage->set_data_ptr_noswap(std::move(data)); /* which looks at the member, too */
}

/* ---- capturing ------------------------------------------------------------------------------ */

bool plain_keys(c10::DispatchKeySet keys, c10::DispatchKeySet *out) {
    const c10::DispatchKeySet marks = c10::DispatchKeySet(c10::DispatchKey::Conjugate) |
                                      c10::DispatchKeySet(c10::DispatchKey::Negative);
    *out = keys - c10::autograd_dispatch_keyset_with_ADInplaceOrView -
           c10::autocast_dispatch_keyset;
    const c10::DispatchKeySet rest = *out - marks;
    return rest == c10::DispatchKeySet(c10::DispatchKey::CPU) ||
           rest == c10::DispatchKeySet(c10::DispatchKey::CUDA);
}

uint64_t mixed(uint64_t hash, uint64_t value) {
    hash ^= value + 0x9E3779B97F4A7C15u + (hash << 12) + (hash >> 4);
    return hash * 0xBF58476D1CE4E5B9u;
}

uint64_t bits_of(double number) {
    uint64_t bits = 0;
    std::memcpy(&bits, &number, sizeof bits);
    return bits;
}

/* What the operator is given, except tensors. False: it cannot be kept. */
bool plain_value(const c10::IValue &value, uint64_t *hash) {
    /* With its type: true is not 1, and a list is not its items. */
    const auto note = [hash](uint64_t type, uint64_t bits) {
        *hash = mixed(mixed(*hash, type), bits);
        return true;
    };
    if (value.isNone()) return note(1, 0);
    if (value.isInt()) return note(2, static_cast<uint64_t>(value.toInt()));
    if (value.isBool()) return note(3, value.toBool());
    if (value.isDouble()) return note(4, bits_of(value.toDouble()));
    if (value.isString()) return note(5, std::hash<std::string>{}(value.toStringRef()));
    if (value.isComplexDouble()) {
        const auto number = value.toComplexDouble();
        return note(6, bits_of(number.real())) && note(6, bits_of(number.imag()));
    }
    if (value.isDevice()) {
        const c10::Device device = value.toDevice();
        return note(7, static_cast<uint64_t>(device.type()) << 8 |
                           static_cast<uint8_t>(device.index()));
    }
    if (value.isList()) {
        (void)note(8, value.toListRef().size());
        for (const auto &item : value.toListRef()) {
            if (!plain_value(item, hash)) return false;
        }
        return true;
    }
    return false; /* generators, streams, symbols, objects */
}

void hash_geometry(const Geometry &geometry, uint64_t *hash) {
    *hash = mixed(*hash, geometry.sizes.size());
    for (const int64_t size : geometry.sizes) *hash = mixed(*hash, static_cast<uint64_t>(size));
    for (const int64_t stride : geometry.strides) {
        *hash = mixed(*hash, static_cast<uint64_t>(stride));
    }
    *hash = mixed(*hash, static_cast<uint64_t>(geometry.offset));
    *hash = mixed(*hash, static_cast<uint64_t>(c10::typeMetaToScalarType(geometry.dtype)));
    *hash = mixed(*hash, geometry.keys.raw_repr());
    *hash = mixed(*hash, geometry.wrapped_number ? 7u : 11u);
}

/* Whether code that announces nothing may write to it: its address has been handed out, or its
 * memory is not PyTorch's. */
bool is_written_unseen(c10::StorageImpl *storage) {
    if (!in_force(kRuleForeign)) return false;
    const tp_addr addr = addr_of_storage(storage);
    tp_core *core = tp_core_owning(addr);
    tp_block_info info;
    if (core == nullptr) return addr != 0 && !storage->resizable();
    return tp_block_query(core, addr, &info) && info.immovable;
}

/* An argument that is a tensor, or an item of a list. False: the operator has no recipe. */
bool capture_tensor(Recipe &recipe, const at::Tensor &tensor, uint32_t argument, int32_t item) {
    c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
    const c10::Storage &storage = impl->unsafe_storage();
    Geometry geometry;
    if (!storage || !plain_keys(impl->key_set(), &geometry.keys)) return false;
    if (impl->has_symbolic_sizes_strides()) return false;
    const auto sizes = impl->sizes();
    const auto strides = impl->strides();
    geometry.sizes.assign(sizes.begin(), sizes.end());
    geometry.strides.assign(strides.begin(), strides.end());
    geometry.offset = impl->storage_offset();
    geometry.dtype = impl->dtype();
    geometry.wrapped_number = impl->is_wrapped_number();
    c10::StorageImpl *its = storage.unsafeGetStorageImpl();
    if (is_written_unseen(its)) return false;
    /* Memory of the host is read when the copy runs, which may be after it has been given away. */
    const bool elsewhere = its->device() != recipe.stream.device();
    if (elsewhere && !geometry.wrapped_number) return false;
    recipe.kind = mixed(recipe.kind, argument);
    recipe.kind = mixed(recipe.kind, static_cast<uint64_t>(item));
    hash_geometry(geometry, &recipe.kind);
    /* Some operators choose their kernel by it. */
    recipe.kind = mixed(recipe.kind, tensor.requires_grad() ? 13u : 17u);
    recipe.of_leaf = tensor.requires_grad() && tensor.is_leaf() && !tensor.is_view() &&
                     tensor.scalar_type() == at::kFloat;
    Input input(storage.getWeakStorageImpl());
    input.argument = argument;
    input.item = item;
    input.geometry = std::move(geometry);
    input.addr = addr_of_storage(its);
    input.bytes = its->nbytes();
    recipe.kind = mixed(recipe.kind, input.addr % 512);
    if (tp_core_owning(input.addr) == nullptr && input.bytes <= kKeptBytes) {
        input.kept = storage;
    }
    Registry &r = registry();
    const Guard guard(r.mutex);
    const auto *made = live_at(r, its);
    if (made != nullptr && (*made)->recipe->depth < kDepthMax) {
        input.made = *made;
        recipe.depth = std::max(recipe.depth, (*made)->recipe->depth + 1);
    }
    recipe.inputs.push_back(std::move(input));
    return true;
}

bool capture_argument(Recipe &recipe, const c10::IValue &value, uint32_t argument) {
    if (value.isTensor()) {
        recipe.stack.emplace_back();
        if (!value.toTensor().defined()) {
            recipe.stack.back() = at::Tensor();
            return true;
        }
        return capture_tensor(recipe, value.toTensor(), argument, -1);
    }
    if (!value.isList()) {
        recipe.stack.push_back(value);
        return plain_value(value, &recipe.kind);
    }
    const c10::List<c10::IValue> list = value.toList();
    c10::impl::GenericList copy(list.elementType());
    for (size_t i = 0; i < list.size(); i++) {
        const c10::IValue item = list.get(i);
        if (item.isTensor() && item.toTensor().defined()) {
            if (!capture_tensor(recipe, item.toTensor(), argument, static_cast<int32_t>(i))) {
                return false;
            }
            copy.push_back(list.elementType()->kind() == c10::TypeKind::TensorType
                               ? c10::IValue(at::Tensor())
                               : c10::IValue());
        } else if (item.isTensor() || plain_value(item, &recipe.kind)) {
            copy.push_back(item);
        } else {
            return false;
        }
    }
    recipe.stack.emplace_back(std::move(copy));
    return true;
}

/* Whether the operator is the one below autocast that does the work. */
bool is_below_autocast(const Rerunnable &use) {
    return !in_force(kRuleAutocast) || !recompute_wraps(use);
}

/* Whether an operator runs code of others: a mode, a transform, a hook for what is saved. */
NoRecipe runs_code_of_others() {
    const c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
    const c10::DispatchKeySet others =
        c10::python_ks | c10::functorch_transforms_ks |
        c10::DispatchKeySet(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) |
        c10::DispatchKeySet(c10::DispatchKey::FuncTorchDynamicLayerBackMode) |
        c10::DispatchKeySet(c10::DispatchKey::Functionalize);
    if (keys.included_.has_any(others)) return NoRecipe::MODES;
    /* A hook is given operands, and results before the operator has ended. */
    const bool hooked = !at::SavedTensorDefaultHooks::get_tls_state().stack.empty();
    return hooked && in_force(kRuleHooks) ? NoRecipe::HOOKS : NoRecipe::NONE;
}

bool runs_alone() { return runs_code_of_others() == NoRecipe::NONE; }

/* Gradients go where Python finds them, and nothing that autograd counts keeps them. */
bool is_backward() { return torch::autograd::get_current_graph_task_id() >= 0; }

c10::Stream current_stream(c10::Device device) {
    return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

/* The device of the first tensor that is not a number on the CPU. */
c10::Device device_of(c10::ArrayRef<const c10::IValue> inputs, size_t start) {
    c10::Device found(c10::kCPU);
    const auto look = [&found](const c10::IValue &value) {
        if (!value.isTensor() || !value.toTensor().defined()) return;
        const c10::Device device = value.toTensor().device();
        if (device.is_cuda()) found = device;
    };
    for (size_t i = start; i < inputs.size(); i++) {
        look(inputs[i]);
        if (!inputs[i].isTensorList() && !inputs[i].isList()) continue;
        for (const auto &item : inputs[i].toListRef()) look(item);
    }
    return found;
}

} // namespace

bool recompute_wraps(const Rerunnable &use) {
    return (use.autocast_cuda && at::autocast::is_autocast_enabled(at::kCUDA)) ||
           (use.autocast_cpu && at::autocast::is_autocast_enabled(at::kCPU));
}

NoRecipe recompute_refuses(const Rerunnable &use, c10::ArrayRef<const c10::IValue> inputs) {
    if (rerunning || disabled.load(std::memory_order_relaxed) ||
        inputs.size() < use.arguments || !is_below_autocast(use) ||
        (is_backward() && in_force(kRuleBackward))) {
        return NoRecipe::INSIDE;
    }
    const NoRecipe others = runs_code_of_others();
    if (others != NoRecipe::NONE) return others;
    /* The plans of convolutions that are measured are a thread's own. */
    if (use.convolution && at::globalContext().benchmarkCuDNN()) return NoRecipe::BENCHMARK;
    if (use.dropout < 0) return NoRecipe::NONE;
    const size_t start = inputs.size() - use.arguments;
    const c10::IValue &dropout = inputs[start + static_cast<size_t>(use.dropout)];
    const bool none = dropout.isDouble() && dropout.toDouble() == 0.0;
    return none ? NoRecipe::NONE : NoRecipe::RANDOM;
}

void recompute_note_born(const std::optional<c10::OperatorHandle> &op, tp_core *core,
                         tp_addr addr, NoRecipe why) {
    tp_block_info info;
    if (!op.has_value() || rerunning || is_backward() || !c10::GradMode::is_enabled()) return;
    if (!tp_block_query(core, addr, &info)) return;
    table_has_no_recipe(c10::toString(op->operator_name()), info.bytes, why);
}

namespace {

/* Inside of its context it is off only where it works: while it casts, and calls the operator that it casts for.
 * The depth of contexts can be had by going into one more. */
bool is_for_autocast(c10::DeviceType type) {
    const int depth = at::autocast::increment_nesting() - 1;
    (void)at::autocast::decrement_nesting();
    return depth > 0 && at::autocast::is_autocast_cache_enabled() &&
           !at::autocast::is_autocast_enabled(type);
}

} // namespace

std::shared_ptr<Recipe> recompute_capture(const c10::OperatorHandle &op,
                                          c10::ArrayRef<const c10::IValue> inputs) {
    const size_t count = op.schema().arguments().size();
    const size_t start = inputs.size() - count;
    const Numerics numerics = Numerics::now();
    const c10::Device device = device_of(inputs, start);
    auto recipe = std::make_shared<Recipe>(op, numerics, current_stream(device));
    recipe->for_autocast = is_for_autocast(device.type());
    recipe->kind = mixed(reinterpret_cast<uintptr_t>(op.schema().name().c_str()),
                         reinterpret_cast<uintptr_t>(op.schema().overload_name().c_str()));
    recipe->kind = mixed(recipe->kind, numerics.hash());
    recipe->kind = mixed(recipe->kind, at::GradMode::is_enabled() ? 19u : 23u);
    recipe->stack.reserve(count);
    for (size_t i = 0; i < count; i++) {
        if (!capture_argument(*recipe, inputs[start + i], static_cast<uint32_t>(i))) {
            return nullptr;
        }
    }
    return recipe->inputs.empty() ? nullptr : recipe;
}

namespace {

template <class Visit> void each_tensor(const c10::IValue &value, Visit visit) {
    if (value.isTensor()) {
        visit(value.toTensor());
    } else if (value.isList()) {
        for (const auto &item : value.toListRef()) each_tensor(item, visit);
    } else if (value.isTuple()) {
        for (const auto &item : value.toTupleRef().elements()) each_tensor(item, visit);
    }
}

const c10::Storage *storage_of_tensor(const at::Tensor &tensor) {
    if (!tensor.defined()) return nullptr;
    const c10::Storage &storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
    return storage ? &storage : nullptr;
}

Known *find_tensor(Made &made, const c10::TensorImpl *impl) {
    for (Known &known : made.tensors) {
        if (known.tensor._unsafe_get_target() == impl) return &known;
    }
    return nullptr;
}

/* What is gone goes when a list has doubled: one tensor may be used in every step. */
template <class List, class Gone> void prune(List &list, const Gone &gone) {
    if (list.size() < 16 || (list.size() & (list.size() - 1)) != 0) return;
    list.erase(std::remove_if(list.begin(), list.end(), gone), list.end());
}

void add_save(Registry &r, const std::shared_ptr<Made> &made, Known &known, Save save) {
    prune(known.saves, [&r](const Save &each) {
        if (each.node.expired()) r.savers.erase(each.key);
        return each.count == 0 || each.node.expired();
    });
    r.savers[save.key].push_back(made);
    known.saves.push_back(std::move(save));
}

/* A view is one for autograd only when the outermost operator that made it has ended. */
void note_base(Known &known, const at::Tensor &tensor) {
    const auto *view = torch::autograd::impl::get_view_autograd_meta(tensor);
    known.base = nullptr;
    known.base_count = 0;
    const auto note = [&known](const at::Tensor &base) {
        known.base = base.unsafeGetTensorImpl();
        known.base_count++;
    };
    if (view == nullptr) return;
    if (view->has_bw_view()) note(view->get_backward_view().base_);
    if (view->has_fw_view() && !view->shared_view_info()) note(view->get_forward_view().base_);
}

Known &add_tensor(Made &made, const at::Tensor &tensor) {
    Known *known = find_tensor(made, tensor.unsafeGetTensorImpl());
    if (known == nullptr) {
        prune(made.tensors, [](const Known &each) { return each.tensor.use_count() == 0; });
        known = &made.tensors.emplace_back(WeakTensor(tensor.getIntrusivePtr()));
    }
    note_base(*known, tensor);
    return *known;
}

/* What is gone goes when a map has doubled. */
template <class Map> void sweep(Map &map, size_t &limit) {
    if (map.size() < limit) return;
    for (auto it = map.begin(); it != map.end();) {
        const auto &list = it->second;
        const bool gone = std::all_of(list.begin(), list.end(),
                                      [](const auto &each) { return each.expired(); });
        it = gone ? map.erase(it) : std::next(it);
    }
    limit = std::max(limit, 2 * map.size());
}

uint64_t node_key(uint64_t sequence, uint64_t thread) { return mixed(sequence, thread); }

/* The node of autograd that an operator has made, and its key; 0: none. What a view is written with is
 * saved by the node of its base, which may run and go while the view's own stays. */
std::pair<WeakNode, uint64_t> first_node(c10::ArrayRef<c10::IValue> outputs) {
    std::pair<WeakNode, uint64_t> found{{}, 0};
    const auto look = [&found](const at::Tensor &tensor) {
        if (found.second != 0 || !tensor.defined() || tensor.is_view()) return;
        if (tensor.grad_fn() == nullptr) return;
        const auto &node = tensor.grad_fn();
        found = {WeakNode(node), node_key(node->sequence_nr(), node->thread_id())};
    };
    for (const c10::IValue &output : outputs) each_tensor(output, look);
    return found;
}

/* References to a result while its operator ends: the caller's, and a copy for the hook. */
constexpr size_t kReturned = 2;

/* A parameter that autocast has cast to a type of fewer bits: its cache has a reference to it. */
bool is_cast_of_leaf(const Recipe &recipe, const at::Tensor &result) {
    return recipe.for_autocast && recipe.of_leaf && result.element_size() < 4 &&
           std::strcmp(recipe.handle.schema().name().c_str(), "aten::_to_copy") == 0;
}

/* Who holds the references to the storage that the operator has left behind. */
void note_saver(Registry &r, const std::shared_ptr<Made> &made, const at::Tensor &tensor) {
    const auto &node = tensor.grad_fn();
    if (node == nullptr) {
        made->refused = true; /* somebody else */
        return;
    }
    made->own.node = WeakNode(node);
    made->own.key = node_key(node->sequence_nr(), node->thread_id());
    r.savers[made->own.key].push_back(made);
}

void read_by(Registry &r, const std::shared_ptr<Recipe> &recipe) {
    for (const Input &input : recipe->inputs) {
        const auto storage = input.storage.lock();
        if (storage == nullptr) continue;
        auto &list = r.readers[storage.get()];
        /* Lists of parameters grow with every step: what is gone goes when they double. */
        if (list.size() >= 64 && (list.size() & (list.size() - 1)) == 0) {
            list.erase(std::remove_if(list.begin(), list.end(),
                                      [](const auto &each) { return each.expired(); }),
                       list.end());
        }
        list.push_back(recipe);
    }
}

} // namespace

void recompute_captured(const std::shared_ptr<Recipe> &recipe,
                        c10::ArrayRef<c10::IValue> outputs, const std::vector<tp_addr> &born) {
    Registry &r = registry();
    const Guard guard(r.mutex);
    uint32_t ordinal = 0;
    const auto [node, key] = first_node(outputs);
    std::vector<std::shared_ptr<Made>> made;
    const auto note = [&](const at::Tensor &tensor) {
        const uint32_t number = ordinal++;
        recipe->outputs.emplace_back();
        const c10::Storage *storage = storage_of_tensor(tensor);
        if (storage == nullptr) return;
        c10::DispatchKeySet keys;
        const tp_addr addr = addr_of_storage(storage->unsafeGetStorageImpl());
        if (std::find(born.begin(), born.end(), addr) == born.end()) return;
        if (!plain_keys(tensor.unsafeGetTensorImpl()->key_set(), &keys)) return;
        if (storage->device() != recipe->stream.device()) return; /* copied from the host */
        if (r.live.count(addr) != 0) { /* two results in one storage */
            r.live[addr]->refused = true;
            return;
        }
        auto one = std::make_shared<Made>(storage->getWeakStorageImpl());
        one->recipe = recipe;
        one->output = number;
        one->core = tp_core_owning(addr);
        one->addr = addr;
        one->bytes = storage->unsafeGetStorageImpl()->nbytes();
        one->own.count = storage->use_count() - 1;
        one->cast_of_leaf = is_cast_of_leaf(*recipe, tensor);
        Known &known = add_tensor(*one, tensor);
        if (one->own.count > 0) note_saver(r, one, tensor);
        if (key != 0 && tensor.use_count() > kReturned) {
            add_save(r, one, known, {node, key, tensor.use_count() - kReturned});
        }
        recipe->outputs.back() = one;
        r.live.emplace(addr, one);
        made.push_back(std::move(one));
    };
    for (const c10::IValue &output : outputs) each_tensor(output, note);
    if (!made.empty()) read_by(r, recipe);
    sweep(r.readers, r.readers_limit);
    sweep(r.savers, r.savers_limit);
    count_tracked(r);
}

bool recompute_knows(c10::ArrayRef<const c10::IValue> inputs) {
    Registry &r = registry();
    const Guard guard(r.mutex);
    bool known = false;
    for (const c10::IValue &input : inputs) {
        each_tensor(input, [&](const at::Tensor &tensor) {
            const c10::Storage *storage = storage_of_tensor(tensor);
            known = known || (storage != nullptr &&
                              live_at(r, storage->unsafeGetStorageImpl()) != nullptr);
        });
        if (known) return true;
    }
    return false;
}

void recompute_note_views(c10::ArrayRef<c10::IValue> outputs) {
    Registry &r = registry();
    const Guard guard(r.mutex);
    for (const c10::IValue &output : outputs) {
        each_tensor(output, [&](const at::Tensor &tensor) {
            const c10::Storage *storage = storage_of_tensor(tensor);
            if (storage == nullptr) return;
            const auto *made = live_at(r, storage->unsafeGetStorageImpl());
            if (made != nullptr && !(*made)->refused) add_tensor(**made, tensor);
        });
    }
}

namespace {

const void *this_thread() {
    thread_local const char mark = 0;
    return &mark;
}

/* Visits operands with whether that reference ends before the operator does. Where they are boxed for the
 * hook those are copies, which end with the callback; else they are the stack's, which the
 * operator takes. But lists may be the caller's own. */
template <class Visit>
void each_operand(c10::ArrayRef<const c10::IValue> inputs, const Visit &visit) {
    for (const c10::IValue &input : inputs) {
        const bool ends = !input.isList() || input.use_count() == 1;
        each_tensor(input, [&](const at::Tensor &tensor) { visit(tensor, ends); });
    }
}

} // namespace

void recompute_count_before(c10::ArrayRef<const c10::IValue> inputs,
                            std::vector<Counted> &out) {
    if (rerunning || !runs_alone()) return;
    Registry &r = registry();
    const Guard guard(r.mutex);
    const void *here = this_thread();
    bool python = false;
    const auto note = [&](const at::Tensor &tensor, bool ends) {
        const c10::Storage *storage = storage_of_tensor(tensor);
        python = python || (tensor.defined() && tensor.key_set().has_any(c10::python_ks));
        if (storage == nullptr) return;
        const tp_addr addr = addr_of_storage(storage->unsafeGetStorageImpl());
        const auto found = addr != 0 ? r.live.find(addr) : r.live.end();
        const c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
        Known *known = found != r.live.end() ? find_tensor(*found->second, impl) : nullptr;
        if (known == nullptr) return;
        /* What one thread counts another may have had in passing. */
        known->shared = known->shared || (known->thread != nullptr && known->thread != here);
        known->thread = here;
        for (Counted &counted : out) {
            if (counted.tensor._unsafe_get_target() != impl) continue;
            counted.before -= ends;
            return;
        }
        out.push_back({WeakTensor(tensor.getIntrusivePtr()), addr, tensor.use_count() - ends});
    };
    each_operand(inputs, note);
    if (python) out.clear(); /* their class may keep any of them */
}

void recompute_count_after(const std::vector<Counted> &counted,
                           c10::ArrayRef<c10::IValue> outputs) {
    const auto [node, key] = first_node(outputs);
    if (key == 0) return; /* nothing is saved */
    Registry &r = registry();
    const Guard guard(r.mutex);
    for (const Counted &each : counted) {
        const size_t after = each.tensor.use_count();
        const auto found = r.live.find(each.addr);
        if (after <= each.before || found == r.live.end()) continue;
        Known *known = find_tensor(*found->second, each.tensor._unsafe_get_target());
        if (known == nullptr) continue;
        add_save(r, found->second, *known, {node, key, after - each.before});
    }
}

namespace {

/* ---- running again -------------------------------------------------------------------------- */

std::string name_of(const Recipe &recipe) {
    return c10::toString(recipe.handle.operator_name());
}

/* A dead input that was made again for others, while one bring_back runs. */
using Again = std::unordered_map<const Made *, at::Tensor>;

at::Tensor tensor_of(const c10::Storage &storage, const Geometry &geometry) {
    auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), geometry.keys,
                                                           geometry.dtype);
    c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(geometry.sizes, geometry.strides, geometry.offset);
    if (geometry.wrapped_number) impl->set_wrapped_number(true);
    return tensor;
}

/* No hooks, no autograd, no autocast, no modes; the settings and the stream of the first time. */
class Quiet {
  public:
    explicit Quiet(const Recipe &recipe)
        : keys_(c10::DispatchKeySet(c10::DispatchKey::BackendSelect),
                c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                    c10::autocast_dispatch_keyset | c10::python_ks),
          device_(recipe.stream.device()), first_(recipe.stream),
          now_(current_stream(recipe.stream.device())), grad_mode_(recipe.grad_mode),
          numerics_(in_force(kRuleNumerics) ? recipe.numerics : Numerics::now()) {
        rerunning = true;
        tp_bind_keep_python_out(true);
        /* Whoever reads the leaves here has not waited for who wrote them there. */
        if (now_ != first_) order(first_, now_);
    }
    ~Quiet() {
        try { /* Small ones are PyTorch's own: who takes their memory there has to wait, too. */
            if (now_ != first_) order(now_, first_);
        } catch (...) {
            /* The device is lost: the next call says so. */
        }
        rerunning = before_;
        tp_bind_keep_python_out(before_);
    }
    Quiet(const Quiet &) = delete;
    Quiet &operator=(const Quiet &) = delete;

  private:
    static void order(const c10::Stream &before, const c10::Stream &behind) {
        c10::Event event(before.device_type());
        event.record(before);
        event.block(behind);
    }

    const bool before_ = rerunning;
    const at::DisableRecordFunctionGuard no_hooks_;
    const c10::impl::ForceDispatchKeyGuard keys_;
    const c10::OptionalDeviceGuard device_;
    const c10::Stream first_, now_;
    const c10::AutoGradMode grad_mode_;
    const NumericsGuard numerics_;
};

void bring_back_or_throw(std::shared_ptr<Made> made, Again &again, bool for_operator);

std::vector<at::Tensor> execute(const std::shared_ptr<Recipe> &recipe, Again &again);

c10::Storage bytes_of(const Input &input, Again &again) {
    auto storage = input.storage.lock();
    if (storage != nullptr) {
        auto made = dropped_made(storage.get());
        if (made != nullptr) bring_back_or_throw(std::move(made), again, true);
        const bool empty = addr_of_storage(storage.get()) == 0 && input.bytes > 0;
        if (storage->nbytes() != input.bytes || empty) {
            throw std::runtime_error("the storage of an input has been resized");
        }
        return c10::Storage(std::move(storage));
    }
    if (input.made == nullptr) throw std::runtime_error("an input is gone");
    const auto found = again.find(input.made.get());
    if (found != again.end()) return found->second.storage();
    const auto outputs = execute(input.made->recipe, again);
    const at::Tensor &tensor = outputs.at(input.made->output);
    again.emplace(input.made.get(), tensor);
    return tensor.storage();
}

/* The tensors that the operator returns, made once more. Throws what it throws. */
std::vector<at::Tensor> execute(const std::shared_ptr<Recipe> &recipe, Again &again) {
    if (!recipe->valid) throw std::runtime_error("an input has been written since");
    torch::jit::Stack stack = recipe->stack;
    for (size_t i = 0; i < stack.size(); i++) {
        if (stack[i].isList()) stack[i] = stack[i].toList().copy();
    }
    std::vector<CallOperand> operands;
    for (const Input &input : recipe->inputs) {
        at::Tensor tensor = tensor_of(bytes_of(input, again), input.geometry);
        operands.push_back({tensor, false});
        if (input.item < 0) {
            stack[input.argument] = std::move(tensor);
        } else {
            stack[input.argument].toList().set(static_cast<size_t>(input.item),
                                               std::move(tensor));
        }
    }
    const Quiet quiet(*recipe);
    const HookCall call(kCallReruns, operands);
    operands.clear();
    recipe->handle.callBoxed(stack);
    if (!trying) table_ran_again(name_of(*recipe));
    std::vector<at::Tensor> outputs;
    for (const c10::IValue &value : stack) {
        each_tensor(value, [&outputs](const at::Tensor &each) { outputs.push_back(each); });
    }
    return outputs;
}

/* The storage has its bytes again, at `data`: nothing stands for them any more. The core's note of them is
 * returned; what a rerun would have read goes to `leaves`. The registry is held. */
tp_dropped *put_back(Registry &r, const std::shared_ptr<Made> &made, c10::StorageImpl *storage,
                     c10::DataPtr &&data, std::vector<c10::Storage> &leaves) {
    Dropped *dropped = made->dropped;
    tp_dropped *token = dropped->token;
    forget_dependents(r, dropped);
    hold_leaves(r, dropped, -1);
    leaves.swap(dropped->leaves);
    r.dropped.erase(dropped);
    made->addr = reinterpret_cast<tp_addr>(data.get());
    made->dropped = nullptr;
    give_pointer(storage, std::move(data));
    delete dropped;
    return token;
}

/* The bytes of `tensor` become those of the dropped storage. */
void take_over(const std::shared_ptr<Made> &made, const at::Tensor &tensor) {
    Registry &r = registry();
    std::vector<c10::Storage> leaves; /* let go of with nothing held */
    const Guard guard(r.mutex);
    const auto storage = made->storage.lock();
    if (storage == nullptr || made->dropped == nullptr) return;
    c10::StorageImpl *from = tensor.storage().unsafeGetStorageImpl();
    c10::DataPtr data = from->set_data_ptr(c10::DataPtr(nullptr, from->device()));
    tp_dropped *token = put_back(r, made, storage.get(), std::move(data), leaves);
    if (tp_core_owning(made->addr) == made->core) {
        tp_bring_back(made->core, token, made->addr, stream_for(storage.get()));
    } else {
        tp_drop_end(made->core, token); /* somewhere else, with other owners */
    }
    count_tracked(r);
}

/* The bytes of a parked storage are in a block again: the storage has it. The core has forgotten its note. */
void take_block(const std::shared_ptr<Made> &made, tp_addr addr) {
    Registry &r = registry();
    std::vector<c10::Storage> none;
    const Guard guard(r.mutex);
    const auto storage = made->storage.lock();
    void *ptr = reinterpret_cast<void *>(addr);
    c10::DataPtr data(ptr, ptr, made->dropped->deleter, storage->device());
    (void)put_back(r, made, storage.get(), std::move(data), none);
    r.live.emplace(addr, made);
    count_tracked(r);
}

/* Throws what an allocation throws. */
void unpark_or_throw(const std::shared_ptr<Made> &made, const c10::StorageImpl &storage,
                     bool for_operator) {
    tp_oom oom{};
    oom.requested_bytes = made->bytes;
    tp_error error{};
    tp_addr addr = 0;
    const tp_status status = tp_unpark(made->core, made->dropped->token, stream_for(&storage),
                                       !for_operator, &addr, &oom, &error);
    if (status != TP_OK) throw_alloc_error(slot_of(storage.device()), oom, error);
    take_block(made, addr);
}

/* What is parked has its bytes, and its own way back. */
bool is_to_be_made(const Made &made) {
    const Guard guard(registry().mutex);
    return made.dropped != nullptr && made.dropped->deleter == nullptr;
}

/* Also what else the recipe makes. Throws what the operator throws; the storage says why then. `made` may be
 * the last to hold what it stands for. */
void bring_back_or_throw(std::shared_ptr<Made> made, Again &again, bool for_operator) {
    c10::intrusive_ptr<c10::StorageImpl> alive; /* let go of with nothing held */
    const Guard lock(rerun_mutex());
    bool parked = false;
    {
        const Guard guard(registry().mutex);
        alive = made->storage.lock();
        if (alive == nullptr || made->dropped == nullptr) return;
        parked = made->dropped->deleter != nullptr;
    }
    try {
        if (tp_capturing(made->core)) {
            /* What a graph makes is there when it is replayed. */
            throw std::runtime_error("a stream is being captured");
        }
        if (parked) {
            unpark_or_throw(made, *alive, for_operator);
            return;
        }
        const auto recipe = made->recipe;
        const auto outputs = execute(recipe, again);
        for (size_t i = 0; i < outputs.size() && i < recipe->outputs.size(); i++) {
            const auto its = recipe->outputs[i].lock();
            if (its == nullptr || !is_to_be_made(*its)) continue;
            if (outputs[i].storage().nbytes() != its->bytes) {
                throw std::runtime_error("it has made a tensor of another size");
            }
            take_over(its, outputs[i]);
        }
    } catch (const std::exception &error) {
        const auto *known = dynamic_cast<const c10::Error *>(&error);
        const std::string why =
            known != nullptr ? known->what_without_backtrace() : error.what();
        const Guard guard(registry().mutex);
        registry().counts.failed_reruns++;
        const auto storage = made->storage.lock();
        if (storage != nullptr && made->dropped != nullptr) {
            refuse_pointer(storage.get(), parked
                                              ? kParked + ("bringing them back failed: " + why)
                                              : kGivenUp + ("making them failed: " + why));
        }
        throw;
    }
}

/* False: it could not. */
bool bring_back(const std::shared_ptr<Made> &made, bool for_operator) {
    Again again;
    try {
        bring_back_or_throw(made, again, for_operator);
        return true;
    } catch (const c10::OutOfMemoryError &error) {
        if (!for_operator) return false;
        no_memory = std::string("torchpager gave up bytes of a tensor that this operator uses, "
                                "which can be made again, and there is no memory for that: ") +
                    error.what_without_backtrace();
        tp_bind_ask();
        lacks_memory = true;
    } catch (const std::exception &) {
        /* Whoever asks for the pointer is told. */
    }
    return false;
}

/* ---- whether a storage may be dropped --------------------------------------------------------- */

/* Not by locking the weak reference: a second one to a tensor that Python has counts there. */
bool is_held_by_python(const WeakTensor &tensor) {
    const c10::impl::PyObjectSlot *slot = tensor._unsafe_get_target()->pyobj_slot();
    if (slot->load_pyobj() == nullptr) return false;
    /* One reference to the object is the tensor's own, if anybody else has the tensor. */
    return tensor.use_count() < 2 || !slot->has_unique_reference();
}

/* Nobody has a reference to the tensor but autograd, views of it, and its own object, which Python has none
 * to. */
bool is_only_saved(const Made &made, const Known &known) {
    if (known.shared) return false;
    const c10::TensorImpl *impl = known.tensor._unsafe_get_target();
    size_t count = impl->pyobj_slot()->load_pyobj() != nullptr;
    /* Its cache is emptied when it is left. */
    if (made.cast_of_leaf && at::autocast::is_autocast_enabled(impl->device().type())) count++;
    for (const Save &save : known.saves) {
        if (!save.node.expired()) count += save.count;
    }
    for (const Known &view : made.tensors) {
        if (view.base == impl && view.tensor.use_count() > 0) count += view.base_count;
    }
    return known.tensor.use_count() <= count;
}

/* A tensor may have been given another storage. */
bool is_over(const Known &known, const Made &made) {
    const c10::Storage &storage = known.tensor._unsafe_get_target()->unsafe_storage();
    return storage && storage.unsafeGetStorageImpl() == made.storage._unsafe_get_target();
}

/* Every tensor over the storage is known, and who has it. */
bool is_out_of_reach(const Made &made, size_t use_count) {
    const bool saved = !made.own.node.expired() || !in_force(kRuleSaved);
    size_t count = made.held + (saved ? made.own.count : 0);
    for (const Known &known : made.tensors) {
        if (known.tensor.use_count() == 0 || !is_over(known, made)) continue;
        if (in_force(kRulePython) && is_held_by_python(known.tensor)) return false;
        if (in_force(kRuleCounted) && !is_only_saved(made, known)) return false;
        count++;
    }
    return use_count <= count || !in_force(kRuleHolders);
}

/* Whether the recipe would find what it needs, which is added to `leaves`. */
bool finds_inputs(Registry &r, const Recipe &recipe, uint32_t depth,
                  std::vector<c10::Storage> &leaves) {
    if (!recipe.valid) return false;
    for (const Input &input : recipe.inputs) {
        auto storage = input.storage.lock();
        if (storage == nullptr) {
            if (input.made == nullptr || depth >= kChainMax) return false;
            if (!finds_inputs(r, *input.made->recipe, depth + 1, leaves)) return false;
            continue;
        }
        const tp_addr addr = addr_of_storage(storage.get());
        const bool same = addr == input.addr || dropped_of(storage.get()) != nullptr ||
                          (input.made != nullptr && input.made->addr == addr);
        if (!same || storage->nbytes() != input.bytes) return false;
        leaves.emplace_back(std::move(storage));
    }
    return true;
}

at::Tensor raw(const c10::Storage &storage, size_t offset, size_t bytes) {
    Geometry geometry;
    geometry.sizes = {static_cast<int64_t>(bytes)};
    geometry.strides = {1};
    geometry.offset = static_cast<int64_t>(offset);
    geometry.dtype = caffe2::TypeMeta::Make<uint8_t>();
    geometry.keys = c10::DispatchKeySet(storage.device().is_cuda() ? c10::DispatchKey::CUDA
                                                                   : c10::DispatchKey::CPU);
    return tensor_of(storage, geometry);
}

constexpr size_t kComparedBytes = size_t{32} << 20;

/* What this thread allocates holds `byte`. */
class Filler {
  public:
    explicit Filler(unsigned char byte) { tp_bind_set_filler(byte); }
    ~Filler() { tp_bind_set_filler(0); }
    Filler(const Filler &) = delete;
    Filler &operator=(const Filler &) = delete;
};

/* Reruns of this thread are no reruns. */
class Trying {
  public:
    Trying() { trying = true; }
    ~Trying() { trying = false; }
    Trying(const Trying &) = delete;
    Trying &operator=(const Trying &) = delete;
};

/* Runs the recipe beside the kept result. Waits for the device. */
bool makes_the_same_in(const std::shared_ptr<Made> &made, const c10::Storage &kept,
                       unsigned char byte) {
    Again again;
    std::vector<at::Tensor> outputs;
    {
        const Filler filler(byte);
        const Trying now;
        outputs = execute(made->recipe, again);
    }
    if (outputs.size() <= made->output) return false;
    const c10::Storage &fresh = outputs[made->output].storage();
    if (fresh.nbytes() != kept.nbytes()) return false;
    /* In pieces: on CUDA a comparison makes a byte for each byte first. */
    for (size_t at = 0; at < kept.nbytes(); at += kComparedBytes) {
        const size_t bytes = std::min(kComparedBytes, kept.nbytes() - at);
        const at::Tensor a = raw(fresh, at, bytes), b = raw(kept, at, bytes);
        const Quiet quiet(*made->recipe);
        const HookCall call(kCallReruns, {{a, false}, {b, false}});
        if (!at::equal(a, b)) return false;
    }
    return true;
}

/* What an operator leaves as it finds it (padding, a workspace) may be the same by chance, where
 * memory is fresh from the system, or has held the very same before. It cannot be the same in
 * memory that holds one thing and in memory that holds another. */
Trial makes_the_same(const std::shared_ptr<Made> &made) {
    const auto storage = made->storage.lock();
    if (storage == nullptr) return Trial::DIFFERENT;
    const c10::Storage kept(storage);
    try {
        const Guard lock(rerun_mutex());
        const bool same =
            makes_the_same_in(made, kept, 0x55) && makes_the_same_in(made, kept, 0xaa);
        return same ? Trial::SAME : Trial::DIFFERENT;
    } catch (const c10::OutOfMemoryError &) {
        return Trial::NO_MEMORY;
    } catch (...) {
        return Trial::DIFFERENT;
    }
}

/* Each kind of recipe is tried until that is decided. */
bool is_trusted(const std::shared_ptr<Made> &made) {
    if (!in_force(kRuleTrial)) return true;
    Registry &r = registry();
    const uint64_t kind = mixed(made->recipe->kind, made->output);
    {
        const Guard guard(r.mutex);
        const Kind &its = r.kinds[kind];
        if (its.is_decided()) return its.last == Trial::SAME;
    }
    const Trial result = makes_the_same(made);
    const Guard guard(r.mutex);
    Kind &its = r.kinds[kind];
    its.last = result;
    its.tries++;
    r.counts.trials++;
    r.counts.failed_trials += result != Trial::SAME;
    return result == Trial::SAME;
}

enum class Drop { DONE, LATER, NEVER };
struct Tried {
    Drop what;
    Kept why = Kept::BUSY; /* not DONE */
};

/* The registry is held. */
Drop swap_out(Registry &r, const std::shared_ptr<Made> &made, c10::StorageImpl *storage,
              std::vector<c10::Storage> &leaves, bool park) {
    auto dropped = std::make_unique<Dropped>();
    dropped->made = made;
    for (const c10::Storage &leaf : leaves) r.dependents[leaf.unsafeGetStorageImpl()];
    c10::DataPtr &slot = storage->_mutable_data_ptr_no_checks();
    if (park && slot.get_context() != slot.get()) return Drop::NEVER;
    std::string why = std::string(park ? kParked : kGivenUp) +
                      "code that it does not see, or a forked child, has asked for them: "
                      "torchpager.pin() keeps a tensor as it is";
    /* The core is asked first: an operator in progress, whose block stays, may be reading the pointer,
     * and others come by it once the registry is free. */
    tp_error error{};
    const tp_status status =
        park ? tp_park(made->core, made->addr, &dropped->token, &error)
             : tp_drop(made->core, made->addr, stream_for(storage), &dropped->token, &error);
    if (status != TP_OK) return status == TP_BUSY ? Drop::LATER : Drop::NEVER;
    c10::DataPtr data(nullptr, dropped.get(), &dropped_ended, slot.device());
    std::swap(data, slot);
    refuse_pointer(storage, std::move(why));
    if (park) dropped->deleter = data.get_deleter();
    (void)data.release_context(); /* the block is free, or will be */
    for (const c10::Storage &leaf : leaves) {
        r.dependents[leaf.unsafeGetStorageImpl()].push_back(made.get());
    }
    dropped->leaves.swap(leaves);
    hold_leaves(r, dropped.get(), 1);
    r.live.erase(made->addr);
    made->addr = 0;
    made->dropped = dropped.get();
    r.dropped.insert(dropped.release());
    count_tracked(r);
    return Drop::DONE;
}

/* The same, unless an operator is about to pin what it uses. */
Drop let_go(Registry &r, const std::shared_ptr<Made> &made, c10::StorageImpl *storage,
            std::vector<c10::Storage> &leaves, bool park) {
    dropping.store(true);
    const Drop result =
        holds.load() == 0 ? swap_out(r, made, storage, leaves, park) : Drop::LATER;
    dropping.store(false);
    return result;
}

/* Without a recipe that would find its inputs: the bytes are kept. */
Tried try_park(const std::shared_ptr<Made> &made) {
    Registry &r = registry();
    std::vector<c10::Storage> none;
    c10::intrusive_ptr<c10::StorageImpl> storage = made->storage.lock();
    if (tp_capturing(made->core)) return {Drop::LATER};
    const Guard guard(r.mutex);
    if (storage == nullptr || made->addr == 0) return {Drop::NEVER};
    if (made->refused) return {Drop::NEVER, Kept::SEEN};
    if (!is_out_of_reach(*made, storage.use_count() - 1)) return {Drop::LATER, Kept::HELD};
    return {let_go(r, made, storage.get(), none, true)};
}

/* Whether it may go now, but for a trial. The registry is held. */
Tried may_drop(Registry &r, const std::shared_ptr<Made> &made, size_t use_count,
               std::vector<c10::Storage> &leaves) {
    if (made->addr == 0) return {Drop::NEVER};
    if (made->refused) return {Drop::NEVER, Kept::SEEN};
    if (in_force(kRuleNumerics) && !(made->recipe->numerics == Numerics::now())) {
        return {Drop::NEVER, Kept::SETTINGS};
    }
    if (made->recipe->valid && !is_out_of_reach(*made, use_count)) {
        r.counts.refused_held++;
        return {Drop::LATER, Kept::HELD};
    }
    if (!finds_inputs(r, *made->recipe, 0, leaves)) {
        r.counts.refused_inputs++;
        return {Drop::NEVER, Kept::INPUTS};
    }
    return {Drop::DONE};
}

/* With nothing held. */
Tried try_drop(const std::shared_ptr<Made> &made) {
    Registry &r = registry();
    std::vector<c10::Storage> leaves; /* let go of with nothing held */
    c10::intrusive_ptr<c10::StorageImpl> storage = made->storage.lock();
    if (storage == nullptr) return {Drop::NEVER};
    if (tp_capturing(made->core)) return {Drop::LATER}; /* nor is anything tried */
    {
        const Guard guard(r.mutex);
        const Tried before = may_drop(r, made, storage.use_count() - 1, leaves);
        if (before.what != Drop::DONE) return before;
        leaves.clear();
    }
    if (!is_trusted(made)) return {Drop::NEVER, Kept::TRIAL};
    const Guard guard(r.mutex);
    const Tried behind = may_drop(r, made, storage.use_count() - 1, leaves);
    if (behind.what != Drop::DONE) return behind;
    return {let_go(r, made, storage.get(), leaves, false)};
}

/* Tells of what has been tried; true: it is to be tried once more. */
bool note_tried(const Made &made, const Pending &pending, Tried tried) {
    const bool again = tried.what == Drop::LATER && pending.tries > 1;
    if (tried.what == Drop::DONE) {
        table_gave_up(name_of(*made.recipe), made.bytes, pending.park);
    } else if (!again && made.addr != 0) {
        table_kept(name_of(*made.recipe), made.bytes, tried.why);
    }
    return again;
}

/* Those that are due, but what is used now. */
void try_pending(const std::vector<Touch> &touches) {
    Registry &r = registry();
    const int how = mode.load(std::memory_order_relaxed);
    const bool forced = how == kRecomputeForced || how == kRecomputeParked;
    if (!forced && !r.has_pending.load(std::memory_order_relaxed)) return;
    std::vector<Pending> due, later;
    {
        const Guard guard(r.mutex);
        due.swap(r.pending);
        for (const auto &entry : r.live) {
            if (forced) due.push_back({entry.second, 0, how == kRecomputeParked});
        }
    }
    for (Pending &each : due) {
        const auto made = each.made.lock();
        if (made == nullptr || made->addr == 0) continue;
        const bool busy = std::any_of(touches.begin(), touches.end(), [&](const Touch &touch) {
            return addr_of_storage(touch.storage) == made->addr;
        });
        const Tried tried = busy        ? Tried{Drop::LATER}
                            : each.park ? try_park(made)
                                        : try_drop(made);
        if (note_tried(*made, each, tried)) later.push_back({made, each.tries - 1, each.park});
    }
    const Guard guard(r.mutex);
    for (Pending &each : later) r.pending.push_back(std::move(each));
    r.has_pending.store(!r.pending.empty(), std::memory_order_relaxed);
}

/* ---- before others use, or write -------------------------------------------------------------- */

/* What is about to be written: what was made of it comes back, and cannot be made any more. */
void before_write(c10::StorageImpl *storage) {
    if (!in_force(kRuleLeafWrite)) return;
    Registry &r = registry();
    std::vector<std::shared_ptr<Made>> back;
    {
        const Guard guard(r.mutex);
        const auto found = r.dependents.find(storage);
        if (found != r.dependents.end()) {
            for (const Made *made : found->second) back.push_back(made->dropped->made);
        }
    }
    for (const auto &made : back) (void)bring_back(made, false);
    std::shared_ptr<Made> written; /* let go of with nothing held */
    std::vector<Known> gone;
    const Guard guard(r.mutex);
    const auto readers = r.readers.find(storage);
    if (readers != r.readers.end()) {
        for (const auto &weak : readers->second) {
            if (const auto recipe = weak.lock()) recipe->valid = false;
        }
        r.readers.erase(readers);
    }
    const auto live = r.live.find(addr_of_storage(storage));
    if (live == r.live.end()) return;
    written = live->second;
    r.live.erase(live);
    written->addr = 0;
    gone.swap(written->tensors);
    count_tracked(r);
}

/* False: something is dropped still. */
bool bring_back_touched(const std::vector<Touch> &touches, bool for_operator) {
    bool all = true, writes = false;
    for (const Touch &touch : touches) {
        writes = writes || touch.write;
        if (C10_LIKELY(addr_of_storage(touch.storage) != 0)) continue;
        const auto made = dropped_made(touch.storage);
        if (made != nullptr) all = bring_back(made, for_operator) && all;
    }
    for (const Touch &touch : touches) {
        if (writes && touch.write) before_write(touch.storage);
    }
    return all;
}

} // namespace

bool recompute_before_operator(const std::vector<Touch> &touches) {
    if (rerunning || disabled.load()) return true;
    try {
        try_pending(touches);
        return bring_back_touched(touches, true);
    } catch (const std::bad_alloc &) {
        return false;
    }
}

bool recompute_any_dropped(const std::vector<Touch> &touches) {
    return std::any_of(touches.begin(), touches.end(),
                       [](const Touch &touch) { return dropped_of(touch.storage) != nullptr; });
}

bool recompute_before_region(const std::vector<Touch> &touches) {
    if (rerunning || disabled.load()) return true;
    try {
        const bool all = bring_back_touched(touches, false);
        if (!in_force(kRuleRegion)) return all;
        Registry &r = registry();
        const Guard guard(r.mutex);
        for (const Touch &touch : touches) {
            const auto *made = live_at(r, touch.storage);
            if (made != nullptr) (*made)->refused = true;
        }
        return all;
    } catch (const std::bad_alloc &) {
        return false;
    }
}

const char *recompute_lacks_memory() {
    return C10_UNLIKELY(lacks_memory) && !rerunning ? no_memory.c_str() : nullptr;
}

void recompute_forget_memory() { lacks_memory = false; }

void recompute_node_runs(uint64_t sequence, uint64_t thread) {
    Registry &r = registry();
    const Guard guard(r.mutex);
    const auto found = r.savers.find(node_key(sequence, thread));
    if (found == r.savers.end()) return;
    for (const auto &weak : found->second) {
        const auto made = weak.lock();
        if (made == nullptr || !in_force(kRuleSaved)) continue;
        if (made->own.key == found->first) made->own.count = 0;
        for (Known &known : made->tensors) {
            for (Save &save : known.saves)
                if (save.key == found->first) save.count = 0;
        }
    }
    r.savers.erase(found);
}

void recompute_forget_tensor(const at::Tensor &tensor) {
    const c10::Storage *storage = storage_of_tensor(tensor);
    if (storage == nullptr) return;
    (void)recompute_before_region({{storage->unsafeGetStorageImpl(), false}});
    std::vector<Known> gone; /* let go of with nothing held */
    Registry &r = registry();
    const Guard guard(r.mutex);
    const auto *made = live_at(r, storage->unsafeGetStorageImpl());
    if (made == nullptr) return;
    (*made)->refused = true;
    gone.swap((*made)->tensors);
}

bool recompute_region_matters() { return in_force(kRuleRegion); }

bool recompute_kernels_matter() { return in_force(kRuleKernel); }

void recompute_rules_off(uint32_t mask) {
    rules_off.store(mask);
    const Guard guard(registry().mutex);
    registry().kinds.clear();
}

RecomputeHold::RecomputeHold() : counted_(!rerunning) {
    if (!counted_) return;
    holds.fetch_add(1);
    /* Whoever drops now has not seen us: it is a matter of microseconds. */
    if (dropping.load()) {
        const Guard guard(registry().mutex);
    }
}

RecomputeHold::~RecomputeHold() {
    if (counted_) holds.fetch_sub(1);
}

void recompute_drop(tp_core *core, tp_addr addr, bool park) {
    try {
        Registry &r = registry();
        const Guard guard(r.mutex);
        const auto found = r.live.find(addr);
        if (found == r.live.end() || found->second->core != core) return;
        r.pending.push_back({found->second, kTries, park});
        r.has_pending.store(true, std::memory_order_relaxed);
    } catch (const std::bad_alloc &) {
        return; /* it stays */
    }
}

void recompute_freed(tp_addr addr) {
    Registry &r = registry();
    std::shared_ptr<Made> gone; /* let go of with nothing held */
    const Guard guard(r.mutex);
    const auto found = r.live.find(addr);
    if (found == r.live.end()) return;
    gone = found->second;
    r.live.erase(found);
    gone->addr = 0;
    count_tracked(r);
}

bool recompute_bring_all_back(tp_core *core) {
    Registry &r = registry();
    std::vector<std::shared_ptr<Made>> back;
    {
        const Guard guard(r.mutex);
        for (const Dropped *dropped : r.dropped) {
            if (core == nullptr || dropped->made->core == core) back.push_back(dropped->made);
        }
    }
    bool all = true;
    for (const auto &made : back) all = bring_back(made, false) && all;
    return all;
}

RecomputeMode recompute_mode() {
    return static_cast<RecomputeMode>(mode.load(std::memory_order_relaxed));
}

void recompute_set_mode(RecomputeMode wanted) {
    mode.store(wanted);
    if (wanted != kRecomputeOff) return;
    {
        const Guard guard(registry().mutex);
        registry().pending.clear();
    }
    (void)recompute_bring_all_back(nullptr);
}

void recompute_disable_after_fork() { disabled.store(true); }

RecomputeCounts recompute_counts() {
    const Guard guard(registry().mutex);
    return registry().counts;
}

} // namespace torchpager
