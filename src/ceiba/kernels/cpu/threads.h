// A team of compute threads that run one function together (SPMD). Between runs they sleep; inside a run they meet at
// barriers that spin only briefly, so that the front end gets its share of a small machine.
#pragma once

#include <cstdint>

namespace ceiba {

class Team {
 public:
  // `threads` counts the caller, who takes part as number 0.
  explicit Team(int threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }
  // Calls fn(context, id) on every thread and returns when all have returned. One run at a time.
  void run(void (*fn)(void*, int), void* context);
  // Inside a run: wait for the others.
  void barrier();

 private:
  struct Worker;
  void work(int id);
  void wait_while(const uint32_t* word, uint32_t value, int spins);
  void wake(uint32_t* word);

  int size_;
  Worker* workers_;
  void (*fn_)(void*, int) = nullptr;
  void* context_ = nullptr;
  alignas(64) uint32_t generation_ = 0;  // a new run
  alignas(64) uint32_t done_ = 0;        // workers that finished the run
  alignas(64) uint32_t arrived_ = 0;     // barrier: threads that came
  alignas(64) uint32_t phase_ = 0;       // barrier: how often it opened
  alignas(64) uint32_t sleepers_ = 0;    // threads in a futex wait
  uint32_t stop_ = 0;
};

}  // namespace ceiba
