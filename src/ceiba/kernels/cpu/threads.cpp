#include "threads.h"

#include <thread>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ceiba {
namespace {

// A pause takes 40 to 140 cycles: these are some tens of microseconds, longer than a stage's imbalance on idle cores and
// short enough that on a busy machine a waiting thread hands its core to the one it waits for.
constexpr int BARRIER_SPINS = 1500;
constexpr int IDLE_SPINS = 500;

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline uint32_t peek(const uint32_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

}  // namespace

struct Team::Worker {
  std::thread thread;
};

Team::Team(int threads) : size_(threads < 1 ? 1 : threads), workers_(new Worker[size_]) {
  for (int id = 1; id < size_; id++) workers_[id].thread = std::thread([this, id] { work(id); });
}

Team::~Team() {
  __atomic_store_n(&stop_, 1, __ATOMIC_RELEASE);
  __atomic_add_fetch(&generation_, 1, __ATOMIC_SEQ_CST);
  wake(&generation_);
  for (int id = 1; id < size_; id++) workers_[id].thread.join();
  delete[] workers_;
}

void Team::wait_while(const uint32_t* word, uint32_t value, int spins) {
  for (int i = 0; i < spins; i++) {
    if (peek(word) != value) return;
    relax();
  }
  __atomic_add_fetch(&sleepers_, 1, __ATOMIC_SEQ_CST);
  while (peek(word) == value) {
#if defined(__linux__)
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
#else
    std::this_thread::yield();
#endif
  }
  __atomic_sub_fetch(&sleepers_, 1, __ATOMIC_SEQ_CST);
}

void Team::wake(uint32_t* word) {
#if defined(__linux__)
  if (__atomic_load_n(&sleepers_, __ATOMIC_SEQ_CST)) syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1 << 20, nullptr, nullptr, 0);
#else
  (void)word;
#endif
}

void Team::work(int id) {
  uint32_t seen = 0;
  for (;;) {
    wait_while(&generation_, seen, IDLE_SPINS);
    seen = peek(&generation_);
    if (peek(&stop_)) return;
    fn_(context_, id);
    __atomic_add_fetch(&done_, 1, __ATOMIC_SEQ_CST);
    wake(&done_);
  }
}

void Team::run(void (*fn)(void*, int), void* context) {
  if (size_ == 1) return fn(context, 0);
  fn_ = fn;
  context_ = context;
  __atomic_store_n(&done_, 0, __ATOMIC_SEQ_CST);
  __atomic_add_fetch(&generation_, 1, __ATOMIC_SEQ_CST);
  wake(&generation_);
  fn(context, 0);
  for (uint32_t seen; (seen = peek(&done_)) != uint32_t(size_ - 1);) wait_while(&done_, seen, BARRIER_SPINS);
}

void Team::barrier() {
  if (size_ == 1) return;
  uint32_t phase = peek(&phase_);
  if (__atomic_add_fetch(&arrived_, 1, __ATOMIC_SEQ_CST) == uint32_t(size_)) {
    __atomic_store_n(&arrived_, 0, __ATOMIC_SEQ_CST);
    __atomic_add_fetch(&phase_, 1, __ATOMIC_SEQ_CST);
    wake(&phase_);
  } else {
    wait_while(&phase_, phase, BARRIER_SPINS);
  }
}

}  // namespace ceiba
