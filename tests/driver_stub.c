/* As much of a CUDA driver as the copy worker and the tests need, on host memory. Copies take time: their bytes appear
   when their event is first seen to have passed, in the order of the stream. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define RATE_BYTES_PER_NS 20.0
#define SLOTS 4096

typedef struct { uint64_t dst; void *src; size_t bytes; int64_t end_ns; } Copy;
typedef struct { int64_t mark, when_ns; } Event;

static Copy copies[SLOTS];
static int64_t issued, landed, busy_ns;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void land(int64_t now) {
    while (landed < issued && copies[landed % SLOTS].end_ns <= now) {
        Copy c = copies[landed++ % SLOTS];
        memcpy((void *)c.dst, c.src, c.bytes);
    }
}

int cuCtxSetCurrent(void *context) { (void)context; return 0; }
int cuEventCreate(void **event, unsigned flags) { (void)flags; *event = calloc(1, sizeof(Event)); return 0; }

int cuMemcpyHtoDAsync_v2(uint64_t dst, void *src, size_t bytes, void *stream) {
    (void)stream;
    pthread_mutex_lock(&lock);
    int64_t start = now_ns();
    if (busy_ns > start) start = busy_ns;
    busy_ns = start + (int64_t)(bytes / RATE_BYTES_PER_NS) + 2000;
    Copy c = {dst, src, bytes, busy_ns};
    copies[issued++ % SLOTS] = c;
    pthread_mutex_unlock(&lock);
    return 0;
}

int cuEventRecord(void *event, void *stream) {
    (void)stream;
    pthread_mutex_lock(&lock);
    int64_t now = now_ns();
    ((Event *)event)->mark = issued;
    ((Event *)event)->when_ns = busy_ns > now ? busy_ns : now;
    pthread_mutex_unlock(&lock);
    return 0;
}

int cuEventQuery(void *event) {
    pthread_mutex_lock(&lock);
    land(now_ns());
    int passed = landed >= ((Event *)event)->mark;
    pthread_mutex_unlock(&lock);
    return passed ? 0 : 600;
}

int cuEventElapsedTime(float *ms, void *start, void *end) {
    *ms = (((Event *)end)->when_ns - ((Event *)start)->when_ns) / 1e6f;
    return 0;
}

/* The copy stream (2) waits for computation, which the tests run at once; the compute stream (1) waits here. */
int cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
    (void)flags;
    if (stream == (void *)1)
        while (cuEventQuery(event)) {}
    return 0;
}
