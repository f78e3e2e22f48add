/* The thread pool: workers spin for a while between steps, then sleep; barriers spin, then yield. */
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>

#define SPINS_BEFORE_SLEEP 2000
#define SPINS_BEFORE_YIELD 4000
#define ALIGNMENT 64

struct qd_pool {
  int num_threads;
  /* The step being run. */
  const qd_op *ops;
  int64_t num_ops;
  const qd_step *step;
  /* Each on its own cache line: claimed chunks, arrivals and number of the barrier, number of the step. */
  __attribute__((aligned(ALIGNMENT))) long next_chunk;
  __attribute__((aligned(ALIGNMENT))) int arrived;
  __attribute__((aligned(ALIGNMENT))) unsigned barrier;
  __attribute__((aligned(ALIGNMENT))) unsigned started;
  __attribute__((aligned(ALIGNMENT))) int stopping;
  int sleeping;
  pthread_mutex_t mutex;
  pthread_cond_t wake;
  pthread_t *workers;
  qd_thread *threads;
  long scratch_bytes, shared_bytes;
  uint8_t *shared;
};

static const qd_kernel *const kernels[QD_NUM_KINDS] = {
    [QD_PACK] = &pack_kernel, [QD_EMBEDDING] = &embedding_kernel, [QD_NORM] = &norm_kernel,
    [QD_LINEAR] = &linear_kernel, [QD_GLU] = &glu_kernel, [QD_COPY] = &copy_kernel,
    [QD_ROPE] = &rope_kernel, [QD_ATTENTION] = &attention_kernel,
};

static void wait_for_all(qd_pool *pool) {
  unsigned before = __atomic_load_n(&pool->barrier, __ATOMIC_RELAXED);
  if (__atomic_add_fetch(&pool->arrived, 1, __ATOMIC_ACQ_REL) == pool->num_threads) {
    pool->arrived = 0;
    pool->next_chunk = 0;
    __atomic_store_n(&pool->barrier, before + 1, __ATOMIC_RELEASE);
    return;
  }
  for (long spins = 0; __atomic_load_n(&pool->barrier, __ATOMIC_ACQUIRE) == before; spins++) {
    if (spins < SPINS_BEFORE_YIELD)
      cpu_relax();
    else
      sched_yield();
  }
}

static void run_phase(qd_thread *t, const qd_kernel *kernel, const void *args, const qd_step *step, int phase) {
  long count = kernel->num_chunks(args, step, phase, t->num_threads), i;
  if (count == 0) return;
  while ((i = __atomic_fetch_add(&t->pool->next_chunk, 1, __ATOMIC_RELAXED)) < count)
    kernel->chunk(args, step, phase, i, t);
  wait_for_all(t->pool);
}

static void run_ops(qd_thread *t) {
  const qd_op *ops = t->pool->ops;
  const qd_step *step = t->pool->step;
  int64_t num_ops = t->pool->num_ops;
  for (int64_t i = 0; i < num_ops; i++) {
    const qd_kernel *kernel = kernels[ops[i].kind];
    if (kernel->enter) kernel->enter(ops[i].args, step, t);
    for (int phase = 0; phase < kernel->num_phases; phase++) run_phase(t, kernel, ops[i].args, step, phase);
  }
  wait_for_all(t->pool); /* ops and step are the caller's again once it returns */
}

static void wait_for_step(qd_pool *pool, unsigned seen) {
  for (int spins = 0; spins < SPINS_BEFORE_SLEEP; spins++) {
    if (__atomic_load_n(&pool->started, __ATOMIC_ACQUIRE) != seen) return;
    cpu_relax();
  }
  pthread_mutex_lock(&pool->mutex);
  pool->sleeping++;
  while (__atomic_load_n(&pool->started, __ATOMIC_ACQUIRE) == seen) pthread_cond_wait(&pool->wake, &pool->mutex);
  pool->sleeping--;
  pthread_mutex_unlock(&pool->mutex);
}

static void start_step(qd_pool *pool) {
  pthread_mutex_lock(&pool->mutex);
  __atomic_add_fetch(&pool->started, 1, __ATOMIC_RELEASE);
  if (pool->sleeping) pthread_cond_broadcast(&pool->wake);
  pthread_mutex_unlock(&pool->mutex);
}

static void *work(void *arg) {
  qd_thread *t = arg;
  for (unsigned seen = 0;; seen++) {
    wait_for_step(t->pool, seen);
    if (t->pool->stopping) return NULL;
    run_ops(t);
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
  if (pool->num_threads > 1) start_step(pool);
  run_ops(&pool->threads[0]);
  return 0;
}

static void free_pool(qd_pool *pool) {
  for (int i = 0; i < pool->num_threads; i++) free(pool->threads[i].scratch);
  free(pool->shared);
  free(pool->threads);
  free(pool->workers);
  pthread_cond_destroy(&pool->wake);
  pthread_mutex_destroy(&pool->mutex);
  free(pool);
}

static void stop_workers(qd_pool *pool, int num_workers) {
  pool->stopping = 1;
  start_step(pool);
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

qd_pool *qd_pool_create(int32_t num_threads) {
  void *memory;
  if (posix_memalign(&memory, ALIGNMENT, sizeof(qd_pool))) return NULL;
  qd_pool *pool = memset(memory, 0, sizeof(qd_pool));
  pthread_mutex_init(&pool->mutex, NULL);
  pthread_cond_init(&pool->wake, NULL);
  pool->workers = calloc((size_t)num_threads, sizeof(pthread_t));
  pool->threads = calloc((size_t)num_threads, sizeof(qd_thread));
  if (pool->workers && pool->threads) {
    pool->num_threads = num_threads;
    if (start_workers(pool) == 0) return pool;
  }
  free_pool(pool);
  return NULL;
}

const char *qd_path_name(void) { return PATH_NAME; }
