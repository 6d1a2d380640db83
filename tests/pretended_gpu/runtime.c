/* A CUDA runtime without a GPU: device memory is host memory, copies copy, kernels do nothing.
   LD_PRELOAD it before torch's CUDA build. PRETENDED_GPUS (1), PRETENDED_GIB (16) per device. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include "cuda_runtime_api.h"

typedef void (*listener)(const char *);
static listener heard;
void pretended_listen(listener f) { heard = f; }
static void waits(const char *what) { if (heard) heard(what); }

static __thread int current;
static int devices(void) { const char *s = getenv("PRETENDED_GPUS"); return s ? atoi(s) : 1; }
/* PRETENDED_GIB=16,0.35: of device 0, and of all others */
static size_t room(void) { const char *s = getenv("PRETENDED_GIB"), *rest = s ? strchr(s, ',') : NULL; if (rest && current) s = rest + 1; return (size_t)((s ? atof(s) : 16.0) * (1ull << 30)); }

/* ---- memory */
typedef struct block { char *at; size_t size; int device; struct block *next; } block; /* device -1: pinned */
static block *blocks; static size_t used[64];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
unsigned long pretended_launches, pretended_syncs, pretended_mallocs;

static cudaError_t take(void **p, size_t size, int device) {
  if (!size) { *p = NULL; return cudaSuccess; }
  size = (size + 4095) & ~4095ul;
  pthread_mutex_lock(&lock);
  if (device >= 0 && used[device] + size > room()) { pthread_mutex_unlock(&lock); *p = NULL; return cudaErrorMemoryAllocation; }
  char *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  block *b = malloc(sizeof *b); *b = (block){at, size, device, blocks}; blocks = b;
  if (device >= 0) { used[device] += size; pretended_mallocs++; }
  pthread_mutex_unlock(&lock);
  *p = at; return cudaSuccess;
}
static cudaError_t give(void *p) {
  pthread_mutex_lock(&lock);
  for (block **b = &blocks; *b; b = &(*b)->next) if ((*b)->at == p) {
    block *gone = *b; *b = gone->next; munmap(gone->at, gone->size); if (gone->device >= 0) used[gone->device] -= gone->size; free(gone); break; }
  pthread_mutex_unlock(&lock); return cudaSuccess;
}
/* -2: pageable, -1: pinned, else the device */
int pretended_where(const void *p) {
  int where = -2; pthread_mutex_lock(&lock);
  for (block *b = blocks; b; b = b->next) if ((char *)p >= b->at && (char *)p < b->at + b->size) { where = b->device; break; }
  pthread_mutex_unlock(&lock); return where;
}
static __thread cudaError_t last;
static cudaError_t said(cudaError_t e) { if (e) last = e; return e; }
cudaError_t cudaGetLastError(void) { cudaError_t e = last; last = 0; return e; }
cudaError_t cudaPeekAtLastError(void) { return last; }
cudaError_t cudaMalloc(void **p, size_t n) { return said(take(p, n, current)); }
cudaError_t cudaMallocAsync(void **p, size_t n, cudaStream_t s) { return said(take(p, n, current)); }
cudaError_t cudaFree(void *p) { return give(p); }
cudaError_t cudaFreeAsync(void *p, cudaStream_t s) { return give(p); }
cudaError_t cudaHostAlloc(void **p, size_t n, unsigned f) { return take(p, n, -1); }
cudaError_t cudaFreeHost(void *p) { return give(p); }
cudaError_t cudaHostRegister(void *p, size_t n, unsigned f) { pthread_mutex_lock(&lock);
  block *b = malloc(sizeof *b); *b = (block){p, n, -1, blocks}; blocks = b; pthread_mutex_unlock(&lock); return 0; }
cudaError_t cudaHostUnregister(void *p) { pthread_mutex_lock(&lock);
  for (block **b = &blocks; *b; b = &(*b)->next) if ((*b)->at == p) { block *g = *b; *b = g->next; free(g); break; }
  pthread_mutex_unlock(&lock); return 0; }
cudaError_t cudaMemGetInfo(size_t *f, size_t *t) { *t = room(); *f = *t - used[current]; return 0; }
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
  int w = pretended_where(p); memset(a, 0, sizeof *a);
  a->type = w >= 0 ? cudaMemoryTypeDevice : w == -1 ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  a->device = w < 0 ? current : w; a->devicePointer = w >= -1 ? (void *)p : NULL; a->hostPointer = w == -1 ? (void *)p : NULL; return 0; }
static void copied(const char *how, void *d, const void *s, size_t n) {
  int from = pretended_where(s), to = pretended_where(d);
  if (from == -2 && to >= 0) { char t[80]; snprintf(t, 80, "%s %zu bytes pageable -> device", how, n); waits(t); }
  if (from >= 0 && to == -2) { char t[80]; snprintf(t, 80, "%s %zu bytes device -> pageable", how, n); waits(t); }
  memmove(d, s, n);
}
cudaError_t cudaMemcpy(void *d, const void *s, size_t n, enum cudaMemcpyKind k) { pretended_syncs++; waits("cudaMemcpy"); memmove(d, s, n); return 0; }
cudaError_t cudaMemcpyAsync(void *d, const void *s, size_t n, enum cudaMemcpyKind k, cudaStream_t st) { copied("cudaMemcpyAsync", d, s, n); return 0; }
cudaError_t cudaMemcpyPeerAsync(void *d, int dd, const void *s, int sd, size_t n, cudaStream_t st) { memmove(d, s, n); return 0; }
cudaError_t cudaMemcpyToSymbol(const void *sy, const void *s, size_t n, size_t o, enum cudaMemcpyKind k) { return 0; }
cudaError_t cudaMemset(void *p, int v, size_t n) { memset(p, v, n); return 0; }
cudaError_t cudaMemsetAsync(void *p, int v, size_t n, cudaStream_t s) { memset(p, v, n); return 0; }
cudaError_t cudaGetSymbolAddress(void **p, const void *s) { static char symbol[1 << 20]; *p = symbol; return 0; }

/* ---- devices */
cudaError_t cudaGetDeviceCount(int *n) { *n = devices(); return *n ? cudaSuccess : cudaErrorNoDevice; }
cudaError_t cudaGetDevice(int *d) { *d = current; return 0; }
cudaError_t cudaSetDevice(int d) { if (d < 0 || d >= devices()) return said(cudaErrorInvalidDevice); current = d; return 0; }
cudaError_t cudaDriverGetVersion(int *v) { *v = 13000; return 0; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *l, int *g) { *l = 0; *g = -5; return 0; }
cudaError_t cudaDeviceCanAccessPeer(int *c, int d, int p) { *c = 1; return 0; }
cudaError_t cudaDeviceGetPCIBusId(char *s, int n, int d) { snprintf(s, n, "0000:%02x:00.0", d + 1); return 0; }
cudaError_t cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int d) {
  switch (a) {
    case cudaDevAttrComputeCapabilityMajor: *v = 8; break;
    case cudaDevAttrComputeCapabilityMinor: *v = 0; break;
    case cudaDevAttrMultiProcessorCount: *v = 108; break;
    case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: *v = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *v = 64; break;
    case cudaDevAttrMaxGridDimX: *v = 2147483647; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *v = 65535; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *v = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *v = 166912; break;
    case cudaDevAttrWarpSize: *v = 32; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *v = 2048; break;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: *v = 65536; break;
    case cudaDevAttrL2CacheSize: *v = 40 << 20; break;
    case cudaDevAttrClockRate: *v = 1410000; break;
    default: *v = 0;
  }
  return 0;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "Pretended GPU"); p->totalGlobalMem = room(); p->sharedMemPerBlock = 49152; p->regsPerBlock = 65536; p->warpSize = 32;
  p->maxThreadsPerBlock = 1024; p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024; p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647; p->maxGridSize[1] = p->maxGridSize[2] = 65535; p->major = 8; p->minor = 0;
  p->multiProcessorCount = 108; p->maxThreadsPerMultiProcessor = 2048; p->l2CacheSize = 40 << 20; p->unifiedAddressing = 1;
  p->sharedMemPerMultiprocessor = p->sharedMemPerBlockOptin = 166912; p->regsPerMultiprocessor = 65536; p->concurrentKernels = 1;
  p->maxBlocksPerMultiProcessor = 32; p->memPitch = 2147483647; p->textureAlignment = 512; p->pciBusID = d + 1; p->uuid.bytes[0] = d + 1;
  return 0;
}

/* ---- streams and events */
static void *fresh(void) { return calloc(1, 64); }
cudaError_t cudaStreamCreate(cudaStream_t *s) { *s = fresh(); return 0; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned f) { *s = fresh(); return 0; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned f, int p) { *s = fresh(); return 0; }
cudaError_t cudaStreamDestroy(cudaStream_t s) { return 0; }
cudaError_t cudaStreamGetPriority(cudaStream_t s, int *p) { *p = 0; return 0; }
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *c) { *c = cudaStreamCaptureStatusNone; return 0; }
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *c, unsigned long long *id, cudaGraph_t *g,
  const cudaGraphNode_t **d, const cudaGraphEdgeData **e, size_t *n) { *c = cudaStreamCaptureStatusNone; if (id) *id = 0; if (n) *n = 0; return 0; }
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *m) { return 0; }
cudaError_t cudaStreamQuery(cudaStream_t s) { return 0; }
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned f) { return 0; }
cudaError_t cudaStreamSynchronize(cudaStream_t s) { pretended_syncs++; waits("cudaStreamSynchronize"); return 0; }
cudaError_t cudaDeviceSynchronize(void) { pretended_syncs++; waits("cudaDeviceSynchronize"); return 0; }
cudaError_t cudaEventCreate(cudaEvent_t *e) { *e = fresh(); return 0; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned f) { *e = fresh(); return 0; }
cudaError_t cudaEventDestroy(cudaEvent_t e) { free(e); return 0; }
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return 0; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned f) { return 0; }
cudaError_t cudaEventQuery(cudaEvent_t e) { return 0; }
cudaError_t cudaEventSynchronize(cudaEvent_t e) { waits("cudaEventSynchronize"); const char *ms = getenv("PRETENDED_STALL_MS"); if (ms) usleep(1000 * atoi(ms)); return 0; }
cudaError_t cudaEventElapsedTime(float *t, cudaEvent_t a, cudaEvent_t b) { *t = 1; return 0; }
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void *u) { f(u); return 0; }
cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void *u, unsigned g) { f(s, 0, u); return 0; }

/* ---- kernels */
void **__cudaRegisterFatBinary(void *b) { return fresh(); }
void __cudaRegisterFatBinaryEnd(void **h) {}
void __cudaUnregisterFatBinary(void **h) {}
void __cudaRegisterFunction(void **h, const char *f, char *df, const char *name, int l, void *t, void *b, void *bd, void *gd, int *w) {}
void __cudaRegisterVar(void **h, char *v, char *da, const char *n, int e, size_t s, int c, int g) {}
unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t m, void *s) { return 0; }
cudaError_t __cudaPopCallConfiguration(dim3 *g, dim3 *b, size_t *m, void *s) { *g = *b = (dim3){1, 1, 1}; *m = 0; *(void **)s = NULL; return 0; }
cudaError_t __cudaGetKernel(void **k, const void *f) { *k = (void *)f; return 0; }
cudaError_t __cudaLaunchKernel(void *k, dim3 g, dim3 b, void **a, size_t m, cudaStream_t s) { pretended_launches++; return 0; }
cudaError_t cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **a, size_t m, cudaStream_t s) { pretended_launches++; return 0; }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **a) { pretended_launches++; return 0; }
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) { memset(a, 0, sizeof *a); a->maxThreadsPerBlock = 1024; a->numRegs = 32;
  a->ptxVersion = a->binaryVersion = 80; a->maxDynamicSharedSizeBytes = 49152; return 0; }
cudaError_t cudaFuncSetAttribute(const void *f, enum cudaFuncAttribute a, int v) { return 0; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int b, size_t m, unsigned fl) { *n = 2; return 0; }
static int nothing() { return 0; }
cudaError_t cudaGetDriverEntryPointByVersion(const char *s, void **f, unsigned v, unsigned long long fl, enum cudaDriverEntryPointQueryResult *r) {
  *f = nothing; if (r) *r = cudaDriverEntryPointSuccess; return 0; }

/* ---- NCCL: processes of this machine meet in shared memory; a call returns when all ranks have made it */
#include <fcntl.h>
#include <unistd.h>
#define CHUNK (1 << 20)
typedef struct { pthread_barrier_t meet; int ready; } meeting;
typedef struct { int rank, size; meeting *m; char *slots; } comm;
typedef struct { char b[128]; } ident;
static size_t width(int t) { static const size_t w[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}; return w[t]; }
int ncclGetUniqueId(ident *id) { int f = open("/dev/urandom", O_RDONLY); memset(id, 0, 128); read(f, id, 12); close(f); return 0; }
static int join(comm **out, int n, ident id, int rank, int tag) {
  char name[64] = "/pretended-nccl-"; size_t size = 4096 + (size_t)n * CHUNK;
  for (int i = 0; i < 12; i++) sprintf(name + 16 + 2 * i, "%02x", (unsigned char)id.b[i]);
  sprintf(name + 40, "-%d", tag);
  int f = shm_open(name, O_RDWR | O_CREAT, 0600); ftruncate(f, size);
  char *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, f, 0); close(f);
  meeting *m = (meeting *)at;
  if (rank == 0) { pthread_barrierattr_t a; pthread_barrierattr_init(&a); pthread_barrierattr_setpshared(&a, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&m->meet, &a, n); __atomic_store_n(&m->ready, 1, __ATOMIC_RELEASE); }
  while (!__atomic_load_n(&m->ready, __ATOMIC_ACQUIRE)) usleep(1000);
  pthread_barrier_wait(&m->meet);
  if (rank == 0) shm_unlink(name);
  comm *c = malloc(sizeof *c); *c = (comm){rank, n, m, at + 4096}; *out = c; return 0;
}
int ncclCommInitRankConfig(comm **c, int n, ident id, int r, void *g) { return join(c, n, id, r, 0); }
int ncclCommInitRank(comm **c, int n, ident id, int r) { return join(c, n, id, r, 0); }
int ncclCommInitRankScalable(comm **c, int n, int r, int k, ident *ids, void *g) { return join(c, n, ids[0], r, 0); }
int ncclCommCount(comm *c, int *n) { *n = c->size; return 0; }
int ncclCommUserRank(comm *c, int *r) { *r = c->rank; return 0; }
int ncclCommGetAsyncError(comm *c, int *e) { *e = 0; return 0; }
static void meet(comm *c) { pthread_barrier_wait(&c->m->meet); }
static float wide(unsigned short h) { unsigned u = (unsigned)h << 16; float f; memcpy(&f, &u, 4); return f; }
static unsigned short narrow(float f) { unsigned u; memcpy(&u, &f, 4); if ((u & 0x7fffffff) > 0x7f800000) return u >> 16 | 64; return (u + 0x7fff + (u >> 16 & 1)) >> 16; }
#define COMBINE(a, b) (op == 1 ? (a) * (b) : op == 2 ? ((a) > (b) ? (a) : (b)) : op == 3 ? ((a) < (b) ? (a) : (b)) : (a) + (b))
#define REDUCE(T) { T *out = d; for (size_t i = 0; i < n; i++) { T v = ((T *)s[0])[i]; for (int r = 1; r < size; r++) { T w = ((T *)s[r])[i]; v = COMBINE(v, w); } out[i] = op == 4 ? v / size : v; } break; }
static void reduce(void *d, char **s, size_t n, int t, int op, int size) {
  switch (t) { case 0: REDUCE(signed char) case 1: REDUCE(unsigned char) case 2: REDUCE(int) case 3: REDUCE(unsigned) case 4: REDUCE(long) case 5: REDUCE(unsigned long)
    case 6: REDUCE(_Float16) case 7: REDUCE(float) case 8: REDUCE(double)
    case 9: { unsigned short *out = d; for (size_t i = 0; i < n; i++) { float v = wide(((unsigned short *)s[0])[i]); for (int r = 1; r < size; r++) { float w = wide(((unsigned short *)s[r])[i]); v = COMBINE(v, w); } out[i] = narrow(op == 4 ? v / size : v); } } } }
/* every rank's part of `s` comes by in pieces */
static void all(comm *c, const char *s, size_t bytes, void (*take)(comm *, size_t, size_t, void *), void *what) {
  for (size_t at = 0; at < bytes; at += CHUNK) {
    size_t n = bytes - at < CHUNK ? bytes - at : CHUNK;
    if (s) memcpy(c->slots + (size_t)c->rank * CHUNK, s + at, n);
    meet(c); take(c, at, n, what); meet(c);
  } }
typedef struct { char *d; int t, op, root; size_t bytes; } job;
static void reducing(comm *c, size_t at, size_t n, void *w) { job *j = w; char *s[64]; for (int r = 0; r < c->size; r++) s[r] = c->slots + (size_t)r * CHUNK; if (j->d) reduce(j->d + at, s, n / width(j->t), j->t, j->op, c->size); }
static void copying(comm *c, size_t at, size_t n, void *w) { job *j = w; memcpy(j->d + at, c->slots + (size_t)j->root * CHUNK, n); }
static void gathering(comm *c, size_t at, size_t n, void *w) { job *j = w; for (int r = 0; r < c->size; r++) memcpy(j->d + r * j->bytes + at, c->slots + (size_t)r * CHUNK, n); }
int ncclAllReduce(const void *s, void *d, size_t n, int t, int op, comm *c, cudaStream_t st) { job j = {d, t, op}; all(c, s, n * width(t), reducing, &j); return 0; }
int ncclReduce(const void *s, void *d, size_t n, int t, int op, int root, comm *c, cudaStream_t st) { job j = {c->rank == root ? d : NULL, t, op}; all(c, s, n * width(t), reducing, &j); return 0; }
int ncclBroadcast(const void *s, void *d, size_t n, int t, int root, comm *c, cudaStream_t st) { job j = {d, t, 0, root}; all(c, c->rank == root ? s : NULL, n * width(t), copying, &j); return 0; }
int ncclBcast(void *b, size_t n, int t, int root, comm *c, cudaStream_t st) { return ncclBroadcast(b, b, n, t, root, c, st); }
int ncclAllGather(const void *s, void *d, size_t n, int t, comm *c, cudaStream_t st) { job j = {d, t, 0, 0, n * width(t)}; all(c, s, n * width(t), gathering, &j); return 0; }
int ncclMemAlloc(void **p, size_t n) { return take(p, n, current); }
int ncclMemFree(void *p) { return give(p); }

/* ---- what has something to say beside success */
int cublasGetMathMode(void *h, int *m) { *m = 0; return 0; }
int cublasGetPointerMode_v2(void *h, int *m) { *m = 0; return 0; }
int cublasLtMatmulAlgoGetHeuristic(void *h, void *o, void *a, void *b, void *c, void *d, void *p, int n, char *r, int *found) { memset(r, 0, 96); *found = 1; return 0; }
/* cudnnConvolution*AlgoPerf_t: algo, status, time, memory, determinism, mathType, reserved[3] */
typedef struct { int algo, status; float time; size_t memory; int determinism, math, reserved[3]; } perf;
static int algorithm(int *n, perf *p) { *n = 1; memset(p, 0, sizeof *p); p->determinism = 1; return 0; }
int cudnnGetConvolutionForwardAlgorithm_v7(void *h, void *a, void *b, void *c, void *d, int w, int *n, perf *p) { return algorithm(n, p); }
int cudnnGetConvolutionBackwardDataAlgorithm_v7(void *h, void *a, void *b, void *c, void *d, int w, int *n, perf *p) { return algorithm(n, p); }
int cudnnGetConvolutionBackwardFilterAlgorithm_v7(void *h, void *a, void *b, void *c, void *d, int w, int *n, perf *p) { return algorithm(n, p); }
int cudnnFindConvolutionForwardAlgorithmEx(void *h, void *a, void *x, void *b, void *y, void *c, void *d, void *z, int w, int *n, perf *p, void *m, size_t s) { return algorithm(n, p); }
int cudnnFindConvolutionBackwardDataAlgorithmEx(void *h, void *a, void *x, void *b, void *y, void *c, void *d, void *z, int w, int *n, perf *p, void *m, size_t s) { return algorithm(n, p); }
int cudnnFindConvolutionBackwardFilterAlgorithmEx(void *h, void *a, void *x, void *b, void *y, void *c, void *d, void *z, int w, int *n, perf *p, void *m, size_t s) { return algorithm(n, p); }
int cudnnGetConvolutionForwardWorkspaceSize(void *h, void *a, void *b, void *c, void *d, int g, size_t *n) { *n = 0; return 0; }
int cudnnGetConvolutionBackwardDataWorkspaceSize(void *h, void *a, void *b, void *c, void *d, int g, size_t *n) { *n = 0; return 0; }
int cudnnGetConvolutionBackwardFilterWorkspaceSize(void *h, void *a, void *b, void *c, void *d, int g, size_t *n) { *n = 0; return 0; }
int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *h, int m, int o, void *x, void *z, void *y, void *b, void *a, size_t *n) { *n = 0; return 0; }
int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *h, int m, int o, void *x, void *y, void *dy, void *dz, void *dx, void *b, void *a, size_t *n) { *n = 0; return 0; }
int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *h, int m, int o, void *a, void *x, size_t *n) { *n = 0; return 0; }

/* ---- the driver, as far as torch looks */
int cuCtxGetCurrent(void **c) { static char context; *c = &context; return 0; }
int cuDevicePrimaryCtxGetState(int d, unsigned *f, int *a) { *f = 0; *a = 1; return 0; }

/* ---- nvJPEG: reads headers, decodes to black */
int nvjpegGetImageInfo(void *h, const unsigned char *d, size_t n, int *components, int *css, int *w, int *hh) {
  for (size_t i = 2; i + 9 < n && d[i] == 0xff;) {
    int m = d[i + 1]; size_t l = d[i + 2] << 8 | d[i + 3];
    if (m >= 0xc0 && m <= 0xcf && m != 0xc4 && m != 0xc8 && m != 0xcc) {
      memset(w, 0, 16); memset(hh, 0, 16); hh[0] = d[i + 5] << 8 | d[i + 6]; w[0] = d[i + 7] << 8 | d[i + 8]; *components = d[i + 9]; *css = 0; return 0; }
    i += 2 + l;
  }
  return 3; /* bad JPEG */
}
int nvjpegDecodeBatchedSupported(void *h, void *s, int *ok) { *ok = 0; return 0; }
int nvjpegCreateEx(int b, void *a, void *c, unsigned f, void **h) { *h = fresh(); return 0; }
int nvjpegJpegStateCreate(void *h, void **s) { *s = fresh(); return 0; }
int nvjpegDecoderCreate(void *h, int b, void **s) { *s = fresh(); return 0; }
int nvjpegDecoderStateCreate(void *h, void *d, void **s) { *s = fresh(); return 0; }
int nvjpegBufferPinnedCreate(void *h, void *a, void **s) { *s = fresh(); return 0; }
int nvjpegBufferDeviceCreate(void *h, void *a, void **s) { *s = fresh(); return 0; }
int nvjpegJpegStreamCreate(void *h, void **s) { *s = fresh(); return 0; }
int nvjpegDecodeParamsCreate(void *h, void **s) { *s = fresh(); return 0; }
int nvjpegEncoderStateCreate(void *h, void **s, void *st) { *s = fresh(); return 0; }
int nvjpegEncoderParamsCreate(void *h, void **s, void *st) { *s = fresh(); return 0; }

/* ---- the driver, as Triton uses it */
int cuInit(unsigned f) { return 0; }
int cuDriverGetVersion(int *v) { *v = 13000; return 0; }
int cuDeviceGetCount(int *n) { *n = devices(); return 0; }
int cuDeviceGet(int *d, int n) { *d = n; return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) { return cudaDeviceGetAttribute(v, a, d); }
int cuDevicePrimaryCtxRetain(void **c, int d) { static char context; *c = &context; return 0; }
int cuCtxSetCurrent(void *c) { return 0; }
int cuCtxGetDevice(int *d) { *d = current; return 0; }
int cuCtxGetLimit(size_t *v, int l) { *v = 1 << 20; return 0; }
int cuCtxSetLimit(int l, size_t v) { return 0; }
int cuModuleLoadData(void **m, const void *image) { *m = fresh(); return 0; }
int cuModuleLoadDataEx(void **m, const void *image, unsigned n, void *o, void *v) { *m = fresh(); return 0; }
int cuModuleLoad(void **m, const char *file) { *m = fresh(); return 0; }
int cuModuleUnload(void *m) { return 0; }
int cuModuleGetFunction(void **f, void *m, const char *name) { *f = fresh(); return 0; }
int cuFuncGetAttribute(int *v, int a, void *f) { *v = a == 0 ? 1024 : a == 4 ? 32 : 0; return 0; }
int cuFuncSetAttribute(void *f, int a, int v) { return 0; }
int cuFuncSetCacheConfig(void *f, int c) { return 0; }
int cuLaunchKernel() { pretended_launches++; return 0; }
int cuLaunchKernelEx() { pretended_launches++; return 0; }
int cuPointerGetAttribute(void **d, int a, void *p) { *d = p; return 0; }
int cuGetErrorString(int e, const char **s) { *s = "pretended"; return 0; }
int cuOccupancyMaxActiveClusters(int *n, void *f, void *c) { *n = 1; return 0; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, void *f, int b, size_t m) { *n = 2; return 0; }
int cuTensorMapEncodeTiled() { return 0; }
int cuTensorMapEncodeIm2col() { return 0; }
