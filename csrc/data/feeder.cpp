#include "data/feeder.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace surogate {

MappedFile::MappedFile(const std::string& path) {
    int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) throw std::invalid_argument(path + ": " + std::strerror(errno));
    struct stat info{};
    if (fstat(file, &info) != 0 || !S_ISREG(info.st_mode)) {
        close(file);
        throw std::invalid_argument(path + ": not a file");
    }
    bytes_ = info.st_size;
    if (bytes_ > 0) {
        data_ = mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ, MAP_SHARED, file, 0);
        if (data_ == MAP_FAILED) {
            int error = errno;
            close(file);
            throw std::invalid_argument(path + ": " + std::strerror(error));
        }
    }
    close(file);
}

MappedFile::~MappedFile() {
    if (bytes_ > 0) munmap(data_, static_cast<size_t>(bytes_));
}

Feeder::Feeder(const std::string& tokens, const std::string& mask, std::vector<int64_t> pieces,
               std::vector<int64_t> sequences, int64_t batch, int64_t sequence_len, int64_t max_documents,
               int32_t pad_id, int64_t cursor, int64_t vocab_size, int rank, int ranks)
    : tokens_file_(tokens),
      mask_file_(mask),
      tokens_(static_cast<const int32_t*>(tokens_file_.data())),
      mask_(static_cast<const uint8_t*>(mask_file_.data())),
      token_count_(tokens_file_.bytes() / 4),
      pieces_(std::move(pieces)),
      sequences_(std::move(sequences)),
      batch_(batch),
      sequence_len_(sequence_len),
      max_documents_(max_documents),
      pad_id_(pad_id),
      vocab_size_(vocab_size),
      rank_(rank),
      ranks_(ranks),
      cursor_(cursor),
      next_(cursor) {
    if (tokens_file_.bytes() % 4 != 0 || mask_file_.bytes() != token_count_) {
        throw std::invalid_argument(tokens + " and " + mask +
                                    " do not belong together: " + std::to_string(tokens_file_.bytes()) + " and " +
                                    std::to_string(mask_file_.bytes()) + " bytes");
    }
    check();
    thread_ = std::thread([this] { loop(); });
}

Feeder::~Feeder() {
    {
        std::lock_guard lock(mutex_);
        stop_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
}

void Feeder::check() const {
    auto fail = [](const std::string& what) { throw std::invalid_argument("feeder: " + what); };
    if (batch_ < 1 || sequence_len_ < 1 || max_documents_ < 1) fail("sizes must be at least 1");
    // cu_seqlens counts in int32.
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
    if (batch_ > kMost / sequence_len_ || max_documents_ >= kMost) fail("a micro-batch has more than 2^31 - 1 tokens");
    if (vocab_size_ < 0 || vocab_size_ > kMost) fail("vocab_size " + std::to_string(vocab_size_));
    if (pad_id_ < 0 || (vocab_size_ > 0 && pad_id_ >= vocab_size_)) {
        fail("pad_id " + std::to_string(pad_id_) + " is outside the vocabulary");
    }
    if (pieces_.size() % 3 != 0) fail("pieces have three columns");
    const auto piece_count = static_cast<int64_t>(pieces_.size() / 3);
    if (sequences_.empty() || sequences_.front() != 0 || sequences_.back() != piece_count) {
        fail("sequences must begin with 0 and end with the number of pieces");
    }
    const auto sequence_count = static_cast<int64_t>(sequences_.size()) - 1;
    if (ranks_ < 1 || rank_ < 0 || rank_ >= ranks_) fail("there is no such rank");
    if (sequence_count % stride() != 0) fail("the order must be filled up to whole micro-batches of every rank");
    if (next_ < 0 || next_ > sequence_count || next_ % stride() != 0) {
        fail("cursor " + std::to_string(next_) + " is no boundary of a micro-batch");
    }
    int64_t documents = 0;
    for (int64_t s = 0; s < sequence_count; ++s) {
        const int64_t begin = sequences_[static_cast<size_t>(s)], end = sequences_[static_cast<size_t>(s) + 1];
        if (end < begin || end > piece_count) fail("sequences must not fall, nor pass the number of pieces");
        int64_t used = 0;
        for (int64_t p = begin; p < end; ++p) {
            const int64_t* piece = &pieces_[static_cast<size_t>(p) * 3];
            if (piece[0] < 0 || piece[1] < 1 || piece[0] > token_count_ - piece[1]) {
                fail("piece " + std::to_string(p) + " lies outside the shard");
            }
            if (piece[2] != 0 && piece[0] + piece[1] >= token_count_) {
                fail("piece " + std::to_string(p) + " continues behind the shard's end");
            }
            used += piece[1];
        }
        if (used > sequence_len_) {
            fail("sequence " + std::to_string(s) + " has " + std::to_string(used) + " tokens, more than " +
                 std::to_string(sequence_len_));
        }
        if (s % batch_ == 0) documents = 0;
        documents += end - begin + (used < sequence_len_ ? 1 : 0);
        if (documents > max_documents_) {
            fail("a micro-batch has more than " + std::to_string(max_documents_) + " documents");
        }
    }
}

// What the whole micro-batches of all ranks hold, from the mask alone.
void Feeder::count(int64_t first_sequence, Batch& b) const {
    for (int64_t p = sequences_[static_cast<size_t>(first_sequence)];
         p < sequences_[static_cast<size_t>(first_sequence + stride())]; ++p) {
        const int64_t* piece = &pieces_[static_cast<size_t>(p) * 3];
        const int64_t start = piece[0], length = piece[1];
        b.all_tokens += length;
        for (int64_t i = 1; i < length + (piece[2] != 0 ? 1 : 0); ++i) b.all_targets += mask_[start + i] != 0 ? 1 : 0;
    }
}

Batch Feeder::prepare(int64_t first_sequence) const {
    Batch b;
    const auto total = static_cast<size_t>(batch_ * sequence_len_);
    b.ids.assign(total, pad_id_);
    b.targets.assign(total, -100);
    b.positions.assign(total, 0);
    b.cu_seqlens.assign(static_cast<size_t>(max_documents_) + 1, static_cast<int32_t>(total));
    auto known = [&](int64_t index) {
        const int32_t token = tokens_[index];
        if (vocab_size_ > 0 && (token < 0 || token >= vocab_size_)) {
            throw std::invalid_argument("feeder: token " + std::to_string(index) + " of the shard is " +
                                        std::to_string(token) + ", outside a vocabulary of " +
                                        std::to_string(vocab_size_));
        }
        return token;
    };
    size_t document = 0;
    b.cu_seqlens[document++] = 0;
    for (int64_t s = 0; s < batch_; ++s) {
        const auto sequence = static_cast<size_t>(first_sequence + s);
        auto at = static_cast<size_t>(s * sequence_len_);
        const size_t end = at + static_cast<size_t>(sequence_len_);
        for (int64_t p = sequences_[sequence]; p < sequences_[sequence + 1]; ++p) {
            const int64_t* piece = &pieces_[static_cast<size_t>(p) * 3];
            const int64_t start = piece[0], length = piece[1];
            for (int64_t i = 0; i < length; ++i, ++at) {
                b.ids[at] = known(start + i);
                b.positions[at] = static_cast<int32_t>(i);
                // The target is the next token of the same document, also behind the cut of a long one.
                if ((i + 1 < length || piece[2] != 0) && mask_[start + i + 1] != 0) {
                    b.targets[at] = known(start + i + 1);
                    ++b.target_count;
                }
            }
            b.token_count += length;
            b.cu_seqlens[document++] = static_cast<int32_t>(at);
        }
        if (at < end) {
            for (int32_t i = 0; at < end; ++at, ++i) b.positions[at] = i;
            b.cu_seqlens[document++] = static_cast<int32_t>(end);
        }
    }
    return b;
}

void Feeder::loop() {
    const auto sequence_count = static_cast<int64_t>(sequences_.size()) - 1;
    std::unique_lock lock(mutex_);
    for (;;) {
        changed_.wait(lock, [&] { return stop_ || (ready_.size() < ahead_ && next_ < sequence_count); });
        if (stop_) return;
        const int64_t first = next_;
        lock.unlock();
        Batch batch;
        std::exception_ptr failure;
        try {
            batch = prepare(first + rank_ * batch_);
            if (ranks_ == 1) {
                batch.all_targets = batch.target_count;
                batch.all_tokens = batch.token_count;
            } else {
                count(first, batch);
            }
        } catch (...) {
            failure = std::current_exception();
        }
        lock.lock();
        if (failure) {
            failure_ = failure;
            changed_.notify_all();
            return;
        }
        ready_.push_back(std::move(batch));
        next_ = first + stride();
        changed_.notify_all();
    }
}

std::vector<Batch> Feeder::take(int n) {
    const auto sequence_count = static_cast<int64_t>(sequences_.size()) - 1;
    if (n < 1) throw std::invalid_argument("feeder: take at least one micro-batch");
    std::lock_guard turn(taking_);
    if (n > (sequence_count - cursor_) / stride()) throw std::out_of_range("feeder: the order has ended");
    std::vector<Batch> taken;
    std::unique_lock lock(mutex_);
    ahead_ = std::max(ahead_, static_cast<size_t>(n));
    changed_.notify_all();
    while (static_cast<int>(taken.size()) < n) {
        changed_.wait(lock, [&] { return !ready_.empty() || failure_; });
        // What was prepared before the failure is still handed out.
        if (ready_.empty()) std::rethrow_exception(failure_);
        taken.push_back(std::move(ready_.front()));
        ready_.pop_front();
        changed_.notify_all();
    }
    cursor_ += n * stride();
    return taken;
}

}  // namespace surogate
