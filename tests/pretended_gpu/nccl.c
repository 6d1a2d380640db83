/* NCCL between the processes of this machine (or of several network namespaces on it), through shared memory.

   As with NCCL, a call returns at once and its work runs in the background, in the order of the stream: here in a thread of the
   communicator. If a process dies, the others wait until they abort the communicator. The shared memory is a file without a name in the
   process that created the communicator's id; the others open it there, and it is freed with the last of them. */
#include "pretended.h"
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/syscall.h>

enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5 };                 /* ncclResult_t */
enum { SUM, PROD, MAX, MIN, AVG };                                                              /* ncclRedOp_t */
enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, TYPES };   /* ncclDataType_t */
enum { ALL_REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER };
static const size_t width[TYPES] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
static const char *const calls[] = {"AllReduce", "Broadcast", "AllGather", "ReduceScatter"};

enum { CHUNK = 4 << 20 }; /* bytes per round of a collective */

/* What one rank shows the others: its current call. */
typedef struct {
  int call, type, op, root;
  size_t count;
} card;
typedef struct { /* start of the shared memory; cards and the ranks' chunks follow */
  atomic_uint arrived, turn;
} meeting;

typedef struct { char text[128]; } unique_id;

typedef struct job {
  card is;
  const char *from;
  char *to;
  cudaStream_t stream;
  unsigned long number;
  struct job *next;
} job;

typedef struct comm {
  int rank, size, device;
  char *memory;
  size_t bytes;
  meeting *meeting;
  card *cards;
  char *chunks;
  pthread_t worker;
  pthread_mutex_t lock;
  pthread_cond_t changed;
  job *first, *last;
  int closing;
  atomic_int aborted, error;
} comm;

/* ---- meeting */
static void futex_wait(atomic_uint *word, unsigned seen) {
  struct timespec patience = {0, 20000000}; /* checks for an abort */
  syscall(SYS_futex, word, FUTEX_WAIT, seen, &patience, NULL, 0);
}
static void futex_wake(atomic_uint *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }

/* A barrier. Returns 1 once all ranks have arrived, 0 if the communicator was aborted. */
static int meet(comm *c) {
  unsigned turn = atomic_load(&c->meeting->turn);
  if (atomic_fetch_add(&c->meeting->arrived, 1) + 1 == (unsigned)c->size) {
    atomic_store(&c->meeting->arrived, 0);
    atomic_fetch_add(&c->meeting->turn, 1);
    futex_wake(&c->meeting->turn);
    return 1;
  }
  while (atomic_load(&c->meeting->turn) == turn) {
    if (c->aborted) return 0;
    futex_wait(&c->meeting->turn, turn);
  }
  return 1;
}

/* ---- arithmetic, in the type of the tensor and rank by rank, which rounds as NCCL's rings do */
static unsigned bits_of(float value) {
  unsigned bits;
  memcpy(&bits, &value, 4);
  return bits;
}
static float of_bits(unsigned bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
static float from_bfloat(unsigned short half) { return of_bits((unsigned)half << 16); }
static unsigned short to_bfloat(float value) {
  unsigned bits = bits_of(value);
  int is_nan = (bits & 0x7fffffff) > 0x7f800000;
  return is_nan ? bits >> 16 | 64 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static float from_half(unsigned short half) {
  _Float16 value;
  memcpy(&value, &half, 2);
  return value;
}
static unsigned short to_half(float value) {
  _Float16 half = value;
  unsigned short bits;
  memcpy(&bits, &half, 2);
  return bits;
}
#define SAME(x) (x)
#define COMBINE(name, stored, computed, to_type, from_type)                           \
  static void combine_##name(stored *out, const stored *in, size_t count, int op) {   \
    for (size_t i = 0; i < count; i++) {                                              \
      computed a = from_type(out[i]), b = from_type(in[i]);                           \
      if (op == MAX) a = a != a || a > b ? a : b;                                     \
      else if (op == MIN) a = a != a || a < b ? a : b;                                \
      else a += b;                                                                    \
      out[i] = to_type(a);                                                            \
    }                                                                                 \
  }                                                                                   \
  static void scale_##name(stored *out, const stored *in, size_t count, double by) {  \
    computed factor = from_type((stored)to_type((computed)by));                       \
    for (size_t i = 0; i < count; i++) out[i] = to_type(from_type(in[i]) * factor);   \
  }
COMBINE(int8, signed char, int, SAME, SAME)
COMBINE(uint8, unsigned char, int, SAME, SAME)
COMBINE(int32, int, int, SAME, SAME)
COMBINE(int64, long, long, SAME, SAME)
COMBINE(float16, unsigned short, float, to_half, from_half)
COMBINE(float32, float, float, SAME, SAME)
COMBINE(float64, double, double, SAME, SAME)
COMBINE(bfloat16, unsigned short, float, to_bfloat, from_bfloat)

#define EACH_TYPE(DO)                                                                                    \
  DO(INT8, int8) DO(UINT8, uint8) DO(INT32, int32) DO(INT64, int64)                                      \
  DO(FLOAT16, float16) DO(FLOAT32, float32) DO(FLOAT64, float64) DO(BFLOAT16, bfloat16)
static void combine(void *out, const void *in, size_t count, int type, int op) {
  switch (type) {
#define DO(number, name) case number: combine_##name(out, in, count, op); break;
    EACH_TYPE(DO)
#undef DO
  }
}
static void scale(void *out, const void *in, size_t count, int type, double factor) {
  switch (type) {
#define DO(number, name) case number: scale_##name(out, in, count, factor); break;
    EACH_TYPE(DO)
#undef DO
  }
}

/* ---- collectives */
static char *chunk(comm *c, int rank) { return c->chunks + (size_t)rank * CHUNK; }

/* Reduces `bytes` of the chunks of all ranks, from byte `from` on, into `to`. */
static void reduce(comm *c, job *j, char *to, size_t from, size_t bytes) {
  size_t count = bytes / width[j->is.type];
  memcpy(to, chunk(c, 0) + from, bytes);
  for (int rank = 1; rank < c->size; rank++) combine(to, chunk(c, rank) + from, count, j->is.type, j->is.op);
}

/* The part of bytes [at, at + bytes) that belongs to `rank` if each rank has `part` bytes: its length and its beginning. */
static size_t share(size_t at, size_t bytes, size_t part, int rank, size_t *begin) {
  size_t from = part * rank > at ? part * rank : at, to = part * (rank + 1) < at + bytes ? part * (rank + 1) : at + bytes;
  *begin = from;
  return to > from ? to - from : 0;
}

/* Each rank writes its bytes in chunks, and each reads its result from them. */
static void collective(comm *c, job *j) {
  c->cards[c->rank] = j->is;
  if (!meet(c)) return;
  for (int rank = 0; rank < c->size; rank++) {
    card *other = &c->cards[rank];
    if (other->call == j->is.call && other->count == j->is.count && other->type == j->is.type && other->root == j->is.root) continue;
    fprintf(stderr, "NCCL: rank %d calls %s of %zu numbers of type %d, rank %d %s of %zu of type %d\n", c->rank, calls[j->is.call],
            j->is.count, j->is.type, rank, calls[other->call], other->count, other->type);
    c->error = INVALID_USAGE;
    return;
  }
  size_t part = j->is.count * width[j->is.type], bytes = j->is.call == REDUCE_SCATTER ? part * c->size : part;
  int sends = j->is.call != BROADCAST || c->rank == j->is.root;
  for (size_t at = 0; at < bytes; at += CHUNK) {
    size_t size = bytes - at < CHUNK ? bytes - at : CHUNK, begin, length;
    if (j->is.op == AVG) /* like NCCL, which avoids overflow of the sum */
      scale(chunk(c, c->rank), j->from + at, size / width[j->is.type], j->is.type, 1.0 / c->size);
    else if (sends) memcpy(chunk(c, c->rank), j->from + at, size);
    if (!meet(c)) return;
    switch (j->is.call) {
      case ALL_REDUCE: reduce(c, j, j->to + at, 0, size); break;
      case BROADCAST:
        if (j->to != j->from || !sends) memcpy(j->to + at, chunk(c, j->is.root), size);
        break;
      case ALL_GATHER:
        for (int rank = 0; rank < c->size; rank++) memcpy(j->to + rank * part + at, chunk(c, rank), size);
        break;
      case REDUCE_SCATTER:
        length = share(at, size, part, c->rank, &begin);
        if (length) reduce(c, j, j->to + begin - part * c->rank, begin - at, length);
    }
    if (!meet(c)) return; /* before the next chunk is written */
  }
}

/* ---- the thread of a communicator */
static void *work(void *communicator) {
  comm *c = communicator;
  cudaSetDevice(c->device);
  pthread_mutex_lock(&c->lock);
  while (1) {
    while (!c->first && !c->closing) pthread_cond_wait(&c->changed, &c->lock);
    if (!c->first) break;
    job *j = c->first;
    pthread_mutex_unlock(&c->lock);
    pretended_turn(j->stream, j->number);
    if (!c->aborted && !c->error) collective(c, j); /* after an error or abort it is skipped */
    pretended_end(j->stream, j->number);
    pthread_mutex_lock(&c->lock);
    c->first = j->next;
    if (!c->first) c->last = NULL;
    free(j);
    pthread_cond_broadcast(&c->changed);
  }
  pthread_mutex_unlock(&c->lock);
  return NULL;
}
static void wait_for_all(comm *c) {
  pthread_mutex_lock(&c->lock);
  while (c->first) pthread_cond_wait(&c->changed, &c->lock);
  pthread_mutex_unlock(&c->lock);
}

/* ---- communicators */
static size_t whole_pages(size_t bytes) { return (bytes + 4095) & ~4095ul; }

/* A file without a name, which other processes open by process and file number. */
static int nameless(void) { return memfd_create("pretended-nccl", MFD_CLOEXEC); }

static int join(comm **made, int size, int process, int file, int rank) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", process, file);
  int opened = open(path, O_RDWR | O_CLOEXEC);
  if (opened < 0) {
    fprintf(stderr, "NCCL: process %d, which began the communicator, is gone\n", process);
    return SYSTEM_ERROR;
  }
  comm *c = calloc(1, sizeof *c);
  size_t cards = whole_pages(sizeof(meeting)), chunks = cards + whole_pages(size * sizeof(card));
  c->rank = rank;
  c->size = size;
  cudaGetDevice(&c->device);
  c->bytes = chunks + (size_t)size * CHUNK;
  int sized = ftruncate(opened, c->bytes); /* every rank sets the same size; pages are provided as they are written */
  c->memory = mmap(NULL, c->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, opened, 0);
  close(opened);
  if (sized || c->memory == MAP_FAILED) return SYSTEM_ERROR;
  c->meeting = (meeting *)c->memory;
  c->cards = (card *)(c->memory + cards);
  c->chunks = c->memory + chunks;
  pthread_mutex_init(&c->lock, NULL);
  pthread_cond_init(&c->changed, NULL);
  meet(c);
  if (process == getpid()) close(file);
  pthread_create(&c->worker, NULL, work, c);
  *made = c;
  return SUCCESS;
}
int ncclGetUniqueId(unique_id *id) {
  memset(id, 0, sizeof *id);
  snprintf(id->text, sizeof id->text, "%d %d", getpid(), nameless());
  return SUCCESS;
}
int ncclCommInitRankScalable(comm **made, int size, int rank, int id_count, unique_id *ids, void *config) {
  int process, file;
  if (sscanf(ids->text, "%d %d", &process, &file) != 2) return INVALID_ARGUMENT;
  return join(made, size, process, file, rank);
}
int ncclCommInitRankConfig(comm **made, int size, unique_id id, int rank, void *config) {
  return ncclCommInitRankScalable(made, size, rank, 1, &id, config);
}
static int end(comm *c) {
  pthread_mutex_lock(&c->lock);
  int was_closing = c->closing;
  c->closing = 1;
  pthread_cond_broadcast(&c->changed);
  pthread_mutex_unlock(&c->lock);
  if (was_closing) return SUCCESS;
  pthread_join(c->worker, NULL);
  munmap(c->memory, c->bytes); /* the communicator is kept: torch asks an aborted one for its state */
  return SUCCESS;
}
int ncclCommDestroy(comm *c) { return end(c); } /* after the queued work */
int ncclCommAbort(comm *c) {
  c->aborted = 1;
  return end(c);
}
int ncclCommFinalize(comm *c) {
  wait_for_all(c);
  return SUCCESS;
}
int ncclCommCount(comm *c, int *size) { *size = c->size; return SUCCESS; }
int ncclCommUserRank(comm *c, int *rank) { *rank = c->rank; return SUCCESS; }
int ncclCommCuDevice(comm *c, int *device) { *device = c->device; return SUCCESS; }
int ncclCommGetAsyncError(comm *c, int *error) { *error = c->error; return SUCCESS; }
/* ---- calls; a group only keeps them together */
int ncclGroupStart(void) { return SUCCESS; }
int ncclGroupEnd(void) { return SUCCESS; }
static int call(comm *c, card is, const void *from, void *to, cudaStream_t stream) {
  int has_type = (unsigned)is.type < TYPES && is.type != UINT32 && is.type != UINT64;
  int has_op = is.op == AVG ? is.type >= FLOAT16 : is.op == SUM || is.op == MAX || is.op == MIN;
  if (!has_type || !has_op) return INVALID_ARGUMENT;
  job *j = calloc(1, sizeof *j);
  *j = (job){.is = is, .from = from, .to = to, .stream = stream};
  pthread_mutex_lock(&c->lock);
  j->number = pretended_begin(stream);
  if (c->last) c->last->next = j;
  else c->first = j;
  c->last = j;
  pthread_cond_broadcast(&c->changed);
  pthread_mutex_unlock(&c->lock);
  return SUCCESS;
}
int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, comm *c, cudaStream_t stream) {
  return call(c, (card){ALL_REDUCE, type, op, 0, count}, from, to, stream);
}
int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, comm *c, cudaStream_t stream) {
  return call(c, (card){BROADCAST, type, SUM, root, count}, from, to, stream);
}
int ncclBcast(void *at, size_t count, int type, int root, comm *c, cudaStream_t stream) {
  return ncclBroadcast(at, at, count, type, root, c, stream);
}
int ncclAllGather(const void *from, void *to, size_t count, int type, comm *c, cudaStream_t stream) {
  return call(c, (card){ALL_GATHER, type, SUM, 0, count}, from, to, stream);
}
int ncclReduceScatter(const void *from, void *to, size_t count, int type, int op, comm *c, cudaStream_t stream) {
  return call(c, (card){REDUCE_SCATTER, type, op, 0, count}, from, to, stream);
}
