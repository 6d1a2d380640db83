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
enum { SUM, PROD, MAX, MIN, AVG, BUILT_IN };                                                    /* ncclRedOp_t */
enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, TYPES };   /* ncclDataType_t */
enum { ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, SEND, RECEIVE };
static const size_t width[TYPES] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
static const char *const calls[] = {"AllReduce", "Reduce", "Broadcast", "AllGather", "ReduceScatter"};

enum { CHUNK = 4 << 20, LETTER = 256 << 10 }; /* bytes per round of a collective, and per message (letter) between two ranks */

/* What one rank shows the others: its current call, and its arguments of a split. */
typedef struct {
  int call, type, op, root;
  size_t count;
  int color, key, process, file;
} card;
typedef struct { /* state of the messages from one rank to another */
  atomic_uint written, read;
  size_t size;
} box;
typedef struct { /* start of the shared memory; cards, boxes, the ranks' chunks, and letters follow */
  atomic_uint arrived, turn;
} meeting;

typedef struct { char text[128]; } unique_id;

typedef struct job {
  card is;
  const char *from;
  char *to;
  double factor; /* each rank's numbers are multiplied by it */
  int in_group;  /* more jobs of its group follow */
  cudaStream_t stream;
  unsigned long number;
  struct comm *comm;
  struct job *next;
} job;

typedef struct comm {
  int rank, size, device;
  char *memory;
  size_t bytes;
  meeting *meeting;
  card *cards;
  box *boxes;
  char *chunks, *letters;
  double factors[256];
  int factor_count;
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
/* On bits: compilers vectorise this, but not their own half precision type. */
static float from_half(unsigned short half) {
  unsigned finite = bits_of(of_bits((half & 0x7fffu) << 13) * 0x1p112f); /* the exponents differ by 112 */
  unsigned is_special = (half & 0x7c00) == 0x7c00 ? 0x7f800000 : 0;      /* infinity or NaN */
  return of_bits(finite | is_special | ((half & 0x8000u) << 16));
}
static unsigned short to_half(float value) {
  unsigned bits = bits_of(value), size = bits & 0x7fffffff;
  unsigned normal = (size + 0xc8000fff + (size >> 13 & 1)) >> 13;
  unsigned small = bits_of(of_bits(size) + 0.5f) - 0x3f000000; /* subnormals: their last place is that of 0.5 */
  unsigned finite = size < 0x38800000 ? small : normal;
  unsigned special = size > 0x7f800000 ? 0x7e00 : 0x7c00;
  return (size >= 0x477ff000 ? special : finite) | (bits >> 16 & 0x8000);
}
#define SAME(x) (x)
#define LOOP(to_type, from_type, expression)            \
  for (size_t i = 0; i < count; i++) {                  \
    a = from_type(out[i]), b = from_type(in[i]);        \
    out[i] = to_type(expression);                       \
  }                                                     \
  break;
#define COMBINE(name, stored, computed, to_type, from_type)                                    \
  static void combine_##name(stored *out, const stored *in, size_t count, int op) {            \
    computed a, b;                                                                             \
    switch (op) {                                                                              \
      case PROD: LOOP(to_type, from_type, a * b)                                               \
      case MAX: LOOP(to_type, from_type, a != a || a > b ? a : b)                              \
      case MIN: LOOP(to_type, from_type, a != a || a < b ? a : b)                              \
      default: LOOP(to_type, from_type, a + b)                                                 \
    }                                                                                          \
  }                                                                                            \
  static void scale_##name(stored *out, const stored *in, size_t count, double given) {        \
    computed factor = from_type((stored)to_type((computed)given));                             \
    for (size_t i = 0; i < count; i++) out[i] = to_type(from_type(in[i]) * factor);            \
  }                                                                                            \
  static void divide_##name(stored *out, size_t count, computed divisor) {                     \
    for (size_t i = 0; i < count; i++) out[i] = to_type(from_type(out[i]) / divisor);          \
  }
COMBINE(int8, signed char, int, SAME, SAME)
COMBINE(uint8, unsigned char, int, SAME, SAME)
COMBINE(int32, int, int, SAME, SAME)
COMBINE(uint32, unsigned, unsigned, SAME, SAME)
COMBINE(int64, long, long, SAME, SAME)
COMBINE(uint64, unsigned long, unsigned long, SAME, SAME)
COMBINE(float16, unsigned short, float, to_half, from_half)
COMBINE(float32, float, float, SAME, SAME)
COMBINE(float64, double, double, SAME, SAME)
COMBINE(bfloat16, unsigned short, float, to_bfloat, from_bfloat)

#define EACH_TYPE(DO)                                                                                              \
  DO(INT8, int8) DO(UINT8, uint8) DO(INT32, int32) DO(UINT32, uint32) DO(INT64, int64) DO(UINT64, uint64)            \
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

static void divide(void *out, size_t count, int type, int divisor) {
  switch (type) {
#define DO(number, name) case number: divide_##name(out, count, divisor); break;
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
  if (j->is.op == AVG) divide(to, count, j->is.type, c->size);
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
  int sends = j->is.call != BROADCAST || c->rank == j->is.root, has_factor = j->factor != 1;
  for (size_t at = 0; at < bytes; at += CHUNK) {
    size_t size = bytes - at < CHUNK ? bytes - at : CHUNK, begin, length;
    if (sends && has_factor) scale(chunk(c, c->rank), j->from + at, size / width[j->is.type], j->is.type, j->factor);
    else if (sends) memcpy(chunk(c, c->rank), j->from + at, size);
    if (!meet(c)) return;
    switch (j->is.call) {
      case REDUCE:
        if (c->rank != j->is.root) break; /* the root does the same as: */
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

/* Sends and receives of a group, each message as soon as there is room. They run together, since two ranks could deadlock in order. */
static void exchange(comm *c, job *jobs) {
  for (int left = 1; left;) {
    left = 0;
    int moved = 0;
    for (job *j = jobs; j; j = j->in_group ? j->next : NULL) {
      size_t size = j->is.count; /* bytes left */
      if (!size) continue;
      left = 1;
      int is_send = j->is.call == SEND, pair = is_send ? c->rank * c->size + j->is.root : j->is.root * c->size + c->rank;
      box *b = &c->boxes[pair];
      char *letter = c->letters + (size_t)pair * LETTER;
      int is_full = atomic_load(&b->written) != atomic_load(&b->read);
      if (is_send && !is_full) {
        b->size = size < LETTER ? size : LETTER;
        memcpy(letter, j->from, b->size);
        j->from += b->size;
        j->is.count -= b->size;
        atomic_fetch_add(&b->written, 1);
        moved = 1;
      } else if (!is_send && is_full) {
        size = b->size < size ? b->size : size;
        memcpy(j->to, letter, size);
        j->to += size;
        j->is.count -= size;
        atomic_fetch_add(&b->read, 1);
        moved = 1;
      }
    }
    if (c->aborted) return;
    if (left && !moved) usleep(100);
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
    job *j = c->first, *end = j; /* a group of sends and receives is one job */
    while (end->in_group) end = end->next;
    pthread_mutex_unlock(&c->lock);
    pretended_turn(j->stream, j->number);
    if (!c->aborted && !c->error) j->is.call < SEND ? collective(c, j) : exchange(c, j); /* after an error or abort it is skipped */
    pretended_end(j->stream, j->number);
    pthread_mutex_lock(&c->lock);
    job *after = c->first = end->next;
    if (!after) c->last = NULL;
    for (job *each = j, *next; each != after; each = next) {
      next = each->next;
      free(each);
    }
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
  size_t cards = whole_pages(sizeof(meeting)), boxes = cards + whole_pages(size * sizeof(card));
  size_t chunks = boxes + whole_pages(size * size * sizeof(box)), letters = chunks + (size_t)size * CHUNK;
  c->rank = rank;
  c->size = size;
  cudaGetDevice(&c->device);
  c->bytes = letters + (size_t)size * size * LETTER;
  int sized = ftruncate(opened, c->bytes); /* every rank sets the same size; pages are provided as they are written */
  c->memory = mmap(NULL, c->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, opened, 0);
  close(opened);
  if (sized || c->memory == MAP_FAILED) return SYSTEM_ERROR;
  c->meeting = (meeting *)c->memory;
  c->cards = (card *)(c->memory + cards);
  c->boxes = (box *)(c->memory + boxes);
  c->chunks = c->memory + chunks;
  c->letters = c->memory + letters;
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
int ncclCommInitRank(comm **made, int size, unique_id id, int rank) {
  return ncclCommInitRankScalable(made, size, rank, 1, &id, NULL);
}

/* Ranks of one color form a communicator, in the order of their keys; the first creates the file. */
int ncclCommSplit(comm *c, int color, int key, comm **made, void *config) {
  wait_for_all(c); /* its thread uses the same barrier */
  card *mine = &c->cards[c->rank], *first = NULL;
  int size = 0, rank = 0;
  *mine = (card){.color = color, .key = key};
  if (!meet(c)) return SYSTEM_ERROR;
  for (int other = 0; other < c->size; other++) {
    card *its = &c->cards[other];
    if (its->color != color) continue;
    size++;
    rank += its->key < key || (its->key == key && other < c->rank);
    if (!first || its->key < first->key) first = its;
  }
  *made = NULL;
  int takes_part = color >= 0; /* else NCCL_SPLIT_NOCOLOR */
  if (takes_part && first == mine) mine->process = getpid(), mine->file = nameless();
  if (!meet(c)) return SYSTEM_ERROR;
  int result = takes_part ? join(made, size, first->process, first->file, rank) : SUCCESS;
  return meet(c) ? result : SYSTEM_ERROR; /* before cards are reused */
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
int ncclCommRegister(comm *c, void *at, size_t size, void **handle) { *handle = pretended_handle(); return SUCCESS; }
int ncclCommDeregister(comm *c, void *handle) { free(handle); return SUCCESS; }
int ncclMemAlloc(void **at, size_t size) { return pretended_take(at, size); }
int ncclMemFree(void *at) { return pretended_give(at); }

int ncclRedOpCreatePreMulSum(int *op, void *factor, int type, int residence, comm *c) {
  double value;
  switch (type) {
    case FLOAT16: value = from_half(*(unsigned short *)factor); break;
    case BFLOAT16: value = from_bfloat(*(unsigned short *)factor); break;
    case FLOAT32: value = *(float *)factor; break;
    case FLOAT64: value = *(double *)factor; break;
    default: return INVALID_ARGUMENT;
  }
  int number = c->factor_count++ % 256; /* torch destroys each after use */
  c->factors[number] = value;
  *op = BUILT_IN + number;
  return SUCCESS;
}
int ncclRedOpDestroy(int op, comm *c) { return SUCCESS; }

/* ---- calls: those between ncclGroupStart and ncclGroupEnd start at the group's end */
static __thread int depth;
static __thread job *grouped, **grouped_end;

static void enqueue(comm *c, job *first) {
  pthread_mutex_lock(&c->lock);
  if (c->last) c->last->next = first;
  else c->first = first;
  first->number = pretended_begin(first->stream);
  for (c->last = first; c->last->next;) c->last = c->last->next;
  pthread_cond_broadcast(&c->changed);
  pthread_mutex_unlock(&c->lock);
}
int ncclGroupStart(void) {
  if (!depth++) grouped = NULL, grouped_end = &grouped;
  return SUCCESS;
}
int ncclGroupEnd(void) {
  if (--depth) return SUCCESS;
  while (grouped) { /* sends and receives of a stream run together, collectives one by one */
    job *first = grouped, *last = first, **rest = &grouped;
    grouped = first->next;
    first->next = NULL;
    while (first->is.call >= SEND && *rest) {
      job *other = *rest;
      if (other->comm == first->comm && other->stream == first->stream && other->is.call >= SEND) {
        *rest = other->next;
        other->next = NULL;
        last->in_group = 1;
        last = last->next = other;
      } else {
        rest = &other->next;
      }
    }
    enqueue(first->comm, first);
  }
  return SUCCESS;
}
static int call(comm *c, card is, const void *from, void *to, cudaStream_t stream) {
  if ((unsigned)is.type >= TYPES) return INVALID_ARGUMENT; /* types of 8 bits */
  job *j = calloc(1, sizeof *j);
  *j = (job){.is = is, .from = from, .to = to, .factor = 1, .stream = stream, .comm = c};
  if (is.op >= BUILT_IN) j->factor = c->factors[is.op - BUILT_IN], j->is.op = SUM;
  if (is.op == AVG && is.type >= FLOAT16) j->factor = 1.0 / c->size, j->is.op = SUM; /* like NCCL, which avoids overflow of the sum */
  if (is.call >= SEND) j->is.count *= width[is.type];
  ncclGroupStart();
  *grouped_end = j;
  grouped_end = &j->next;
  return ncclGroupEnd();
}
int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, comm *c, cudaStream_t stream) {
  return call(c, (card){ALL_REDUCE, type, op, 0, count}, from, to, stream);
}
int ncclReduce(const void *from, void *to, size_t count, int type, int op, int root, comm *c, cudaStream_t stream) {
  return call(c, (card){REDUCE, type, op, root, count}, from, to, stream);
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
int ncclSend(const void *from, size_t count, int type, int peer, comm *c, cudaStream_t stream) {
  return call(c, (card){SEND, type, SUM, peer, count}, from, NULL, stream);
}
int ncclRecv(void *to, size_t count, int type, int peer, comm *c, cudaStream_t stream) {
  return call(c, (card){RECEIVE, type, SUM, peer, count}, NULL, to, stream);
}
int ncclAlltoAll(const void *from, void *to, size_t count, int type, comm *c, cudaStream_t stream) {
  ncclGroupStart();
  for (int rank = 0; rank < c->size; rank++) {
    ncclSend((const char *)from + rank * count * width[type], count, type, rank, c, stream);
    ncclRecv((char *)to + rank * count * width[type], count, type, rank, c, stream);
  }
  return ncclGroupEnd();
}
int ncclGather(const void *from, void *to, size_t count, int type, int root, comm *c, cudaStream_t stream) {
  ncclGroupStart();
  ncclSend(from, count, type, root, c, stream);
  for (int rank = 0; rank < c->size && c->rank == root; rank++)
    ncclRecv((char *)to + rank * count * width[type], count, type, rank, c, stream);
  return ncclGroupEnd();
}
int ncclScatter(const void *from, void *to, size_t count, int type, int root, comm *c, cudaStream_t stream) {
  ncclGroupStart();
  for (int rank = 0; rank < c->size && c->rank == root; rank++)
    ncclSend((const char *)from + rank * count * width[type], count, type, rank, c, stream);
  ncclRecv(to, count, type, root, c, stream);
  return ncclGroupEnd();
}
