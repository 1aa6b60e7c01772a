// Feeder: micro-batches from memory-mapped token shards, prepared ahead on a thread of its own.
// See docs/architecture.md, "Tokens: shards, pieces, sequences".
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace surogate {

struct Batch {
    std::vector<int32_t> ids, targets, positions;  // [batch * sequence_len]
    std::vector<int32_t> cu_seqlens;               // [max_documents + 1]
    int64_t target_count = 0;
    int64_t token_count = 0;  // padding not counted
    int64_t all_targets = 0;  // with those of the micro-batches that the other ranks take at the same time
    int64_t all_tokens = 0;
};

// A read-only mapping of a whole file.
class MappedFile {
   public:
    explicit MappedFile(const std::string& path);
    ~MappedFile();
    MappedFile(const MappedFile&) = delete;
    MappedFile& operator=(const MappedFile&) = delete;
    const void* data() const { return data_; }
    int64_t bytes() const { return bytes_; }

   private:
    void* data_ = nullptr;
    int64_t bytes_ = 0;
};

class Feeder {
   public:
    // `pieces`: rows (start, length, continues). `sequences`: first piece of each sequence, and the end. Throws
    // std::invalid_argument for files that cannot be mapped, pieces outside the shard, sequences that are too long, and
    // micro-batches with more than `max_documents` documents. With `vocab_size` > 0, a token outside [0, vocab_size) is
    // an error of the `take` that would hand it out. With several ranks the micro-batches are dealt out in turn: rank r
    // takes the first + r, then that + ranks, and so on.
    Feeder(const std::string& tokens, const std::string& mask, std::vector<int64_t> pieces,
           std::vector<int64_t> sequences, int64_t batch, int64_t sequence_len, int64_t max_documents, int32_t pad_id,
           int64_t cursor, int64_t vocab_size, int rank = 0, int ranks = 1);
    ~Feeder();

    // The next n micro-batches, in order; waits for the thread where they are not ready. Throws std::out_of_range at
    // the end of the order. Afterwards up to n are prepared ahead. Callers on several threads take turns.
    std::vector<Batch> take(int n);
    // Sequences taken so far by all ranks, from the beginning of the order.
    int64_t cursor() const { return cursor_; }

   private:
    Batch prepare(int64_t first_sequence) const;
    void count(int64_t first_sequence, Batch& batch) const;
    int64_t stride() const { return batch_ * ranks_; }
    void check() const;
    void loop();

    MappedFile tokens_file_, mask_file_;
    const int32_t* tokens_;
    const uint8_t* mask_;
    int64_t token_count_;
    std::vector<int64_t> pieces_, sequences_;
    int64_t batch_, sequence_len_, max_documents_;
    int32_t pad_id_;
    int64_t vocab_size_;
    int64_t rank_, ranks_;
    std::atomic<int64_t> cursor_;

    std::mutex taking_;  // held for a whole take, so that its micro-batches follow each other
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Batch> ready_;
    int64_t next_;      // first sequence of the next micro-batch to prepare
    size_t ahead_ = 2;  // micro-batches to hold ready
    bool stop_ = false;
    std::exception_ptr failure_;
    std::thread thread_;
};

}  // namespace surogate
