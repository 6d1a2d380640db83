/* NCCL between the processes of this machine, through shared memory.

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

static const size_t ROOM = 1ul << 30; /* bytes of a rank that the others see, a page at a time as they are written */

typedef struct { /* a call */
  int call, type, op, root;
  size_t count;
} card;
typedef struct { /* the shared memory begins with it; from ROOM on each rank has its bytes */
  atomic_uint arrived, turn;
  card cards[];
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
  meeting *meeting;
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
typedef union { unsigned bits; float value; } word;
static float from_bfloat(unsigned short half) { return ((word){(unsigned)half << 16}).value; }
static unsigned short to_bfloat(float value) {
  unsigned bits = ((word){.value = value}).bits;
  return value != value ? bits >> 16 | 64 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
#define SAME(x) (x)
#define COMBINE(number, stored, computed, to_type, from_type)                          \
  case number:                                                                         \
    for (size_t i = 0; i < count; i++) {                                               \
      computed a = from_type(((stored *)out)[i]), b = from_type(((stored *)in)[i]);     \
      if (op == AVG) a = b * from_type((stored)to_type((computed)factor));             \
      else if (op == MAX) a = a != a || a > b ? a : b;                                 \
      else if (op == MIN) a = a != a || a < b ? a : b;                                 \
      else a += b;                                                                     \
      ((stored *)out)[i] = to_type(a);                                                 \
    }                                                                                  \
    break;
/* Adds `in` to `out`. With AVG, whose sum could overflow, `out` becomes `in` times the factor. */
static void combine(void *out, const void *in, size_t count, int type, int op, double factor) {
  switch (type) {
    COMBINE(INT8, signed char, int, SAME, SAME)
    COMBINE(UINT8, unsigned char, int, SAME, SAME)
    COMBINE(INT32, int, int, SAME, SAME)
    COMBINE(INT64, long, long, SAME, SAME)
    COMBINE(FLOAT16, _Float16, float, SAME, SAME)
    COMBINE(FLOAT32, float, float, SAME, SAME)
    COMBINE(FLOAT64, double, double, SAME, SAME)
    COMBINE(BFLOAT16, unsigned short, float, to_bfloat, from_bfloat)
  }
}

/* ---- collectives */
static char *room(comm *c, int rank) { return (char *)c->meeting + (1 + rank) * ROOM; }

/* Each rank shows what it calls and gives, and each takes its result. */
static void collective(comm *c, job *j) {
  card is = c->meeting->cards[c->rank] = j->is;
  size_t part = is.count * width[is.type], bytes = is.call == REDUCE_SCATTER ? part * c->size : part;
  char *mine = room(c, c->rank);
  if (is.op == AVG) combine(mine, j->from, bytes / width[is.type], is.type, AVG, 1.0 / c->size);
  else if (is.call != BROADCAST || c->rank == is.root) memcpy(mine, j->from, bytes);
  if (!meet(c)) return;
  for (int rank = 0; rank < c->size; rank++) {
    card other = c->meeting->cards[rank];
    if (!memcmp(&other, &is, sizeof is)) continue;
    fprintf(stderr, "NCCL: rank %d calls %s of %zu numbers of type %d, ", c->rank, calls[is.call], is.count, is.type);
    fprintf(stderr, "rank %d %s of %zu of type %d\n", rank, calls[other.call], other.count, other.type);
    c->error = INVALID_USAGE;
    return;
  }
  size_t begin = is.call == REDUCE_SCATTER ? part * c->rank : 0;
  if (is.call == BROADCAST) memcpy(j->to, room(c, is.root), bytes);
  else if (is.call == ALL_GATHER)
    for (int rank = 0; rank < c->size; rank++) memcpy(j->to + rank * part, room(c, rank), bytes);
  else {
    memcpy(j->to, room(c, 0) + begin, part);
    for (int rank = 1; rank < c->size; rank++)
      combine(j->to, room(c, rank) + begin, is.count, is.type, is.op == AVG ? SUM : is.op, 0);
  }
  meet(c); /* before the next call is shown */
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

/* ---- communicators */
static int join(comm **made, int size, int process, int file, int rank) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", process, file);
  int opened = open(path, O_RDWR | O_CLOEXEC);
  if (opened < 0) {
    fprintf(stderr, "NCCL: process %d, which began the communicator, is gone\n", process);
    return SYSTEM_ERROR;
  }
  comm *c = calloc(1, sizeof *c);
  c->rank = rank;
  c->size = size;
  cudaGetDevice(&c->device);
  int sized = ftruncate(opened, (1 + size) * ROOM); /* every rank sets the same size */
  c->meeting = mmap(NULL, (1 + size) * ROOM, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, opened, 0);
  close(opened);
  if (sized || c->meeting == MAP_FAILED) return SYSTEM_ERROR;
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
  snprintf(id->text, sizeof id->text, "%d %d", getpid(), memfd_create("pretended-nccl", MFD_CLOEXEC));
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
  munmap(c->meeting, (1 + c->size) * ROOM); /* not *c: torch asks an aborted one for its state */
  return SUCCESS;
}
int ncclCommDestroy(comm *c) { return end(c); } /* after the queued work */
int ncclCommAbort(comm *c) {
  c->aborted = 1;
  return end(c);
}
int ncclCommFinalize(comm *c) {
  pthread_mutex_lock(&c->lock);
  while (c->first) pthread_cond_wait(&c->changed, &c->lock);
  pthread_mutex_unlock(&c->lock);
  return SUCCESS;
}
int ncclCommGetAsyncError(comm *c, int *error) { *error = c->error; return SUCCESS; }

/* ---- calls; a group of them only keeps them together */
static int call(comm *c, card is, const void *from, void *to, cudaStream_t stream) {
  int has_type = (unsigned)is.type < TYPES && is.type != UINT32 && is.type != UINT64;
  int has_op = is.op == AVG ? is.type >= FLOAT16 : is.op == SUM || is.op == MAX || is.op == MIN;
  size_t parts = is.call == REDUCE_SCATTER ? c->size : 1;
  if (!has_type || !has_op || is.count * width[is.type] * parts > ROOM) return INVALID_ARGUMENT;
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
