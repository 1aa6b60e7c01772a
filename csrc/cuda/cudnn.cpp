#include "cuda/cudnn.h"

#include <cudnn_frontend.h>

#include <cstdlib>
#include <sstream>
#include <stdexcept>
#include <unordered_map>

#include "cuda/plugin.h"

namespace cudnn_frontend {

// Where the frontend looks functions up; it declares this and leaves the definition to us.
void* cudnn_dlhandle = nullptr;

}  // namespace cudnn_frontend

namespace surogate::cuda {

namespace fe = cudnn_frontend;

namespace {

void check(fe::error_t error, const char* what) {
    if (error.is_good()) return;
    throw std::runtime_error(std::string("cuDNN: ") + what + ": " + error.get_message());
}

void check(cudnnStatus_t status, const char* what) {
    if (status == CUDNN_STATUS_SUCCESS) return;
    throw std::runtime_error(std::string("cuDNN: ") + what + ": " + fe::detail::get_error_string(status));
}

struct Library {
    explicit Library(const Options& options) {
        // The frontend opens a CUDA runtime of its own by bare names, the older one first, unless it is told.
        if (!options.cudart.empty()) setenv("CUDNN_FRONTEND_CUDART_LIB_NAME", options.cudart.c_str(), 1);
        if (fe::cudnn_dlhandle == nullptr) fe::cudnn_dlhandle = open_library(options.cudnn);
        check(fe::detail::create_handle(&handle), "making a handle");
    }
    ~Library() { fe::detail::destroy_handle(handle); }
    Library(const Library&) = delete;
    Library& operator=(const Library&) = delete;

    cudnnHandle_t handle = nullptr;
};

using Graph = fe::graph::Graph;
using TensorPtr = std::shared_ptr<fe::graph::Tensor_attributes>;
using TensorForm = fe::graph::Tensor_attributes;

enum Uid : int64_t { kQ = 1, kK, kV, kO, kStatistics, kDout, kDq, kDk, kDv, kLengths, kFirstOffsets };

class Plan final : public Sdpa {
   public:
    explicit Plan(const SdpaProblem& problem)
        : library_(device().once<Library>("cudnn", [] { return new Library(device().options); })), p_(problem) {
        graph_.set_io_data_type(fe::DataType_t::BFLOAT16)
            .set_intermediate_data_type(fe::DataType_t::FLOAT)
            .set_compute_data_type(fe::DataType_t::FLOAT);
        lengths_ = graph_.tensor(TensorForm()
                                     .set_name("lengths")
                                     .set_uid(kLengths)
                                     .set_dim({p_.documents, 1, 1, 1})
                                     .set_stride({1, 1, 1, 1})
                                     .set_data_type(fe::DataType_t::INT32));
        if (p_.backward) {
            describe_backward();
        } else {
            describe_forward();
        }
        check(graph_.validate(), "attention");
        check(graph_.build_operation_graph(library_->handle), "attention");
        check(graph_.create_execution_plans({fe::HeurMode_t::A, fe::HeurMode_t::FALLBACK}), "attention");
        check(graph_.check_support(), "attention");
        check(graph_.build_plans(), "attention");
        check(graph_.get_workspace_size(workspace_), "attention");
    }

    int64_t workspace() const override { return workspace_; }

    void run(const SdpaOperands& x, cudaStream_t stream) override {
        std::unordered_map<int64_t, void*> pointers{
            {kQ, x.q}, {kK, x.k}, {kV, x.v}, {kO, x.o}, {kStatistics, x.statistics}, {kLengths, x.lengths}};
        if (p_.backward) pointers.insert({{kDout, x.dout}, {kDq, x.dq}, {kDk, x.dk}, {kDv, x.dv}});
        for (const auto& [stride, offsets] : offsets_) {
            pointers.emplace(offsets->get_uid(), x.offsets(x.context, stride));
        }
        check(fe::detail::set_stream(library_->handle, stream), "choosing the stream");
        check(graph_.execute(library_->handle, pointers, x.workspace), "attention");
    }

   private:
    TensorPtr offsets(int64_t token_stride) {
        TensorPtr& found = offsets_[token_stride];
        if (!found) {
            const auto uid = static_cast<int64_t>(kFirstOffsets) + static_cast<int64_t>(offsets_.size());
            found = graph_.tensor(TensorForm()
                                      .set_name("offsets" + std::to_string(token_stride))
                                      .set_uid(uid)
                                      .set_dim({p_.documents + 1, 1, 1, 1})
                                      .set_stride({1, 1, 1, 1})
                                      .set_data_type(fe::DataType_t::INT64));
        }
        return found;
    }
    std::vector<int64_t> dims(int64_t heads) const { return {p_.documents, heads, p_.length, p_.dim}; }
    std::vector<int64_t> strides(Steps steps) const { return {p_.length * steps.token, steps.head, steps.token, 1}; }

    TensorPtr input(const char* name, Uid uid, int64_t heads, Steps steps) {
        return graph_.tensor(TensorForm()
                                 .set_name(name)
                                 .set_uid(uid)
                                 .set_dim(dims(heads))
                                 .set_stride(strides(steps))
                                 .set_data_type(fe::DataType_t::BFLOAT16)
                                 .set_ragged_offset(offsets(steps.token)));
    }
    void output(const TensorPtr& tensor, Uid uid, int64_t heads, Steps steps) {
        tensor->set_output(true)
            .set_uid(uid)
            .set_dim(dims(heads))
            .set_stride(strides(steps))
            .set_ragged_offset(offsets(steps.token));
    }
    void statistics(TensorForm& tensor) {
        tensor.set_uid(kStatistics)
            .set_data_type(fe::DataType_t::FLOAT)
            .set_dim({p_.documents, p_.heads, p_.length, 1});
        if (p_.padded_statistics) {
            tensor.set_stride({p_.heads * p_.length, p_.length, 1, 1});
        } else {
            tensor.set_stride({p_.heads * p_.length, 1, p_.heads, 1}).set_ragged_offset(offsets(p_.heads));
        }
    }
    // Top left: every document counts from its own first token.
    template <typename Attributes>
    void mask(Attributes& attributes) const {
        attributes.set_padding_mask(true)
            .set_seq_len_q(lengths_)
            .set_seq_len_kv(lengths_)
            .set_attn_scale(p_.scale)
            .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
            .set_diagonal_band_right_bound(0);
        // Its left bound l lets query i see key j when j + l > i, which is our window.
        if (p_.window > 0) attributes.set_diagonal_band_left_bound(static_cast<int>(p_.window));
    }

    void describe_forward() {
        TensorPtr q = input("q", kQ, p_.heads, p_.q), k = input("k", kK, p_.kv_heads, p_.k),
                  v = input("v", kV, p_.kv_heads, p_.v);
        fe::graph::SDPA_attributes attributes;
        attributes.set_name("attention").set_generate_stats(true);
        mask(attributes);
        auto [o, stats] = graph_.sdpa(q, k, v, attributes);
        output(o, kO, p_.heads, p_.o);
        stats->set_output(true);
        statistics(*stats);
    }

    void describe_backward() {
        TensorPtr q = input("q", kQ, p_.heads, p_.q), k = input("k", kK, p_.kv_heads, p_.k),
                  v = input("v", kV, p_.kv_heads, p_.v), o = input("o", kO, p_.heads, p_.o),
                  dout = input("do", kDout, p_.heads, p_.dout);
        TensorForm form;
        form.set_name("statistics");
        statistics(form);
        TensorPtr stats = graph_.tensor(form);
        fe::graph::SDPA_backward_attributes attributes;
        // Workspace for the tokens that there are, not for documents x longest.
        attributes.set_name("attention_backward")
            .set_max_total_seq_len_q(p_.tokens)
            .set_max_total_seq_len_kv(p_.tokens)
            .set_deterministic_algorithm(p_.deterministic);
        mask(attributes);
        auto [dq, dk, dv] = graph_.sdpa_backward(q, k, v, o, dout, stats, attributes);
        output(dq, kDq, p_.heads, p_.dq);
        output(dk, kDk, p_.kv_heads, p_.dk);
        output(dv, kDv, p_.kv_heads, p_.dv);
    }

    std::shared_ptr<Library> library_;
    SdpaProblem p_;
    Graph graph_;
    TensorPtr lengths_;
    std::map<int64_t, TensorPtr> offsets_;
    int64_t workspace_ = 0;
};

}  // namespace

std::string SdpaProblem::key() const {
    std::ostringstream text;
    text << "sdpa" << (backward ? " backward " : " ") << documents << 'x' << length << ' ' << tokens << 'x' << heads
         << '/' << kv_heads << 'x' << dim << " window " << window << " scale " << scale << (deterministic ? " det" : "")
         << (padded_statistics ? " padded" : "");
    for (const Steps& r : {q, k, v, o, dout, dq, dk, dv}) text << ' ' << r.token << ',' << r.head;
    return text.str();
}

std::shared_ptr<Sdpa> plan_sdpa(const SdpaProblem& problem) {
    return device().once<Sdpa>(problem.key(), [&] { return new Plan(problem); });
}

}  // namespace surogate::cuda
