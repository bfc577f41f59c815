/* The operator hook: tells the cores which blocks an operator is about to use.
 *
 * A frame is one operator in progress on one thread; frames form a stack. The start callback
 * pushes a frame, pins the operands that lie in our address space and lets the core make
 * them resident; the end callback unpins them and pops it. A block allocated while a frame
 * is open stays pinned until the outermost frame of the thread ends (tp_op_adopt), because
 * PyTorch's kernels use scratch tensors by raw pointer after the nested operator that made
 * them has returned.
 *
 * What is remembered of an operator is keyed by the addresses of its schema's name and
 * overload name. They identify it as long as the dispatcher's set of operators does not
 * change: only schemas owned by the dispatcher are remembered, and a registration listener,
 * called before any schema is destroyed and after any is created, makes every thread forget
 * all of them.
 *
 * Nothing here throws: PyTorch would log and swallow it, and the operator would run
 * unprotected. */
#include "bind/torch_hook.h"

#include <ATen/NestedTensorImpl.h>
#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/quantized/QTensorImpl.h>
#include <ATen/quantized/Quantizer.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <unordered_map>
#include <vector>

#include "bind/cores.h"
#include "bind/torch_collectives.h"
#include "bind/torch_recompute.h"

namespace torchpager {
namespace {

/* ---- what is known of operators by name -------------------------------------------------- */

/* aten operators that write to inputs their schema does not mark: all inputs count as
 * written. */
const char *const kWritesUnannotated[] = {
    /* running statistics */
    "aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm",
    "aten::batch_norm_update_stats", "aten::batch_norm_gather_stats",
    "aten::batch_norm_gather_stats_with_counts", "aten::batch_norm", "aten::instance_norm",
    "aten::_batch_norm_impl_index", "aten::_batch_norm_with_update",
    "aten::batch_norm_backward",
    /* dropout state; the reserve space of the backward pass */
    "aten::_cudnn_rnn", "aten::_cudnn_rnn_backward", "aten::_cudnn_rnn_flatten_weight",
    "aten::cudnn_batch_norm_backward", "aten::miopen_rnn", "aten::miopen_rnn_backward",
    "aten::miopen_batch_norm_backward", "aten::mkldnn_rnn_layer_backward", "aten::lstm_mps",
    "aten::_lstm_mps", "aten::lstm_mps_backward",
    /* observers and fake quantisation */
    "aten::_fused_moving_avg_obs_fq_helper", "aten::fused_moving_avg_obs_fake_quant",
    "aten::_saturate_weight_to_fp16", "aten::rrelu_with_noise",
    /* destination passed as an ordinary argument */
    "aten::_copy_from", "aten::_copy_from_and_resize", "aten::_propagate_xla_data",
    "aten::set_data"};

/* Composite operators (by registration) that read or write memory themselves. */
const char *const kCompositeThatTouches[] = {"aten::fbgemm_linear_int8_weight",
                                             "aten::fbgemm_linear_int8_weight_fp32_activation",
                                             "aten::fbgemm_linear_quantize_weight",
                                             "aten::fbgemm_pack_gemm_matrix_fp16",
                                             "aten::fbgemm_linear_fp16_weight",
                                             "aten::fbgemm_linear_fp16_weight_fp32_activation",
                                             "aten::fbgemm_pack_quantized_matrix",
                                             "aten::_saturate_weight_to_fp16",
                                             "aten::choose_qparams_optimized",
                                             "aten::_rowwise_prune",
                                             "aten::_sobol_engine_draw",
                                             "aten::_sobol_engine_ff_",
                                             "aten::_sobol_engine_initialize_state_",
                                             "aten::_sobol_engine_scramble_",
                                             "aten::_pad_packed_sequence",
                                             "aten::ctc_loss",
                                             "aten::quantile",
                                             "aten::nanquantile"};

/* Composite operators that call others, but read one small argument by pointer all the while.
 * That block becomes immovable; the other operands, and what is allocated meanwhile, page. */
struct PointerArgument {
    const char *name, *argument;
};
const PointerArgument kReadsByPointer[] = {
    {"aten::lstm", "batch_sizes"},
    {"aten::gru", "batch_sizes"},
    {"aten::rnn_tanh", "batch_sizes"},
    {"aten::rnn_relu", "batch_sizes"},
    {"aten::_pack_padded_sequence_backward", "batch_sizes"},
    {"aten::tensor_split", "tensor_indices_or_sections"}};

/* Operators that look at shapes only, though they have tensors among their inputs. */
const char *const kReadsNothing[] = {"aten::empty_like",
                                     "aten::new_empty",
                                     "aten::new_empty_strided",
                                     "aten::new_zeros",
                                     "aten::new_ones",
                                     "aten::new_full",
                                     "aten::zeros_like",
                                     "aten::ones_like",
                                     "aten::full_like",
                                     "aten::rand_like",
                                     "aten::randn_like",
                                     "aten::randint_like",
                                     "aten::size",
                                     "aten::sym_size",
                                     "aten::stride",
                                     "aten::sym_stride",
                                     "aten::sym_numel",
                                     "aten::sym_storage_offset",
                                     "aten::is_same_size",
                                     "aten::is_pinned",
                                     "aten::record_stream",
                                     "aten::is_set_to",
                                     "aten::is_coalesced",
                                     "aten::sparse_dim",
                                     "aten::dense_dim",
                                     "aten::_dimI",
                                     "aten::_dimV",
                                     "aten::_nnz",
                                     "aten::_has_same_storage_numel",
                                     "aten::_assert_tensor_metadata",
                                     "aten::set_",
                                     "aten::_backward"};

/* Operators whose result holds nothing yet. Who made it may be about to fill it by pointer, as
 * extensions and gloo's threads do: it counts as a tensor from its first use as an operand. */
const char *const kMakesEmpty[] = {"aten::empty",      "aten::empty_strided",
                                   "aten::empty_like", "aten::empty_permuted",
                                   "aten::new_empty",  "aten::new_empty_strided"};

/* Of gloo's sends and receives only wait() says that they are done. */
const char *const kPointToPoint[] = {"c10d::send", "c10d::recv_", "c10d::recv_any_source_"};

/* Copies its input although its schema says "view". */
const char *const kNotAView[] = {"aten::_sparse_broadcast_to"};

/* Of these, the ones that ask the storage for its address. */
const char *const kAsksForPointer[] = {"aten::is_pinned", "aten::record_stream", "aten::set_"};

template <size_t N> bool listed(const char *const (&list)[N], const char *name) {
    for (const char *item : list) {
        if (std::strcmp(item, name) == 0) return true;
    }
    return false;
}

/* "AddmmBackward0": a node that PyTorch generated. The nodes of Python functions end in
 * "Backward", those of C++ functions are named after their class. */
bool is_generated_node(const char *name) {
    const char *end = name + std::strlen(name);
    const char *digits = end;
    while (digits > name && digits[-1] >= '0' && digits[-1] <= '9') digits--;
    const size_t length = std::strlen("Backward");
    return digits != end && static_cast<size_t>(digits - name) >= length &&
           std::strncmp(digits - length, "Backward", length) == 0;
}

bool starts_with(const char *text, const char *start) {
    return std::strncmp(text, start, std::strlen(start)) == 0;
}

/* Custom functions of PyTorch itself that launch nothing by themselves: what they run, they run
 * through operators. And, in C++, nodes of that kind. */
const char *const kLaunchesNothing[] = {"CheckpointFunction",
                                        "BackwardHookFunction",
                                        "_DDPSink",
                                        "RegisterPreBackwardFunction",
                                        "RegisterPostBackwardFunction",
                                        "_ToTorchTensor",
                                        "_FromTorchTensor",
                                        "ViewBufferFromNested",
                                        "ViewNestedFromBuffer",
                                        "torch::autograd::AccumulateGrad",
                                        "torch::autograd::GraphRoot",
                                        "torch::autograd::CopySlices",
                                        "torch::autograd::CopyBackwards",
                                        "torch::autograd::Error",
                                        "torch::autograd::DelayedError",
                                        "torch::autograd::NotImplemented",
                                        "torch::autograd::UndefinedGrad",
                                        "torch::autograd::UndefinedGradBackward",
                                        "torch::autograd::Identity"};

/* Compiled graphs: what is in them announces its operands itself, or reads them wherever they
 * are, and writes to none but through operators. */
const char *const kCompiled[] = {"CompiledFunction", "Torch-Compiled Region"};

/* ---- what an operator does to its arguments ---------------------------------------------- */

struct ArgumentUse {
    uint32_t idx;
    bool write;
};

struct OperatorUse {
    size_t argument_count = 0, return_count = 0;
    bool frame = true;       /* false: it calls others, or makes views; nothing to do */
    bool exports = false;    /* it reads by pointer what nothing else announces: those operands
                                become immovable */
    bool collective = false; /* its work goes on after it has returned */
    bool waited_for = false; /* and on CPU tensors is done only once the program has waited */
    bool asks_for_pointer = false;         /* but neither reads nor writes */
    bool makes_empty = false;              /* see kMakesEmpty */
    bool view = false;                     /* it makes views */
    bool foreign = false;                  /* not PyTorch's own: nobody knows what it keeps */
    std::optional<c10::OperatorHandle> op; /* with what is known of running it again */
    Rerunnable rerun;
    uint32_t name = 0;                  /* tp_op.name */
    std::vector<ArgumentUse> arguments; /* those that can hold tensors */
};

bool holds_no_tensor(const c10::Type &type) {
    switch (type.kind()) {
    case c10::TypeKind::IntType:
    case c10::TypeKind::FloatType:
    case c10::TypeKind::BoolType:
    case c10::TypeKind::NumberType:
    case c10::TypeKind::ComplexType:
    case c10::TypeKind::StringType:
    case c10::TypeKind::NoneType:
    case c10::TypeKind::GeneratorType:
    case c10::TypeKind::DeviceObjType:
    case c10::TypeKind::StreamObjType:
    case c10::TypeKind::LayoutType:
    case c10::TypeKind::ScalarTypeType:
    case c10::TypeKind::MemoryFormatType:
    case c10::TypeKind::SymIntType:
    case c10::TypeKind::SymFloatType:
    case c10::TypeKind::SymBoolType: return true;
    case c10::TypeKind::ListType:
    case c10::TypeKind::OptionalType:
        for (const auto &inner : type.containedTypes()) {
            if (!holds_no_tensor(*inner)) return false;
        }
        return true;
    default: return false;
    }
}

bool is_written(const c10::Argument &argument) {
    return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

bool declares_writes(const c10::FunctionSchema &schema) {
    for (const auto &argument : schema.arguments()) {
        if (is_written(argument)) return true;
    }
    return false;
}

/* All returns alias an input and nothing is written. */
bool only_makes_views(const c10::FunctionSchema &schema) {
    /* What it says to autograd is that they do not. */
    if (schema.name() == "aten::_unsafe_view") return true;
    if (schema.returns().empty() || declares_writes(schema)) return false;
    for (const auto &result : schema.returns()) {
        if (result.alias_info() == nullptr) return false;
    }
    return !listed(kNotAView, schema.name().c_str());
}

bool only_calls_others(const c10::OperatorHandle &op) {
    const char *name = op.schema().name().c_str();
    if (std::strcmp(name, "aten::_backward") == 0) return true; /* a whole backward pass */
    return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
           !op.hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
           !op.hasKernelForDispatchKey(c10::DispatchKey::CUDA) &&
           !listed(kCompositeThatTouches, name);
}

void describe_pointers(const c10::FunctionSchema &schema, OperatorUse &use) {
    for (const PointerArgument &each : kReadsByPointer) {
        if (std::strcmp(each.name, schema.name().c_str()) != 0) continue;
        const auto idx = schema.argumentIndexWithName(each.argument);
        if (!idx.has_value()) continue; /* another overload */
        use.arguments.push_back({static_cast<uint32_t>(*idx), false});
        use.exports = true;
    }
}

OperatorUse describe(const c10::OperatorHandle &op) {
    const c10::FunctionSchema &schema = op.schema();
    const char *name = schema.name().c_str();
    const bool aten = starts_with(name, "aten::");
    OperatorUse use;
    use.argument_count = schema.arguments().size();
    use.return_count = schema.returns().size();
    use.name = tp_op_name((schema.name() + "." + schema.overload_name()).c_str());
    if (aten && (only_calls_others(op) || only_makes_views(schema))) {
        use.frame = false;
        use.view = only_makes_views(schema);
        describe_pointers(schema, use);
        return use;
    }
    use.foreign = !aten;
    use.makes_empty = aten && listed(kMakesEmpty, name);
    use.op = op;
    const bool unannotated = aten && listed(kWritesUnannotated, name);
    use.rerun = rerunnable(op, unannotated, use.makes_empty);
    use.asks_for_pointer = aten && listed(kAsksForPointer, name);
    if (aten && listed(kReadsNothing, name) && !use.asks_for_pointer) return use;
    use.collective = starts_with(name, "c10d::");
    use.waited_for = use.collective && listed(kPointToPoint, name);
    const bool all_written = aten ? unannotated : !declares_writes(schema);
    const auto &arguments = schema.arguments();
    for (uint32_t idx = 0; idx < arguments.size(); idx++) {
        if (holds_no_tensor(*arguments[idx].type())) continue;
        use.arguments.push_back(
            {idx, all_written || use.collective || is_written(arguments[idx])});
    }
    return use;
}

/* Counts how often the hook has been told to watch everything. */
std::atomic<uint64_t> full_since{1};

/* Counts changes of the dispatcher's set of operators. */
std::atomic<uint64_t> operator_set_version{1};

class OperatorSetListener final : public c10::OpRegistrationListener {
  public:
    void onOperatorRegistered(const c10::OperatorHandle &) override { operator_set_version++; }
    void onOperatorDeregistered(const c10::OperatorHandle &) override {
        operator_set_version++;
    }
};

struct OperatorKey {
    const char *name, *overload;
    bool operator==(const OperatorKey &other) const {
        return name == other.name && overload == other.overload;
    }
};

struct OperatorKeyHash {
    size_t operator()(const OperatorKey &key) const {
        const auto a = reinterpret_cast<uintptr_t>(key.name);
        const auto b = reinterpret_cast<uintptr_t>(key.overload);
        return (a >> 4) ^ (b * 0x9E3779B97F4A7C15u >> 7);
    }
};

/* ---- the frames of a thread -------------------------------------------------------------- */

/* One tp_op of a frame: an operator has one for each core it meets, nearly always one. */
struct CoreOp {
    tp_op op{};
    tp_core *core = nullptr; /* null: not in use */
    uint32_t adopted_count = 0;
    std::unique_ptr<CoreOp> next;
};

class Thread;

struct Frame {
    Frame *outer =
        nullptr; /* on the stack: the next frame outwards; in the pool: the next one */
    Thread *thread = nullptr; /* null once that has ended */
    pthread_t id{};           /* of it */
    size_t return_count = 0;
    bool results_empty = false;
    bool collective = false, waited_for = false;
    uint32_t name = 0;                     /* as in tp_op */
    bool backward = false;                 /* likewise */
    bool rerun = false;                    /* likewise */
    bool may_rerun = false;                /* likewise: tp_op.recipe */
    NoRecipe no_recipe = NoRecipe::NONE;   /* why not, while that is of interest */
    std::optional<c10::OperatorHandle> op; /* with no_recipe */
    bool lacks_memory = false;             /* what it uses could not be made again */
    bool wrapper = false;                  /* around the same operator below autocast */
    std::shared_ptr<Recipe> recipe;        /* of the operator; null: it has none */
    std::vector<tp_addr> born;             /* with a recipe: the blocks allocated in it */
    std::vector<Counted> counted;          /* operands whose references are counted */
    std::atomic<bool> ended{false};
    CoreOp first;
    alignas(8) unsigned char context[64]; /* room for the FrameContext handed to PyTorch */
};

/* One region of one core, in a list of those that began together. */
struct Region {
    tp_region region{};
    Region *next = nullptr;
};

struct Operand {
    tp_core *core;
    int slot;
    tp_access access;
};

/* What the start callback hands to PyTorch. */
struct HookContext : public at::ObserverContext {
    explicit HookContext(Frame *frame) : frame_(frame) {}
    Frame *frame_;         /* null: a region, or a view */
    size_t view_count = 0; /* an operator that makes so many views of what has a recipe */
};

/* Ends the frame if the end callback did not. */
struct FrameContext final : public HookContext {
    explicit FrameContext(Frame *frame) : HookContext(frame) {}
    ~FrameContext() override;
    static void *operator new(size_t, Frame *frame) { return frame->context; }
    static void operator delete(void *, Frame *) {}
    static void operator delete(void *) {}
};
static_assert(sizeof(FrameContext) <= sizeof(Frame::context));

class Thread {
  public:
    Thread();
    ~Thread();

    /* Null: not an operator (then *nameless is set), or one with nothing to do. */
    const OperatorUse *use_of(const at::RecordFunction &fn, bool *nameless);
    Frame *push();
    void pop(Frame *frame);
    Frame *top();
    void recycle(Frame *frame);
    Region *take_region();
    void recycle(Region *region);

    std::atomic<uint64_t> call_count{0};
    uint64_t known_since = 0;        /* full_since, when an operator began here last */
    std::vector<Operand> operands;   /* of the operator that starts now; reused */
    std::vector<Operand> outputs;    /* of the one that ends now; reused */
    std::vector<tp_access> accesses; /* scratch: those of one core */
    std::vector<tp_addr> addresses;  /* scratch */
    std::vector<Touch> touches;      /* the storages of the operands, while any have a recipe */
    uint32_t region_count = 0;       /* open ones that began here */

  private:
    struct KnownUse {
        OperatorKey key{nullptr, nullptr};
        const OperatorUse *use = nullptr;
    };

    const OperatorUse *look_up(const at::RecordFunction &fn, const OperatorKey &key,
                               bool *nameless);

    /* Where the operator is looked for first; what is there lies in uses_. */
    std::array<KnownUse, 1024> known_{};
    std::unordered_map<OperatorKey, OperatorUse, OperatorKeyHash> uses_;
    uint64_t uses_version_ = 0;
    Frame *top_ = nullptr;
    Frame *pool_ = nullptr;
    Region *region_pool_ = nullptr;
};

std::mutex threads_mutex;
std::vector<Thread *> &threads() {
    static auto *list = new std::vector<Thread *>; /* outlives every thread */
    return *list;
}
uint64_t calls_of_ended_threads = 0; /* needs threads_mutex */
std::atomic<bool> disabled{false};   /* after a fork */

Thread::Thread() {
    const std::lock_guard<std::mutex> guard(threads_mutex);
    threads().push_back(this);
}

/* The core keeps an operator's pin array for the next use of the same tp_op. */
void free_pin_arrays(CoreOp &op) {
    for (CoreOp *each = &op; each != nullptr; each = each->next.get()) tp_op_fini(&each->op);
}

Thread::~Thread() {
    {
        const std::lock_guard<std::mutex> guard(threads_mutex);
        auto &list = threads();
        for (size_t i = 0; i < list.size(); i++) {
            if (list[i] != this) continue;
            list[i] = list.back();
            list.pop_back();
            break;
        }
        calls_of_ended_threads += call_count.load(std::memory_order_relaxed);
    }
    for (Frame *frame = top_; frame != nullptr; frame = frame->outer) frame->thread = nullptr;
    while (pool_ != nullptr) {
        Frame *frame = pool_;
        pool_ = frame->outer;
        free_pin_arrays(frame->first);
        delete frame;
    }
    while (region_pool_ != nullptr) {
        Region *region = region_pool_;
        region_pool_ = region->next;
        tp_region_fini(&region->region);
        delete region;
    }
}

/* Null once the thread is past its destructors. */
Thread *this_thread() {
    struct Holder {
        Thread *thread = nullptr;
        bool gone = false;
        ~Holder() {
            gone = true;
            delete thread;
            thread = nullptr;
        }
    };
    static thread_local Holder holder;
    if (C10_UNLIKELY(holder.thread == nullptr) && !holder.gone) {
        holder.thread = new (std::nothrow) Thread;
    }
    return holder.thread;
}

/* The same, for the end of a frame: nearly always on its own thread, and then quickly. */
Thread *this_thread(const Frame *frame) {
    const bool own = frame->thread != nullptr && pthread_equal(frame->id, pthread_self()) != 0;
    return own ? frame->thread : this_thread();
}

Frame *Thread::top() {
    /* A frame that another thread has ended is popped by its owner. */
    while (top_ != nullptr && top_->ended.load(std::memory_order_acquire)) top_ = top_->outer;
    return top_;
}

Frame *Thread::push() {
    Frame *frame = pool_;
    if (frame != nullptr) {
        pool_ = frame->outer;
    } else {
        frame = new Frame;
    }
    frame->thread = this;
    frame->id = pthread_self();
    frame->ended.store(false, std::memory_order_relaxed);
    frame->name = 0;
    frame->rerun = frame->may_rerun = frame->lacks_memory = frame->wrapper = false;
    frame->no_recipe = NoRecipe::NONE;
    frame->backward = torch::autograd::get_current_graph_task_id() >= 0;
    frame->outer = top();
    top_ = frame;
    return frame;
}

void Thread::pop(Frame *frame) {
    Frame **link = &top_;
    while (*link != nullptr && *link != frame) link = &(*link)->outer;
    if (*link == frame) *link = frame->outer;
}

void Thread::recycle(Frame *frame) {
    frame->recipe.reset();
    frame->counted.clear();
    frame->outer = pool_;
    pool_ = frame;
}

Region *Thread::take_region() {
    Region *region = region_pool_;
    if (region == nullptr) return new Region;
    region_pool_ = region->next;
    return region;
}

void Thread::recycle(Region *region) {
    region->next = region_pool_;
    region_pool_ = region;
}

const OperatorUse *Thread::use_of(const at::RecordFunction &fn, bool *nameless) {
    const uint64_t version = operator_set_version.load(std::memory_order_acquire);
    if (C10_UNLIKELY(version != uses_version_)) {
        known_.fill({});
        uses_.clear();
        uses_version_ = version;
    }
    const OperatorKey key{fn.name(), fn.overload_name()};
    KnownUse &known = known_[OperatorKeyHash{}(key) % known_.size()];
    if (C10_UNLIKELY(!(known.key == key))) {
        const OperatorUse *use = look_up(fn, key, nameless);
        if (use == nullptr) return nullptr;
        known = {key, use};
    }
    /* Only this thread writes it. */
    call_count.store(call_count.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    const bool has_work =
        known.use->frame || known.use->exports || (known.use->view && recompute_tracks());
    return has_work ? known.use : nullptr;
}

const OperatorUse *Thread::look_up(const at::RecordFunction &fn, const OperatorKey &key,
                                   bool *nameless) {
    const auto found = uses_.find(key);
    if (found != uses_.end()) return &found->second;
    const auto name = fn.operator_name();
    *nameless = !name.has_value();
    if (*nameless) return nullptr;
    const auto op = c10::Dispatcher::singleton().findSchema(*name);
    if (!op.has_value() || op->schema().name().c_str() != key.name) return nullptr;
    return &uses_.emplace(key, describe(*op)).first->second;
}

/* ---- finding the storages of a value ----------------------------------------------------- */

class Collector {
  public:
    /* `touches`: takes every storage, ours or not; null: nobody asks. */
    Collector(std::vector<Operand> &out, bool write, std::vector<Touch> *touches = nullptr)
        : out_(out), touches_(touches), write_(write) {}

    void value(const c10::IValue &value) {
        if (value.isTensor()) {
            tensor(value.toTensor());
        } else if (value.isList()) {
            for (const auto &item : value.toListRef()) this->value(item);
        } else if (value.isTuple()) {
            for (const auto &item : value.toTupleRef().elements()) this->value(item);
        } else if (value.isStorage()) {
            const c10::Storage held = value.toStorage();
            if (held) storage(held.unsafeGetStorageImpl());
        }
    }

  private:
    void tensor(const at::Tensor &tensor) {
        if (!tensor.defined()) return;
        const c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
        const c10::Storage &held = impl->unsafe_storage();
        if (held) storage(held.unsafeGetStorageImpl());
        static const auto special = c10::DispatchKeySet(c10::DispatchKey::Sparse) |
                                    c10::DispatchKeySet(c10::DispatchKey::SparseCsr) |
                                    c10::DispatchKeySet(c10::DispatchKey::NestedTensor) |
                                    c10::DispatchKeySet(c10::DispatchKey::Quantized);
        if (C10_UNLIKELY(impl->key_set().has_any(special))) parts(impl);
    }

    /* Tensors that are made of tensors. A subclass may carry the keys of one without being
     * one. */
    void parts(const c10::TensorImpl *impl) {
        if (const auto *sparse = dynamic_cast<const at::SparseTensorImpl *>(impl)) {
            tensor(sparse->indices());
            tensor(sparse->values());
        } else if (const auto *rows = dynamic_cast<const at::SparseCsrTensorImpl *>(impl)) {
            tensor(rows->compressed_indices());
            tensor(rows->plain_indices());
            tensor(rows->values());
        } else if (const auto *nested =
                       dynamic_cast<const at::native::NestedTensorImpl *>(impl)) {
            tensor(nested->get_nested_sizes());
            tensor(nested->get_nested_strides());
            tensor(nested->get_storage_offsets());
        } else if (const auto *quantized = dynamic_cast<const at::QTensorImpl *>(impl)) {
            scales(quantized);
        }
    }

    void scales(const at::QTensorImpl *impl) {
        const auto quantizer = const_cast<at::QTensorImpl *>(impl)->quantizer();
        const auto *channels =
            dynamic_cast<const at::PerChannelAffineQuantizer *>(quantizer.get());
        if (channels == nullptr) return;
        tensor(channels->scales());
        tensor(channels->zero_points());
    }

    /* The unchecked accessor: the others throw for a fake tensor or copy a lazily cloned
     * storage. */
    void storage(c10::StorageImpl *storage) {
        if (C10_UNLIKELY(touches_ != nullptr)) touches_->push_back({storage, write_});
        const at::DataPtr &data = storage->_mutable_data_ptr_no_checks();
        const auto addr = reinterpret_cast<tp_addr>(data.get());
        tp_core *core = tp_core_owning(addr);
        if (core == nullptr) return;
        const c10::Device device = data.device();
        const int slot = device.is_cuda() ? device.index() : static_cast<int>(TP_SLOT_SIM);
        out_.push_back({core, slot, {addr, write_}});
    }

    std::vector<Operand> &out_;
    std::vector<Touch> *const touches_;
    const bool write_;
};

/* ---- opaque regions ---------------------------------------------------------------------- */

std::atomic<bool> armed_slots[TP_SLOT_MAX]; /* written under install_mutex */

/* A region on every core that may change mappings, told of the operands. */
Region *begin_regions(Thread *thread) {
    Region *regions = nullptr;
    for (int slot = 0; slot < TP_SLOT_MAX; slot++) {
        if (!armed_slots[slot].load(std::memory_order_relaxed)) continue;
        tp_core *core = tp_core_at(slot);
        if (core == nullptr) continue;
        thread->accesses.clear();
        for (const Operand &operand : thread->operands) {
            if (operand.core == core) thread->accesses.push_back(operand.access);
        }
        Region *region = thread->take_region();
        region->next = regions;
        regions = region;
        tp_region_begin(core, &region->region, thread->accesses.data(), thread->accesses.size(),
                        tp_bind_current_stream(slot));
    }
    return regions;
}

/* Also on another thread than they began on, and at a thread's end. */
void end_regions(Region *regions) {
    Thread *thread = this_thread();
    while (regions != nullptr) {
        Region *region = regions;
        regions = region->next;
        tp_region_end(&region->region);
        if (thread != nullptr) {
            thread->recycle(region);
        } else {
            tp_region_fini(&region->region);
            delete region;
        }
    }
}

struct RegionContext final : public HookContext {
    RegionContext() : HookContext(nullptr) {}
    ~RegionContext() override {
        /* In a forked child nobody waits for its end. */
        if (!disabled.load(std::memory_order_relaxed)) end_regions(regions);
        if (thread != nullptr && thread == this_thread()) thread->region_count--;
    }
    Region *regions = nullptr;
    Thread *thread = nullptr; /* that it began on; compared only */
};

/* A custom function's name, or that of its backward node. */
bool launches_nothing(const char *name) {
    for (const char *known : kLaunchesNothing) {
        if (!starts_with(name, known)) continue;
        const char *rest = name + std::strlen(known);
        if (*rest == '\0' || std::strcmp(rest, "Backward") == 0) return true;
    }
    return false;
}

/* Whether a named range that is no operator may launch kernels that nobody announces. */
bool is_opaque(const at::RecordFunction &fn) {
    const char *name = fn.name();
    switch (fn.scope()) {
    case at::RecordScope::FUNCTION:
        /* Only custom functions have their place in the order of autograd's nodes; other
         * ranges are there for profilers. */
        if (fn.seqNr() >= 0) return !launches_nothing(name);
        return starts_with(name, "Torch-Compiled Region");
    case at::RecordScope::BACKWARD_FUNCTION:
        return !is_generated_node(name) && !launches_nothing(name);
    case at::RecordScope::TORCHSCRIPT_FUNCTION: return true; /* it may fuse kernels */
    default: return false;
    }
}

std::unique_ptr<at::ObserverContext> start_region(Thread *thread,
                                                  const at::RecordFunction &fn) {
    if (fn.scope() == at::RecordScope::BACKWARD_FUNCTION && recompute_tracks()) {
        recompute_node_runs(static_cast<uint64_t>(fn.seqNr()), fn.forwardThreadId());
    }
    if (!is_opaque(fn)) return nullptr;
    thread->operands.clear();
    bool compiled = false;
    for (const char *name : kCompiled) compiled = compiled || starts_with(fn.name(), name);
    std::optional<RecomputeHold> hold;
    if (recompute_tracks()) {
        std::vector<Touch> touches;
        Collector collector(thread->operands, true, &touches);
        for (const c10::IValue &value : fn.inputs()) collector.value(value);
        (void)recompute_before_region(touches);
        hold.emplace();
        thread->operands.clear();
    }
    if (!compiled) {
        Collector collector(thread->operands, true);
        for (const c10::IValue &value : fn.inputs()) collector.value(value);
    }
    auto context = std::make_unique<RegionContext>();
    context->regions = begin_regions(thread);
    context->thread = thread;
    thread->region_count++;
    return context;
}

std::unique_ptr<at::ObserverContext> on_named_range(const at::RecordFunction &fn) {
    if (disabled.load(std::memory_order_relaxed)) return nullptr;
    try {
        Thread *thread = this_thread();
        return thread == nullptr ? nullptr : start_region(thread, fn);
    } catch (...) {
        return nullptr; /* out of host memory */
    }
}

/* ---- starting and ending an operator ----------------------------------------------------- */

/* The frame's tp_op for `core`, or one that is free. */
CoreOp *slot_for(Frame *frame, tp_core *core) {
    CoreOp *free_op = nullptr;
    CoreOp *last = nullptr;
    for (CoreOp *op = &frame->first; op != nullptr; op = op->next.get()) {
        if (op->core == core) return op;
        if (op->core == nullptr && free_op == nullptr) free_op = op;
        last = op;
    }
    if (free_op != nullptr) return free_op;
    last->next = std::make_unique<CoreOp>();
    return last->next.get();
}

CoreOp *find(Frame *frame, tp_core *core) {
    for (CoreOp *op = &frame->first; op != nullptr; op = op->next.get()) {
        if (op->core == core) return op;
    }
    return nullptr;
}

CoreOp *find_or_begin(Frame *frame, tp_core *core, tp_stream stream) {
    CoreOp *op = slot_for(frame, core);
    if (op->core == nullptr) {
        op->core = core;
        op->adopted_count = 0;
        op->op.name = frame->name;
        op->op.backward = frame->backward;
        op->op.rerun = frame->rerun;
        op->op.recipe = false;
        tp_op_begin(core, &op->op, nullptr, 0, stream);
    }
    return op;
}

/* Begins a tp_op for the core of operands[start] with all its accesses. */
void begin_core(Thread *thread, Frame *frame, size_t start) {
    const Operand &head = thread->operands[start];
    if (find(frame, head.core) != nullptr) return;
    thread->accesses.clear();
    for (size_t i = start; i < thread->operands.size(); i++) {
        const Operand &operand = thread->operands[i];
        if (operand.core == head.core) thread->accesses.push_back(operand.access);
    }
    CoreOp *op = slot_for(frame, head.core);
    const tp_stream stream = tp_bind_current_stream(head.slot);
    op->core = head.core;
    op->adopted_count = 0;
    op->op.name = frame->name;
    op->op.backward = frame->backward;
    op->op.rerun = frame->rerun;
    op->op.recipe = frame->may_rerun;
    tp_op_begin(head.core, &op->op, thread->accesses.data(), thread->accesses.size(), stream);
}

/* For a boxed call PyTorch shows the whole stack, of which the operator's own values come
 * last. */
template <class Values> size_t start_of_own(const Values &values, size_t own_count) {
    return values.size() > own_count ? values.size() - own_count : 0;
}

void collect_operands(Thread *thread, const OperatorUse &use,
                      c10::ArrayRef<const c10::IValue> inputs, std::vector<Touch> *touches) {
    thread->operands.clear();
    if (touches == nullptr && use.asks_for_pointer) return;
    const size_t start = start_of_own(inputs, use.argument_count);
    for (const ArgumentUse &argument : use.arguments) {
        if (start + argument.idx >= inputs.size()) break;
        Collector(thread->operands, argument.write, touches)
            .value(inputs[start + argument.idx]);
    }
}

/* The same, with those that have no bytes brought back first. Nothing is dropped until `hold`
 * ends. */
void collect_operands(Thread *thread, const OperatorUse &use,
                      c10::ArrayRef<const c10::IValue> inputs,
                      std::optional<RecomputeHold> &hold) {
    if (C10_LIKELY(!recompute_tracks())) {
        collect_operands(thread, use, inputs, nullptr);
        return;
    }
    thread->touches.clear();
    collect_operands(thread, use, inputs, &thread->touches);
    std::vector<Touch> touches; /* reruns use the thread's own */
    touches.swap(thread->touches);
    for (int round = 0; round < 3; round++) {
        const bool all =
            use.foreign ? recompute_before_region(touches) : recompute_before_operator(touches);
        hold.emplace();
        if (!all || !recompute_any_dropped(touches)) break;
        hold.reset(); /* another thread has dropped one since */
    }
    touches.swap(thread->touches);
    collect_operands(thread, use, inputs, nullptr);
}

/* Where the blocks adopted by an ending operator go: the next operator outwards. Null, also
 * when host memory is short: they are unpinned now. */
CoreOp *parent_of(const CoreOp &op, Frame *outer) noexcept {
    for (Frame *frame = outer; frame != nullptr; frame = frame->outer) {
        if (CoreOp *parent = find(frame, op.core)) return parent;
    }
    if (op.adopted_count == 0 || outer == nullptr) return nullptr;
    try {
        return find_or_begin(outer, op.core, op.op.stream);
    } catch (...) {
        return nullptr;
    }
}

/* Ends every tp_op of the frame and takes it off the stack. `outputs` may be empty. */
void end_frame(Frame *frame, Thread *current, const std::vector<Operand> *outputs) {
    const bool own = frame->thread == current;
    if (own) current->pop(frame);
    for (CoreOp *op = &frame->first; op != nullptr; op = op->next.get()) {
        if (op->core == nullptr) continue;
        std::vector<tp_addr> *addresses = nullptr;
        if (own && outputs != nullptr) {
            addresses = &current->addresses;
            addresses->clear();
            for (const Operand &output : *outputs) {
                if (output.core == op->core) addresses->push_back(output.access.addr);
            }
        }
        CoreOp *parent = own ? parent_of(*op, current->top()) : nullptr;
        if (parent != nullptr) parent->adopted_count += op->adopted_count;
        tp_op_end(&op->op, addresses != nullptr ? addresses->data() : nullptr,
                  addresses != nullptr ? addresses->size() : 0,
                  parent != nullptr ? &parent->op : nullptr);
        op->core = nullptr;
        op->adopted_count = 0;
    }
    frame->ended.store(true, std::memory_order_release);
}

/* What a collective has returned says of its work. */
struct Outcome {
    bool known = false; /* false: nobody will tell when it is done */
    CollectiveWork work;
};

template <class Values> Outcome outcome_of(const Frame *frame, const Values &values) {
    Outcome outcome;
    if (collectives_deferred()) return outcome;
    for (size_t i = start_of_own(values, frame->return_count); i < values.size(); i++) {
        outcome.known = outcome.known || collective_work(values[i], &outcome.work);
    }
    for (const CoreOp *op = &frame->first; op != nullptr; op = op->next.get()) {
        if (op->core == nullptr) continue;
        const bool on_cpu = op->core == tp_core_at(TP_SLOT_SIM);
        if (tp_capturing(op->core) || (frame->waited_for && on_cpu)) outcome.known = false;
    }
    return outcome;
}

/* As end_frame; the operands stay pinned until the work is done. `ops` has room for them. */
void end_collective(Frame *frame, Thread *current, const Outcome &outcome,
                    std::vector<tp_op> &ops) {
    current->pop(frame);
    for (CoreOp *op = &frame->first; op != nullptr; op = op->next.get()) {
        if (op->core == nullptr) continue;
        CoreOp *parent = parent_of(*op, current->top());
        if (parent != nullptr) parent->adopted_count += op->adopted_count;
        if (!outcome.known) tp_op_export(&op->op);
        tp_op_detach(&op->op, parent != nullptr ? &parent->op : nullptr);
        const bool goes_on =
            outcome.known && outcome.work.defined() && !collective_done(outcome.work, op->core);
        if (goes_on) {
            ops.push_back(op->op);
            op->op = {};
        } else {
            tp_op_end(&op->op, nullptr, 0, nullptr);
        }
        op->core = nullptr;
        op->adopted_count = 0;
    }
    frame->ended.store(true, std::memory_order_release);
}

/* For want of host memory: its operands become immovable instead. */
void keep_collective(Frame *frame, Thread *current) noexcept {
    std::vector<tp_op> none;
    end_collective(frame, current, Outcome{}, none);
}

/* Throws only before anything has ended. Where host memory is short in the end, the operands stay
 * pinned. */
template <class Values>
void end_collective(Frame *frame, Thread *current, const Values &values) {
    const Outcome outcome = outcome_of(frame, values);
    size_t count = 0;
    for (CoreOp *op = &frame->first; op != nullptr; op = op->next.get()) count++;
    std::vector<tp_op> ops;
    ops.reserve(count);
    end_collective(frame, current, outcome, ops);
    if (!ops.empty()) collectives_hold(outcome.work, std::move(ops));
}

FrameContext::~FrameContext() {
    if (disabled.load(std::memory_order_relaxed)) return; /* it goes on in the parent */
    Frame *frame = frame_;
    Thread *current = this_thread(frame);
    if (!frame->ended.load(std::memory_order_acquire)) end_frame(frame, current, nullptr);
    if (C10_UNLIKELY(frame->lacks_memory)) recompute_forget_memory();
    /* A frame ended elsewhere stays with its own thread, which may still have it on its
     * stack. */
    if (current != nullptr && frame->thread == current) current->recycle(frame);
}

/* Why the operator has no recipe: none has inside of another one that does more than call others. That
 * one may have a recipe itself; and it may write what they read or make, which nobody announces (an
 * operator in place clones what it is about to write, for its backward pass). */
NoRecipe refuses_rerun(const Thread *thread, const Frame *frame, const OperatorUse &use,
                       const at::RecordFunction &fn) {
    if (!use.rerun.possible) return use.rerun.why;
    if (thread->region_count > 0 && recompute_region_matters()) return NoRecipe::REGION;
    for (const Frame *outer = frame->outer; outer != nullptr; outer = outer->outer) {
        if (outer->may_rerun || outer->rerun) return NoRecipe::INSIDE;
        if (!outer->wrapper && recompute_kernels_matter()) return NoRecipe::INSIDE;
    }
    return recompute_refuses(use.rerun, fn.inputs());
}

void note_rerun(const Thread *thread, Frame *frame, const OperatorUse &use,
                const at::RecordFunction &fn) {
    frame->no_recipe = refuses_rerun(thread, frame, use, fn);
    frame->may_rerun = frame->no_recipe == NoRecipe::NONE;
    if (!frame->may_rerun) frame->op = use.op;
    frame->wrapper = recompute_wraps(use.rerun);
}

/* A block is born in operators, the innermost first, none of which has a recipe. */
void note_without_recipe(const Frame *frame, tp_core *core, tp_addr addr) {
    while (frame->outer != nullptr) frame = frame->outer;
    if (frame->no_recipe == NoRecipe::NONE || frame->no_recipe == NoRecipe::INSIDE) return;
    recompute_note_born(frame->op, core, addr, frame->no_recipe);
}

void capture(Frame *frame, const OperatorUse &use, const at::RecordFunction &fn) {
    bool wanted = recompute_mode() >= kRecomputeForced;
    for (const CoreOp *op = &frame->first; op != nullptr; op = op->next.get()) {
        wanted = wanted || (op->core != nullptr && op->op.keep_recipe);
    }
    if (!wanted) return;
    frame->born.clear();
    frame->recipe = recompute_capture(*use.op, fn.inputs());
}

/* Autograd saves in operators of its own that are not inside of others, or only below autocast. */
void count_before(Frame *frame, const OperatorUse &use, const at::RecordFunction &fn) {
    bool saves = !use.foreign && !frame->wrapper && at::GradMode::is_enabled();
    for (const Frame *outer = frame->outer; outer != nullptr; outer = outer->outer) {
        saves = saves && outer->wrapper;
    }
    const auto inputs = fn.inputs();
    if (saves)
        recompute_count_before(inputs.slice(start_of_own(inputs, use.argument_count)),
                               frame->counted);
}

/* An operator that makes views: their storage may have a recipe. */
std::unique_ptr<at::ObserverContext> start_view(const OperatorUse &use,
                                                const at::RecordFunction &fn) {
    if (!recompute_knows(fn.inputs())) return nullptr;
    auto context = std::make_unique<HookContext>(nullptr);
    context->view_count = use.return_count;
    return context;
}

std::unique_ptr<at::ObserverContext> start_operator(Thread *thread, const OperatorUse &use,
                                                    const at::RecordFunction &fn) {
    if (C10_UNLIKELY(use.view && !use.exports)) return start_view(use, fn);
    std::optional<RecomputeHold> hold;
    const bool lacked_memory = recompute_lacks_memory() != nullptr; /* of an operator around */
    collect_operands(thread, use, fn.inputs(), hold);
    const bool lacks_memory = !lacked_memory && recompute_lacks_memory() != nullptr;
    if (C10_UNLIKELY(lacks_memory) && !use.frame) recompute_forget_memory();
    std::unique_ptr<at::ObserverContext> context;
    if (C10_LIKELY(use.frame)) {
        Frame *frame = thread->push();
        frame->return_count = use.return_count;
        frame->results_empty = use.makes_empty;
        frame->collective = use.collective;
        frame->waited_for = use.waited_for;
        frame->name = use.name;
        frame->lacks_memory = lacks_memory;
        context.reset(new (frame) FrameContext(frame));
        if (C10_UNLIKELY(recompute_mode() != kRecomputeOff)) {
            note_rerun(thread, frame, use, fn);
        }
        for (size_t i = 0; i < thread->operands.size(); i++) begin_core(thread, frame, i);
        if (C10_UNLIKELY(recompute_tracks())) count_before(frame, use, fn);
        if (C10_UNLIKELY(frame->may_rerun)) capture(frame, use, fn);
    }
    if (C10_UNLIKELY(use.exports)) {
        for (const Operand &operand : thread->operands) {
            tp_export(operand.core, operand.access.addr);
        }
    }
    return context;
}

std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction &fn) {
    if (C10_UNLIKELY(disabled.load(std::memory_order_relaxed))) return nullptr;
    try {
        Thread *thread = this_thread();
        if (thread == nullptr) return nullptr;
        collectives_settle(false);
        thread->known_since = full_since.load(std::memory_order_relaxed);
        bool nameless = false;
        const OperatorUse *use = thread->use_of(fn, &nameless);
        if (C10_UNLIKELY(nameless)) return start_region(thread, fn);
        return use == nullptr ? nullptr : start_operator(thread, *use, fn);
    } catch (...) {
        return nullptr; /* out of host memory */
    }
}

constexpr int kBurst = 64;
std::atomic<int> burst_left{0}; /* operators still to be looked at */
void end_burst();

/* While nothing moves: only notes that the operands are tensors, and in use. */
std::unique_ptr<at::ObserverContext> on_sample(const at::RecordFunction &fn) {
    if (C10_UNLIKELY(disabled.load(std::memory_order_relaxed))) return nullptr;
    try {
        Thread *thread = this_thread();
        bool nameless = false;
        const OperatorUse *use = thread == nullptr ? nullptr : thread->use_of(fn, &nameless);
        if (burst_left.fetch_sub(1, std::memory_order_relaxed) == 1) end_burst();
        if (use == nullptr) return nullptr;
        collect_operands(thread, *use, fn.inputs(), nullptr);
        for (const Operand &operand : thread->operands) {
            tp_mark_seen(operand.core, operand.access.addr);
        }
    } catch (...) {
        /* out of host memory */
    }
    return nullptr;
}

/* Outputs of a core that the operator neither used nor allocated from: only marked as
 * tensors. */
void mark_others(Frame *frame, const std::vector<Operand> &outputs) {
    for (const Operand &output : outputs) {
        if (find(frame, output.core) == nullptr) tp_mark_seen(output.core, output.access.addr);
    }
}

void end_view(const at::RecordFunction &fn, size_t count) noexcept {
    if (count == 0) return;
    try {
        const c10::ArrayRef<c10::IValue> values(fn.outputs());
        recompute_note_views(values.slice(start_of_own(values, count)));
    } catch (...) {
        /* Out of host memory: it is one that we do not know, so that nothing is dropped. */
    }
}

/* Before the frame ends: its results have a recipe now. */
void end_recipe(const at::RecordFunction &fn, Frame *frame) noexcept {
    const std::shared_ptr<Recipe> recipe = std::move(frame->recipe);
    frame->recipe.reset();
    if (recipe == nullptr || frame->born.empty()) return;
    try {
        const c10::ArrayRef<c10::IValue> values(fn.outputs());
        recompute_captured(recipe, values.slice(start_of_own(values, frame->return_count)),
                           frame->born);
    } catch (...) {
        /* Out of host memory: they have none. */
    }
}

/* What autograd has saved of its operands. */
void end_counted(const at::RecordFunction &fn, Frame *frame) noexcept {
    try {
        const c10::ArrayRef<c10::IValue> values(fn.outputs());
        recompute_count_after(frame->counted,
                              values.slice(start_of_own(values, frame->return_count)));
    } catch (...) {
        /* Out of host memory: it counts as others', so that nothing goes. */
    }
    frame->counted.clear();
}

void on_end(const at::RecordFunction &fn, at::ObserverContext *context) {
    if (context == nullptr || disabled.load(std::memory_order_relaxed)) return;
    Frame *frame = static_cast<HookContext *>(context)->frame_;
    if (frame == nullptr) { /* a region ends with its context */
        end_view(fn, static_cast<HookContext *>(context)->view_count);
        return;
    }
    Thread *current = this_thread(frame);
    if (current == nullptr || frame->ended.load(std::memory_order_acquire)) return;
    if (C10_UNLIKELY(frame->recipe != nullptr)) end_recipe(fn, frame);
    if (C10_UNLIKELY(!frame->counted.empty())) end_counted(fn, frame);
    if (frame->results_empty) {
        end_frame(frame, current, nullptr);
        return;
    }
    const std::vector<Operand> *outputs = nullptr;
    try {
        current->outputs.clear();
        Collector collector(current->outputs, true);
        const auto &values = fn.outputs();
        for (size_t i = start_of_own(values, frame->return_count); i < values.size(); i++) {
            collector.value(values[i]);
        }
        current->addresses.reserve(current->outputs.size());
        mark_others(frame, current->outputs);
        outputs = &current->outputs;
        if (C10_UNLIKELY(frame->collective)) {
            end_collective(frame, current, values);
            return;
        }
    } catch (...) {
        /* Out of host memory: the outputs stay unseen, which only keeps them resident. */
    }
    if (C10_UNLIKELY(frame->collective)) {
        if (!frame->ended.load()) keep_collective(frame, current);
        return;
    }
    end_frame(frame, current, outputs);
}

/* ---- installing -------------------------------------------------------------------------- */

std::mutex install_mutex;
tp_arming wanted_by_slot[TP_SLOT_MAX]; /* this and the next three need install_mutex */
tp_arming forced = TP_ARM_OFF;
at::CallbackHandle callback_handle = at::INVALID_CALLBACK_HANDLE;
at::CallbackHandle range_handle = at::INVALID_CALLBACK_HANDLE;
std::atomic<tp_arming> level_in_force{TP_ARM_OFF}; /* written under install_mutex */

/* Scope FUNCTION is where the dispatcher reports operators, those of the backward pass too, and
 * where Python's custom functions and compiled code report themselves. */
at::RecordFunctionCallback callback_for(tp_arming level) {
    const bool full = level == TP_ARM_FULL;
    return at::RecordFunctionCallback(full ? on_start : on_sample, full ? on_end : nullptr)
        .needsInputs(true)
        .needsOutputs(full)
        .scopes({at::RecordScope::FUNCTION});
}

/* In this order: an operator meets both rather than neither. */
void replace_callback(at::CallbackHandle by) {
    const at::CallbackHandle old = callback_handle;
    callback_handle = by;
    if (old != at::INVALID_CALLBACK_HANDLE) at::removeCallback(old);
}

/* Backward nodes and TorchScript, which are regions if anything. */
void watch_ranges(bool on) {
    if (on == (range_handle != at::INVALID_CALLBACK_HANDLE)) return;
    if (on) {
        range_handle =
            at::addGlobalCallback(at::RecordFunctionCallback(on_named_range)
                                      .needsInputs(true)
                                      .scopes({at::RecordScope::BACKWARD_FUNCTION,
                                               at::RecordScope::TORCHSCRIPT_FUNCTION}));
    } else {
        at::removeCallback(range_handle);
        range_handle = at::INVALID_CALLBACK_HANDLE;
    }
}

void install_what_is_wanted() {
    tp_arming wanted = forced;
    for (const tp_arming level : wanted_by_slot) wanted = std::max(wanted, level);
    if (wanted == level_in_force.load(std::memory_order_relaxed)) return;
    if (wanted == TP_ARM_FULL) full_since.fetch_add(1, std::memory_order_relaxed);
    burst_left.store(0, std::memory_order_relaxed);
    replace_callback(wanted == TP_ARM_FULL ? at::addGlobalCallback(callback_for(wanted))
                                           : at::INVALID_CALLBACK_HANDLE);
    level_in_force.store(wanted, std::memory_order_relaxed);
    watch_ranges(wanted == TP_ARM_FULL);
}

/* Boxing their arguments for us costs a program bound by launches up to a sixth of its time, so
 * operators are sampled in bursts: after each allocation of a block of ours the next few are
 * looked at, which are those that use it. */
void start_burst() {
    if (burst_left.exchange(kBurst, std::memory_order_relaxed) > 0) return;
    const std::lock_guard<std::mutex> guard(install_mutex);
    const bool sampling = level_in_force.load(std::memory_order_relaxed) == TP_ARM_SAMPLE;
    if (!sampling || callback_handle != at::INVALID_CALLBACK_HANDLE) return;
    callback_handle = at::addGlobalCallback(callback_for(TP_ARM_SAMPLE));
}

void end_burst() {
    const std::lock_guard<std::mutex> guard(install_mutex);
    const bool sampling = level_in_force.load(std::memory_order_relaxed) == TP_ARM_SAMPLE;
    if (!sampling || burst_left.load(std::memory_order_relaxed) > 0) return;
    replace_callback(at::INVALID_CALLBACK_HANDLE);
}

/* Whether it would be told of every operator if `slot` wanted `level`. */
bool would_watch(int slot, tp_arming level) {
    const std::lock_guard<std::mutex> guard(install_mutex);
    tp_arming wanted = std::max(forced, level);
    for (int other = 0; other < TP_SLOT_MAX; other++) {
        if (other != slot) wanted = std::max(wanted, wanted_by_slot[other]);
    }
    return wanted == TP_ARM_FULL;
}

void on_arm(int slot, tp_arming level) {
    /* Who is told of no operators cannot bring back what they use. */
    if (level != TP_ARM_FULL && recompute_tracks() && !would_watch(slot, level)) {
        (void)recompute_bring_all_back(nullptr);
    }
    const std::lock_guard<std::mutex> guard(install_mutex);
    wanted_by_slot[slot] = level;
    install_what_is_wanted();
    armed_slots[slot].store(level == TP_ARM_FULL);
}

tp_bind_place allocating() {
    if (disabled.load(std::memory_order_relaxed)) return TP_BIND_OUTSIDE;
    if (level_in_force.load(std::memory_order_relaxed) == TP_ARM_SAMPLE) start_burst();
    collectives_settle(false);
    Thread *thread = this_thread();
    if (thread == nullptr) return TP_BIND_OUTSIDE;
    if (const Frame *frame = thread->top()) {
        return frame->rerun ? TP_BIND_RERUN : TP_BIND_OPERATOR;
    }
    const bool known = thread->known_since == full_since.load(std::memory_order_relaxed);
    return known ? TP_BIND_OUTSIDE : TP_BIND_UNKNOWN;
}

/* The frame is the same that allocating() saw: the thread has been inside the allocator since.
 * When host memory is short the block stays pinned: safe, and freeing it ends that. */
void on_alloc(tp_core *core, tp_addr addr, tp_stream stream) {
    try {
        Thread *thread = this_thread();
        Frame *frame = thread != nullptr ? thread->top() : nullptr;
        if (frame == nullptr) return;
        CoreOp *op = find_or_begin(frame, core, stream);
        tp_op_adopt(&op->op, addr);
        op->adopted_count++;
        bool may_rerun = recompute_mode() == kRecomputeOff; /* or nobody asks */
        for (Frame *each = frame; each != nullptr; each = each->outer) {
            may_rerun = may_rerun || each->may_rerun;
            if (each->recipe != nullptr) each->born.push_back(addr);
        }
        if (C10_UNLIKELY(!may_rerun)) note_without_recipe(frame, core, addr);
    } catch (...) {
        return;
    }
}

void settle() {
    if (!disabled.load(std::memory_order_relaxed)) collectives_settle(true);
}

void freed(tp_addr addr) {
    if (recompute_tracks()) recompute_freed(addr);
}

void bring_all_back(tp_core *core) {
    if (recompute_tracks()) (void)recompute_bring_all_back(core);
}

/* A child has no threads of ours, and no CUDA. */
void disable_in_child() {
    disabled.store(true, std::memory_order_relaxed);
    recompute_disable_after_fork();
}

const tp_bind_operators operators_part = {
    allocating,     on_alloc,           on_arm,
    settle,         collectives_forget, freed,
    recompute_drop, bring_all_back,     recompute_lacks_memory};

} // namespace

void hook_connect() {
    static std::once_flag once;
    std::call_once(once, [] {
        (void)pthread_atfork(nullptr, nullptr, disable_in_child);
        /* The registration lives as long as the process. */
        auto registration = c10::Dispatcher::singleton().addRegistrationListener(
            std::make_unique<OperatorSetListener>());
        new c10::RegistrationHandleRAII(std::move(registration));
        tp_bind_set_operators(&operators_part);
    });
}

void hook_force(tp_arming level) {
    const std::lock_guard<std::mutex> guard(install_mutex);
    forced = level;
    install_what_is_wanted();
}

uint64_t hook_call_count() {
    const std::lock_guard<std::mutex> guard(threads_mutex);
    uint64_t total = calls_of_ended_threads;
    for (const Thread *thread : threads()) {
        total += thread->call_count.load(std::memory_order_relaxed);
    }
    return total;
}

void hook_forget_operators() { operator_set_version++; }

bool hook_watches() {
    return level_in_force.load(std::memory_order_relaxed) == TP_ARM_FULL &&
           !disabled.load(std::memory_order_relaxed);
}

HookCall::HookCall(unsigned mode, const std::vector<CallOperand> &operands) {
    Thread *thread = hook_watches() ? this_thread() : nullptr;
    if (thread == nullptr) return;
    try {
        std::optional<RecomputeHold> hold;
        if (recompute_tracks() && (mode & kCallReruns) == 0) {
            std::vector<Operand> unused;
            std::vector<Touch> touches;
            for (const CallOperand &operand : operands) {
                Collector(unused, operand.write, &touches).value(operand.tensor);
            }
            (void)recompute_before_region(touches);
            hold.emplace();
        }
        for (int slot = 0; (mode & kCallLifts) != 0 && slot < TP_SLOT_MAX; slot++) {
            tp_core *core = armed_slots[slot].load() ? tp_core_at(slot) : nullptr;
            if (core == nullptr) continue;
            lifted_.push_back(slot);
            tp_region_lift(core);
        }
        thread->operands.clear();
        for (const CallOperand &operand : operands) {
            Collector(thread->operands, operand.write).value(operand.tensor);
        }
        if ((mode & (kCallHolds | kCallReruns)) != 0) {
            Frame *frame = thread->push();
            frame->collective = false;
            frame->rerun = (mode & kCallReruns) != 0;
            frame_ = frame;
            for (size_t i = 0; i < thread->operands.size(); i++) begin_core(thread, frame, i);
        }
        if ((mode & kCallGates) != 0) regions_ = begin_regions(thread);
    } catch (...) {
        return; /* out of host memory: as for an operator */
    }
}

HookCall::~HookCall() {
    if (disabled.load(std::memory_order_relaxed)) return;
    end_regions(static_cast<Region *>(regions_));
    if (frame_ != nullptr) {
        Frame *frame = static_cast<Frame *>(frame_);
        Thread *current = this_thread();
        end_frame(frame, current, nullptr);
        if (current != nullptr && frame->thread == current) current->recycle(frame);
    }
    for (const int slot : lifted_) {
        tp_core *core = tp_core_at(slot);
        if (core != nullptr) tp_region_unlift(core);
    }
}

} // namespace torchpager
