/* The thread pool: workers spin for a while between steps, then sleep.
 *
 * A phase ends when its chunks are done, not when every thread has come by: a thread that the system has put aside
 * between two chunks holds nobody up, and passes over the phases it missed.
 *
 * Each thread has a contiguous share of a phase's chunks, so that it reads memory in order and counts on a line of its
 * own. Who is done with his share takes from the others'. */
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>

/* About half a millisecond: what lies between the steps of a busy engine. Most of them yield, to whoever has work. */
#define SPINS_BEFORE_SLEEP 1500
#define SPINS_BEFORE_YIELD 300
#define ALIGNMENT 64
#define ON_OWN_LINE __attribute__((aligned(ALIGNMENT)))

/* gate: number of the step << 32, whether threads may join it, and how many workers are in it. */
#define STEP_SHIFT 32
#define OPEN (1u << 31)
#define IN_STEP (OPEN - 1)

/* Number of the phase << 32, and how many chunks of the share are taken. */
typedef struct {
  ON_OWN_LINE uint64_t taken;
} share;

struct qd_pool {
  int num_threads, sleeping, stopping;
  const qd_op *ops;
  int64_t num_ops;
  const qd_step *step;
  share *shares; /* of each thread */
  ON_OWN_LINE uint64_t gate;
  ON_OWN_LINE uint32_t phase; /* number of the present one */
  ON_OWN_LINE long done;      /* chunks of the phase */
  ON_OWN_LINE pthread_mutex_t mutex;
  pthread_cond_t wake;
  pthread_t *workers;
  qd_thread *threads;
  long scratch_bytes, shared_bytes;
  uint8_t *shared;
};

static const qd_kernel *const kernels[QD_NUM_KINDS] = {
    [QD_PACK] = &pack_kernel, [QD_EMBEDDING] = &embedding_kernel, [QD_NORM] = &norm_kernel,
    [QD_LINEAR] = &linear_kernel, [QD_GLU] = &glu_kernel, [QD_COPY] = &copy_kernel,
    [QD_ROPE] = &rope_kernel, [QD_ATTENTION] = &attention_kernel, [QD_SHORTLIST] = &shortlist_kernel,
};

INLINE void relax(long spins) {
  if (spins < SPINS_BEFORE_YIELD)
    cpu_relax();
  else
    sched_yield();
}

INLINE uint32_t current_phase(qd_pool *pool) { return __atomic_load_n(&pool->phase, __ATOMIC_ACQUIRE); }

/* Where the share of a thread begins, of `count` chunks. */
INLINE long share_start(const qd_pool *pool, long count, int id) { return count * id / pool->num_threads; }

/* The next chunk of a thread's share, or -1 where all are taken or the phase is over. */
static long claim(qd_pool *pool, uint32_t phase, long count, int id) {
  long start = share_start(pool, count, id), size = share_start(pool, count, id + 1) - start;
  uint64_t *at = &pool->shares[id].taken, taken = __atomic_load_n(at, __ATOMIC_ACQUIRE);
  do
    if ((uint32_t)(taken >> 32) != phase || (long)(uint32_t)taken >= size) return -1;
  while (!__atomic_compare_exchange_n(at, &taken, taken + 1, 1, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
  return start + (long)(uint32_t)taken;
}

static void begin_phase(qd_pool *pool, uint32_t number) {
  pool->done = 0;
  for (int id = 0; id < pool->num_threads; id++)
    __atomic_store_n(&pool->shares[id].taken, (uint64_t)number << 32, __ATOMIC_RELEASE);
  __atomic_store_n(&pool->phase, number, __ATOMIC_RELEASE);
}

static void run_phase(qd_thread *t, const qd_kernel *kernel, const void *args, int phase, uint32_t number, long count) {
  qd_pool *pool = t->pool;
  long done = 0;
  for (int i = 0; i < pool->num_threads; i++)
    for (long chunk; (chunk = claim(pool, number, count, (t->id + i) % pool->num_threads)) >= 0; done++)
      kernel->chunk(args, pool->step, phase, chunk, t);
  if (done > 0 && __atomic_add_fetch(&pool->done, done, __ATOMIC_ACQ_REL) == count) begin_phase(pool, number + 1);
  for (long spins = 0; current_phase(pool) == number; spins++) relax(spins);
}

static void run_ops(qd_thread *t) {
  qd_pool *pool = t->pool;
  uint32_t number = 0; /* of the next phase that has chunks */
  for (int64_t i = 0; i < pool->num_ops; i++) {
    const qd_kernel *kernel = kernels[pool->ops[i].kind];
    const void *args = pool->ops[i].args;
    if (kernel->enter && current_phase(pool) == number) kernel->enter(args, pool->step, t);
    for (int phase = 0; phase < kernel->num_phases; phase++) {
      long count = kernel->num_chunks(args, pool->step, phase, t->num_threads);
      if (count > 0) run_phase(t, kernel, args, phase, number++, count);
    }
  }
}

INLINE uint64_t gate_of(qd_pool *pool) { return __atomic_load_n(&pool->gate, __ATOMIC_ACQUIRE); }

/* Waits for a step other than `seen`. */
static void wait_for_step(qd_pool *pool, uint32_t seen) {
  for (long spins = 0; spins < SPINS_BEFORE_SLEEP; spins++) {
    if ((uint32_t)(gate_of(pool) >> STEP_SHIFT) != seen) return;
    relax(spins);
  }
  pthread_mutex_lock(&pool->mutex);
  pool->sleeping++;
  while ((uint32_t)(gate_of(pool) >> STEP_SHIFT) == seen) pthread_cond_wait(&pool->wake, &pool->mutex);
  pool->sleeping--;
  pthread_mutex_unlock(&pool->mutex);
}

/* Opens the next step, or with `open` 0 only wakes everyone. */
static void start_step(qd_pool *pool, uint32_t open) {
  pthread_mutex_lock(&pool->mutex);
  uint64_t number = (pool->gate >> STEP_SHIFT) + 1;
  __atomic_store_n(&pool->gate, number << STEP_SHIFT | open, __ATOMIC_RELEASE);
  if (pool->sleeping) pthread_cond_broadcast(&pool->wake);
  pthread_mutex_unlock(&pool->mutex);
}

/* Closes the step; afterwards ops and step are the caller's again. */
static void end_step(qd_pool *pool) {
  __atomic_and_fetch(&pool->gate, ~(uint64_t)OPEN, __ATOMIC_ACQ_REL);
  for (long spins = 0; gate_of(pool) & IN_STEP; spins++) relax(spins);
}

/* Whether the worker is in the step: it may have come too late. */
static int join_step(qd_pool *pool, uint32_t *seen) {
  uint64_t gate = gate_of(pool);
  do {
    *seen = (uint32_t)(gate >> STEP_SHIFT);
    if (!(gate & OPEN)) return 0;
  } while (!__atomic_compare_exchange_n(&pool->gate, &gate, gate + 1, 1, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
  return 1;
}

static void *work(void *arg) {
  qd_thread *t = arg;
  uint32_t seen = 0;
  for (;;) {
    wait_for_step(t->pool, seen);
    if (join_step(t->pool, &seen)) {
      run_ops(t);
      __atomic_sub_fetch(&t->pool->gate, 1, __ATOMIC_ACQ_REL);
    } else if (t->pool->stopping) {
      return NULL;
    }
  }
}

static int grow(uint8_t **area, long have, long want) {
  void *fresh;
  if (want <= have) return 0;
  if (posix_memalign(&fresh, ALIGNMENT, (size_t)want)) return -1;
  free(*area);
  *area = fresh;
  return 1;
}

static int reserve(qd_pool *pool, long shared, long scratch) {
  int grown = grow(&pool->shared, pool->shared_bytes, shared);
  if (grown < 0) return -1;
  if (grown) pool->shared_bytes = shared;
  for (int i = 0; i < pool->num_threads; i++) {
    pool->threads[i].shared = pool->shared;
    if (grow(&pool->threads[i].scratch, pool->scratch_bytes, scratch) < 0) return -1;
  }
  pool->scratch_bytes = max_long(pool->scratch_bytes, scratch);
  return 0;
}

int32_t qd_run(qd_pool *pool, const qd_op *ops, int64_t num_ops, const qd_step *step) {
  long shared = 0, scratch = 0;
  for (int64_t i = 0; i < num_ops; i++) {
    const qd_kernel *kernel = kernels[ops[i].kind];
    if (kernel->shared_bytes) shared = max_long(shared, kernel->shared_bytes(ops[i].args, step, pool->num_threads));
    if (kernel->scratch_bytes) scratch = max_long(scratch, kernel->scratch_bytes(ops[i].args, step));
  }
  if (reserve(pool, shared, scratch)) return -1;
  pool->ops = ops;
  pool->num_ops = num_ops;
  pool->step = step;
  begin_phase(pool, 0);
  if (pool->num_threads > 1) start_step(pool, OPEN);
  run_ops(&pool->threads[0]);
  if (pool->num_threads > 1) end_step(pool);
  return 0;
}

static void free_pool(qd_pool *pool) {
  for (int i = 0; i < pool->num_threads; i++) free(pool->threads[i].scratch);
  free(pool->shared);
  free(pool->shares);
  free(pool->threads);
  free(pool->workers);
  pthread_cond_destroy(&pool->wake);
  pthread_mutex_destroy(&pool->mutex);
  free(pool);
}

static void stop_workers(qd_pool *pool, int num_workers) {
  pool->stopping = 1;
  start_step(pool, 0);
  for (int i = 0; i < num_workers; i++) pthread_join(pool->workers[i], NULL);
}

void qd_pool_destroy(qd_pool *pool) {
  stop_workers(pool, pool->num_threads - 1);
  free_pool(pool);
}

static int start_workers(qd_pool *pool) {
  for (int i = 0; i < pool->num_threads; i++)
    pool->threads[i] = (qd_thread){.pool = pool, .id = i, .num_threads = pool->num_threads};
  for (int i = 0; i < pool->num_threads - 1; i++)
    if (pthread_create(&pool->workers[i], NULL, work, &pool->threads[i + 1])) {
      stop_workers(pool, i);
      return -1;
    }
  return 0;
}

/* Zeroed and aligned, or NULL. */
static void *allocate(size_t bytes) {
  void *memory;
  return posix_memalign(&memory, ALIGNMENT, bytes) ? NULL : memset(memory, 0, bytes);
}

qd_pool *qd_pool_create(int32_t num_threads) {
  qd_pool *pool = allocate(sizeof(qd_pool));
  if (!pool) return NULL;
  pthread_mutex_init(&pool->mutex, NULL);
  pthread_cond_init(&pool->wake, NULL);
  pool->workers = calloc((size_t)num_threads, sizeof(pthread_t));
  pool->threads = calloc((size_t)num_threads, sizeof(qd_thread));
  pool->shares = allocate((size_t)num_threads * sizeof(share));
  if (pool->workers && pool->threads && pool->shares) {
    pool->num_threads = num_threads;
    if (start_workers(pool) == 0) return pool;
  }
  free_pool(pool);
  return NULL;
}

const char *qd_path_name(void) { return PATH_NAME; }
