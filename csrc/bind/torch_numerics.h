/* torch_numerics: the settings of PyTorch that decide which bits an operator makes. They belong
 * to the process, so what is made again later is made under those of the first time. */
#ifndef TP_BIND_TORCH_NUMERICS_H
#define TP_BIND_TORCH_NUMERICS_H

#include <ATen/Context.h>
#include <c10/core/DefaultDtype.h>

#include <initializer_list>

namespace torchpager {

struct Numerics {
    using Reduction = at::CuBLASReductionOption;
    static constexpr auto kNoSplitK = Reduction::DisallowReducedPrecisionDisallowSplitK;

    at::Float32Precision matmul, conv, rnn;
    at::CuBLASReductionOption half, bfloat16;
    bool deterministic, warn_only, deterministic_cudnn, benchmark, cudnn;
    bool flash, efficient, math, cudnn_attention, overrideable;
    c10::ScalarType dtype; /* of results that mix integers with Python's numbers */

    static Numerics now() {
        const at::Context &context = at::globalContext();
        using Op = at::Float32Op;
        constexpr auto cuda = at::Float32Backend::CUDA;
        return {context.float32Precision(cuda, Op::MATMUL),
                context.float32Precision(cuda, Op::CONV),
                context.float32Precision(cuda, Op::RNN),
                context.allowFP16ReductionCuBLAS(),
                context.allowBF16ReductionCuBLAS(),
                context.deterministicAlgorithms(),
                context.deterministicAlgorithmsWarnOnly(),
                context.deterministicCuDNN(),
                context.benchmarkCuDNN(),
                context.userEnabledCuDNN(),
                context.userEnabledFlashSDP(),
                context.userEnabledMemEfficientSDP(),
                context.userEnabledMathSDP(),
                context.userEnabledCuDNNSDP(),
                context.userEnabledOverrideableSDP(),
                c10::get_default_dtype_as_scalartype()};
    }

    bool operator==(const Numerics &other) const {
        return matmul == other.matmul && conv == other.conv && rnn == other.rnn &&
               half == other.half && bfloat16 == other.bfloat16 &&
               deterministic == other.deterministic && warn_only == other.warn_only &&
               deterministic_cudnn == other.deterministic_cudnn &&
               benchmark == other.benchmark && cudnn == other.cudnn && flash == other.flash &&
               efficient == other.efficient && math == other.math &&
               cudnn_attention == other.cudnn_attention && overrideable == other.overrideable &&
               dtype == other.dtype;
    }

    uint64_t hash() const {
        uint64_t hash = 0;
        for (const int each :
             {static_cast<int>(matmul), static_cast<int>(conv), static_cast<int>(rnn),
              static_cast<int>(half), static_cast<int>(bfloat16), int{deterministic},
              int{deterministic_cudnn}, int{benchmark}, int{cudnn}, int{flash}, int{efficient},
              int{math}, int{cudnn_attention}, int{overrideable}, static_cast<int>(dtype)}) {
            hash = hash * 31 + static_cast<uint64_t>(each);
        }
        return hash;
    }

    void set() const {
        at::Context &context = at::globalContext();
        constexpr auto cuda = at::Float32Backend::CUDA;
        context.setFloat32Precision(cuda, at::Float32Op::MATMUL, matmul);
        context.setFloat32Precision(cuda, at::Float32Op::CONV, conv);
        context.setFloat32Precision(cuda, at::Float32Op::RNN, rnn);
        context.setAllowFP16ReductionCuBLAS(half == Reduction::AllowReducedPrecisionWithSplitK,
                                            half != kNoSplitK);
        context.setAllowBF16ReductionCuBLAS(
            bfloat16 == Reduction::AllowReducedPrecisionWithSplitK, bfloat16 != kNoSplitK);
        context.setDeterministicAlgorithms(deterministic, warn_only);
        context.setDeterministicCuDNN(deterministic_cudnn);
        context.setBenchmarkCuDNN(benchmark);
        context.setUserEnabledCuDNN(cudnn);
        context.setSDPUseFlash(flash);
        context.setSDPUseMemEfficient(efficient);
        context.setSDPUseMath(math);
        context.setSDPUseCuDNN(cudnn_attention);
        context.setSDPUseOverrideable(overrideable);
        c10::set_default_dtype(c10::scalarTypeToTypeMeta(dtype));
    }
};

/* `wanted`, for as long as it lives. Nothing is set where nothing differs. */
class NumericsGuard {
  public:
    explicit NumericsGuard(const Numerics &wanted)
        : before_(Numerics::now()), differs_(!(before_ == wanted)) {
        if (differs_) wanted.set();
    }
    ~NumericsGuard() {
        if (differs_) before_.set();
    }
    NumericsGuard(const NumericsGuard &) = delete;
    NumericsGuard &operator=(const NumericsGuard &) = delete;

  private:
    const Numerics before_;
    const bool differs_;
};

} // namespace torchpager

#endif
