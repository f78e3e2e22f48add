/* How fast this machine reads memory: THREADS threads sum a buffer of MIB MiB, which no cache holds.
 * Prints bytes a second of the fastest pass. Usage: read_bandwidth THREADS MIB PASSES */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

typedef struct {
    const uint64_t *words;
    size_t count;
    int passes;
    uint64_t sum;
    double begun, ended; /* of the last pass */
} part;

static pthread_barrier_t barrier;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* 32 independent sums, so that neither latency nor the order of additions holds the loads up, and
 * prefetches, without which the loads of one core do not fill the memory's queues. */
static uint64_t sum_words(const uint64_t *words, size_t count) {
    uint64_t sums[32] = {0}, total = 0;
    for (size_t i = 0; i + 32 <= count; i += 32) {
        __builtin_prefetch(words + i + 256);
        for (int j = 0; j < 32; j++) sums[j] += words[i + j];
    }
    for (int j = 0; j < 32; j++) total += sums[j];
    return total;
}

static void *work(void *argument) {
    part *mine = argument;
    for (int pass = 0; pass < mine->passes; pass++) {
        pthread_barrier_wait(&barrier);
        mine->begun = now();
        mine->sum += sum_words(mine->words, mine->count);
        mine->ended = now();
        pthread_barrier_wait(&barrier);
    }
    return NULL;
}

/* From the first thread's begin to the last one's end. The main thread cannot tell: it may get a core late. */
static double seconds_of(const part *parts, int threads) {
    double begun = parts[0].begun, ended = parts[0].ended;
    for (int t = 1; t < threads; t++) {
        if (parts[t].begun < begun) begun = parts[t].begun;
        if (parts[t].ended > ended) ended = parts[t].ended;
    }
    return ended - begun;
}

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    int threads = atoi(argv[1]), passes = atoi(argv[3]);
    size_t bytes = (size_t)atoi(argv[2]) << 20, count = bytes / 8 / (size_t)threads;
    uint64_t *words = aligned_alloc(1 << 21, bytes), check = 0;
    part *parts = calloc((size_t)threads, sizeof *parts);
    pthread_t *ids = calloc((size_t)threads, sizeof *ids);
    if (!words || !parts || !ids) return 1;
    madvise(words, bytes, MADV_HUGEPAGE);
    memset(words, 1, bytes);
    pthread_barrier_init(&barrier, NULL, (unsigned)threads + 1);
    for (int t = 0; t < threads; t++) {
        parts[t] = (part){.words = words + (size_t)t * count, .count = count, .passes = passes};
        if (pthread_create(&ids[t], NULL, work, &parts[t])) return 1;
    }
    double best = 1e9;
    for (int pass = 0; pass < passes; pass++) {
        pthread_barrier_wait(&barrier);
        pthread_barrier_wait(&barrier);
        double seconds = seconds_of(parts, threads);
        if (seconds < best) best = seconds;
    }
    for (int t = 0; t < threads; t++) {
        pthread_join(ids[t], NULL);
        check += parts[t].sum;
    }
    printf("%.0f %llu\n", (double)(count * (size_t)threads * 8) / best, (unsigned long long)check);
    return 0;
}
