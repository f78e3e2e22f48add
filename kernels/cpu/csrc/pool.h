/* Threads that walk a list of ops together. An op is a few phases; a phase is a number of independent chunks that
 * threads share out, and begins when the one before is done. Which thread runs a chunk never changes its
 * result. */
#ifndef QD_POOL_H
#define QD_POOL_H

#include "abi.h"
#include "simd.h"

/* scratch: this thread's own; shared: one area for all, kept from phase to phase of an op. */
typedef struct {
  qd_pool *pool;
  uint8_t *scratch, *shared;
  int id, num_threads;
} qd_thread;

typedef struct {
  int num_phases;
  /* Bytes of shared and of each thread's scratch; either may be NULL for none. */
  long (*shared_bytes)(const void *args, const qd_step *step, int num_threads);
  long (*scratch_bytes)(const void *args, const qd_step *step);
  /* Chunks of a phase; 0 skips it. */
  long (*num_chunks)(const void *args, const qd_step *step, int phase, int num_threads);
  /* Run by every thread that is in time for the op, at its start; may be NULL. May only write the thread's scratch: a
   * thread put aside in it may find its inputs overwritten, and then gets no chunk of the op. */
  void (*enter)(const void *args, const qd_step *step, qd_thread *thread);
  void (*chunk)(const void *args, const qd_step *step, int phase, long index, qd_thread *thread);
} qd_kernel;

extern const qd_kernel pack_kernel, embedding_kernel, norm_kernel, linear_kernel, glu_kernel, copy_kernel,
    rope_kernel, attention_kernel, shortlist_kernel;

#endif
