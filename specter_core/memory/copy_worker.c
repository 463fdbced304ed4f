/* The link's I/O thread: a software queue of expert copies and the driver calls that carry them out.

   Native, so that issuing a copy never waits for Python's interpreter lock. Demands before prefetches, first come first
   served inside each; pieces of at most piece_bytes, at most `limit` of them on the stream. Python talks to it through
   the functions at the end (ctypes); the driver is reached through dlopen, so building it needs no CUDA headers. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define TABLE (1 << 16)
#define MAX_FLYING 8
#define NOT_READY 600
#define IDLE_SPIN_NS 10000000
#define SLACK_NS 5000000
#define RUN_BYTES 256000000
#define REST_NS 6000
#define ANCHOR_NS 200000000

enum { QUEUED, ISSUED, DONE, CANCELLED };

typedef int (*Fn)();

typedef struct {
    uint64_t src, dst;
    int64_t bytes, sent, recorded, arrived, order, queued_ns, start_ns;
    void *after;
    int priority, event;
} Transfer;

typedef struct {
    int64_t id, bytes, issued_ns;
    int event;
} Flight;

typedef struct {
    int64_t start_ns, end_ns, id, bytes;
} Interval;

typedef struct {
    Fn set_context, memcpy_async, event_create, event_record, event_query, stream_wait;
    int (*elapsed)(float *, void *, void *); /* of recorded pieces; NULL: their times are the host's */
    void *context, *stream;
    void *events[MAX_FLYING], *starts[MAX_FLYING], *anchor;
    int64_t anchor_ns;
    int64_t piece_bytes;
    int limit;
    double rate, native_rate; /* bytes per ns; rate 0: not paced */
    int64_t free_ns, busy_until_ns, last_arrival_ns, next_id, next_order;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t work;
    int closing, flying, oldest, waiting, record;
    volatile int error;
    Flight flights[MAX_FLYING];
    int64_t waiting_ids[TABLE];
    Transfer transfers[TABLE];
    volatile int32_t states[TABLE];
    volatile int32_t issued_as[TABLE];
    int64_t bytes, done, cancelled, promoted, busy_ns, open;
    int64_t gaps;
    int32_t gap_ns[TABLE];
    int64_t interval_count;
    Interval intervals[TABLE];
    int64_t run_bytes, run_from_ns; /* pieces without a gap between them */
    double best_rate;               /* bytes per s of a run of RUN_BYTES */
    int64_t arrivals; /* ids of complete transfers so far: a ring of TABLE */
    int64_t arrived_ids[TABLE];
} Worker;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void pause_a_little(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* Long against a driver call, so that the thread that launches kernels finds the driver's lock free; short against a
   piece. */
static void rest(int64_t ns) {
    int64_t end = now_ns() + ns;
    while (now_ns() < end) pause_a_little();
}

static Transfer *transfer_of(Worker *w, int64_t id) { return &w->transfers[id % TABLE]; }

static int best_waiting(Worker *w) {
    int best = -1;
    for (int i = 0; i < w->waiting; i++) {
        Transfer *t = transfer_of(w, w->waiting_ids[i]);
        Transfer *b = best < 0 ? NULL : transfer_of(w, w->waiting_ids[best]);
        if (!b || t->priority < b->priority || (t->priority == b->priority && t->order < b->order)) best = i;
    }
    return best;
}

static void stop_waiting(Worker *w, int64_t id) {
    for (int i = 0; i < w->waiting; i++)
        if (w->waiting_ids[i] == id) {
            w->waiting_ids[i] = w->waiting_ids[--w->waiting];
            return;
        }
}

/* The time at which the copy stream reached an event, on the host's clock. */
static int64_t device_ns(Worker *w, void *event, int64_t otherwise) {
    float ms = 0;
    if (!w->elapsed || !w->anchor_ns || w->elapsed(&ms, w->anchor, event)) return otherwise;
    return w->anchor_ns + (int64_t)(ms * 1e6);
}

/* Aligns the clocks while the stream is idle, again and again: differences of device times are single precision. */
static int align(Worker *w) {
    int64_t before = now_ns();
    if (!w->elapsed || before - w->anchor_ns < ANCHOR_NS) return 0;
    int status = w->event_record(w->anchor, w->stream);
    while (!status && (status = w->event_query(w->anchor)) == NOT_READY) status = 0;
    w->anchor_ns = (before + now_ns()) / 2;
    return status;
}

/* The oldest piece has arrived. */
static void retire(Worker *w) {
    Flight f = w->flights[w->oldest];
    Transfer *t = transfer_of(w, f.id);
    int64_t end = now_ns(), from = f.issued_ns > w->busy_until_ns ? f.issued_ns : w->busy_until_ns;
    w->oldest = (w->oldest + 1) % w->limit;
    w->flying--;
    if (f.issued_ns > w->busy_until_ns || w->rate > 0) w->run_bytes = 0, w->run_from_ns = end;
    else w->run_bytes += f.bytes;
    if (w->run_bytes >= RUN_BYTES) {
        double rate = w->run_bytes * 1e9 / (end - w->run_from_ns);
        if (rate > w->best_rate) w->best_rate = rate;
        w->run_bytes = 0;
        w->run_from_ns = end;
    }
    w->busy_until_ns = w->last_arrival_ns = end;
    w->bytes += f.bytes;
    if (end > from) w->busy_ns += end - from;
    if (w->record && w->interval_count < TABLE) {
        Interval one = {device_ns(w, w->starts[f.event], from), device_ns(w, w->events[f.event], end), f.id, f.bytes};
        w->intervals[w->interval_count++] = one;
    }
    t->arrived += f.bytes;
    if (t->arrived == t->bytes) {
        w->done++;
        w->open--;
        __atomic_store_n(&w->states[f.id % TABLE], DONE, __ATOMIC_RELEASE);
        w->arrived_ids[w->arrivals % TABLE] = f.id;
        __atomic_store_n(&w->arrivals, w->arrivals + 1, __ATOMIC_RELEASE);
    }
}

/* When the next piece may be put on the stream so that it arrives at the paced time. */
static int64_t issue_time(Worker *w, Transfer *t, int64_t size, int64_t now, int64_t *deadline) {
    if (!t->start_ns) { /* looked at for the first time: what was lost before counts for the slack alone */
        t->start_ns = w->free_ns > t->queued_ns ? w->free_ns : t->queued_ns;
        if (t->start_ns < now - SLACK_NS) t->start_ns = now - SLACK_NS;
    }
    int64_t start = w->free_ns > t->start_ns ? w->free_ns : t->start_ns;
    *deadline = start + (int64_t)(size / w->rate);
    return *deadline - (int64_t)(size / w->native_rate);
}

static void *run(void *argument) {
    Worker *w = argument;
    int64_t idle_since = now_ns();
    if (w->set_context(w->context)) w->error = 1;
    while (!w->error) {
        int arrived = 0;
        if (w->flying) {
            int status = w->event_query(w->events[w->flights[w->oldest].event]);
            if (status && status != NOT_READY) w->error = status;
            arrived = !status;
            if (!arrived && w->flying == w->limit && !w->error) { /* nothing to decide */
                rest(REST_NS);
                continue;
            }
        }
        pthread_mutex_lock(&w->lock);
        if (arrived) retire(w);
        int place = w->flying < w->limit && !w->closing ? best_waiting(w) : -1;
        Flight f = {0};
        Transfer *t = NULL;
        uint64_t offset = 0;
        if (place >= 0) {
            int64_t id = w->waiting_ids[place], now = now_ns(), deadline = 0;
            t = transfer_of(w, id);
            int64_t size = t->bytes - t->sent < w->piece_bytes ? t->bytes - t->sent : w->piece_bytes;
            if (w->rate > 0 && now < issue_time(w, t, size, now, &deadline)) {
                t = NULL;
            } else {
                if (w->rate > 0) w->free_ns = deadline;
                offset = t->sent;
                if (!offset) {
                    w->states[id % TABLE] = ISSUED;
                    w->issued_as[id % TABLE] = t->priority;
                }
                t->sent += size;
                t->start_ns = 0;
                if (t->sent == t->bytes) stop_waiting(w, id);
                f.id = id;
                f.bytes = size;
                f.issued_ns = now;
                f.event = (w->oldest + w->flying) % w->limit;
            }
        }
        if (!t && !w->flying) {
            if (w->closing) {
                pthread_mutex_unlock(&w->lock);
                break;
            }
            if (!w->waiting && now_ns() - idle_since > IDLE_SPIN_NS) pthread_cond_wait(&w->work, &w->lock);
        } else {
            idle_since = now_ns();
        }
        pthread_mutex_unlock(&w->lock);
        if (!t) {
            rest(REST_NS / 2); /* leave the lock to others */
            continue;
        }
        int status = 0, was_flying = w->flying;
        if (w->record && !was_flying) status = align(w);
        if (!status && !offset && t->after) status = w->stream_wait(w->stream, t->after, 0);
        if (!status && w->elapsed) status = w->event_record(w->starts[f.event], w->stream);
        if (!status) status = w->memcpy_async(t->dst + offset, (void *)(t->src + offset), (size_t)f.bytes, w->stream);
        if (!status) status = w->event_record(w->events[f.event], w->stream);
        if (status) w->error = status;
        pthread_mutex_lock(&w->lock);
        w->flights[f.event] = f;
        w->flying++;
        t->event = f.event;
        int64_t ready = t->queued_ns > w->last_arrival_ns ? t->queued_ns : w->last_arrival_ns;
        int64_t gap = was_flying ? 0 : now_ns() - ready;
        if (w->last_arrival_ns) w->gap_ns[w->gaps++ % TABLE] = gap > 2000000000 ? 2000000000 : (int32_t)gap;
        __atomic_store_n(&t->recorded, t->recorded + f.bytes, __ATOMIC_RELEASE);
        pthread_mutex_unlock(&w->lock);
    }
    return NULL;
}

void *worker_create(const char *driver, void *context, void *stream, int64_t piece_bytes, int limit, double rate,
                    double native_rate, int record) {
    void *lib = dlopen(driver, RTLD_NOW | RTLD_GLOBAL);
    if (!lib || limit < 1 || limit > MAX_FLYING) return NULL;
    Worker *w = calloc(1, sizeof(Worker));
    w->set_context = (Fn)dlsym(lib, "cuCtxSetCurrent");
    w->memcpy_async = (Fn)dlsym(lib, "cuMemcpyHtoDAsync_v2");
    w->event_create = (Fn)dlsym(lib, "cuEventCreate");
    w->event_record = (Fn)dlsym(lib, "cuEventRecord");
    w->event_query = (Fn)dlsym(lib, "cuEventQuery");
    w->stream_wait = (Fn)dlsym(lib, "cuStreamWaitEvent");
    if (record) w->elapsed = (int (*)(float *, void *, void *))dlsym(lib, "cuEventElapsedTime");
    w->context = context;
    w->stream = stream;
    w->piece_bytes = piece_bytes;
    w->limit = limit;
    w->rate = rate / 1e9;
    w->native_rate = native_rate / 1e9;
    w->record = record;
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->work, NULL);
    if (w->set_context(context)) return NULL;
    int untimed = w->elapsed ? 0 : 2;
    if (w->elapsed && w->event_create(&w->anchor, 0)) return NULL;
    for (int i = 0; i < limit; i++)
        if (w->event_create(&w->events[i], untimed) || (w->elapsed && w->event_create(&w->starts[i], 0))) return NULL;
    if (pthread_create(&w->thread, NULL, run, w)) return NULL;
    return w;
}

int64_t worker_submit(Worker *w, uint64_t src, uint64_t dst, int64_t bytes, int priority, void *after) {
    pthread_mutex_lock(&w->lock);
    int64_t id = w->next_id++;
    Transfer fresh = {.src = src, .dst = dst, .bytes = bytes, .order = w->next_order++, .queued_ns = now_ns(),
                      .after = after, .priority = priority};
    *transfer_of(w, id) = fresh;
    w->issued_as[id % TABLE] = -1;
    w->states[id % TABLE] = QUEUED;
    w->waiting_ids[w->waiting++] = id;
    w->open++;
    pthread_cond_signal(&w->work);
    pthread_mutex_unlock(&w->lock);
    return id;
}

/* `count` prefetches of the same size, in this order; returns the first one's id, the others follow. */
int64_t worker_submit_many(Worker *w, int count, const uint64_t *src, const uint64_t *dst, void **after, int64_t bytes,
                           int priority) {
    pthread_mutex_lock(&w->lock);
    int64_t first = w->next_id, now = now_ns();
    for (int i = 0; i < count; i++) {
        int64_t id = w->next_id++;
        Transfer fresh = {.src = src[i], .dst = dst[i], .bytes = bytes, .order = w->next_order++, .queued_ns = now,
                          .after = after[i], .priority = priority};
        *transfer_of(w, id) = fresh;
        w->issued_as[id % TABLE] = -1;
        w->states[id % TABLE] = QUEUED;
        w->waiting_ids[w->waiting++] = id;
        w->open++;
    }
    pthread_cond_signal(&w->work);
    pthread_mutex_unlock(&w->lock);
    return first;
}

/* 1 when there was something left to hasten. */
int worker_promote(Worker *w, int64_t id) {
    pthread_mutex_lock(&w->lock);
    Transfer *t = transfer_of(w, id);
    int can = t->priority != 0 && t->sent < t->bytes && w->states[id % TABLE] != CANCELLED;
    if (can) {
        t->priority = 0;
        t->order = w->next_order++;
        w->promoted++;
    }
    pthread_mutex_unlock(&w->lock);
    return can;
}

/* 1 while no piece of it was taken. */
int worker_cancel(Worker *w, int64_t id) {
    pthread_mutex_lock(&w->lock);
    int can = w->states[id % TABLE] == QUEUED;
    if (can) {
        w->states[id % TABLE] = CANCELLED;
        stop_waiting(w, id);
        w->cancelled++;
        w->open--;
    }
    pthread_mutex_unlock(&w->lock);
    return can;
}

void worker_reorder(Worker *w, const int64_t *ids, int count) {
    pthread_mutex_lock(&w->lock);
    for (int i = 0; i < count; i++) {
        Transfer *t = transfer_of(w, ids[i]);
        if (w->states[ids[i] % TABLE] == QUEUED && t->priority != 0) t->order = w->next_order++;
    }
    pthread_mutex_unlock(&w->lock);
}

/* Blocks until the last piece is on the stream, then lets later work of `stream` wait for it. 0, or the error. */
int worker_fence(Worker *w, int64_t id, void *stream) {
    Transfer *t = transfer_of(w, id);
    while (__atomic_load_n(&t->recorded, __ATOMIC_ACQUIRE) < t->bytes && !w->error) pause_a_little();
    if (w->error) return w->error;
    pthread_mutex_lock(&w->lock);
    int status = w->states[id % TABLE] == DONE ? 0 : w->stream_wait(stream, w->events[t->event], 0);
    pthread_mutex_unlock(&w->lock);
    return status;
}

/* Blocks until the transfer has arrived. 0, or the error. */
int worker_wait(Worker *w, int64_t id) {
    while (__atomic_load_n(&w->states[id % TABLE], __ATOMIC_ACQUIRE) != DONE && !w->error) pause_a_little();
    return w->error;
}

int worker_drain(Worker *w) {
    struct timespec nap = {0, 20000};
    while (__atomic_load_n(&w->open, __ATOMIC_ACQUIRE) && !w->error) nanosleep(&nap, NULL);
    return w->error;
}

int worker_error(Worker *w) { return w->error; }

/* Bytes per s of the best run of pieces back to back so far; 0 where the link is paced or was never busy for long. */
double worker_best_rate(Worker *w) { return w->best_rate; }

int worker_issued(Worker *w, int64_t id) {
    Transfer *t = transfer_of(w, id);
    return __atomic_load_n(&t->recorded, __ATOMIC_ACQUIRE) >= t->bytes;
}

volatile int32_t *worker_states(Worker *w) { return w->states; }

volatile int32_t *worker_issued_as(Worker *w) { return w->issued_as; }

int worker_table(void) { return TABLE; }

/* Complete transfers so far, read in place; their ids, TABLE at most. */
volatile int64_t *worker_arrivals(Worker *w) { return &w->arrivals; }

volatile int64_t *worker_arrived_ids(Worker *w) { return w->arrived_ids; }

/* bytes, transfers, cancelled, promoted, busy_ns, open, gaps recorded */
void worker_counters(Worker *w, int64_t *out) {
    pthread_mutex_lock(&w->lock);
    int64_t found[] = {w->bytes, w->done, w->cancelled, w->promoted, w->busy_ns, w->open, w->gaps};
    memcpy(out, found, sizeof(found));
    pthread_mutex_unlock(&w->lock);
}

/* Copies and forgets the gaps (ns) between the pieces issued so far; returns how many. */
int worker_take_gaps(Worker *w, int32_t *out) {
    pthread_mutex_lock(&w->lock);
    int count = w->gaps < TABLE ? (int)w->gaps : TABLE;
    memcpy(out, w->gap_ns, count * sizeof(int32_t));
    w->gaps = 0;
    pthread_mutex_unlock(&w->lock);
    return count;
}

/* Copies and forgets the recorded pieces (start_ns, end_ns, id, bytes); returns how many. */
int worker_take_intervals(Worker *w, int64_t *out) {
    pthread_mutex_lock(&w->lock);
    int count = (int)w->interval_count;
    memcpy(out, w->intervals, count * sizeof(Interval));
    w->interval_count = 0;
    pthread_mutex_unlock(&w->lock);
    return count;
}

void worker_close(Worker *w) {
    pthread_mutex_lock(&w->lock);
    w->closing = 1;
    pthread_cond_signal(&w->work);
    pthread_mutex_unlock(&w->lock);
    pthread_join(w->thread, NULL);
    free(w);
}

/* Spins until *flag == value; 0, or 1 after timeout_ns. */
int wait_flag(volatile int32_t *flag, int32_t value, int64_t timeout_ns) {
    int64_t end = now_ns() + timeout_ns;
    for (int turn = 1; __atomic_load_n(flag, __ATOMIC_ACQUIRE) != value; turn++) {
        pause_a_little();
        if (turn % 1024 == 0 && now_ns() > end) return 1;
    }
    return 0;
}
