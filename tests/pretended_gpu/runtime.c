/* CUDA without a GPU: device memory is host memory, copies copy, and kernels do nothing.

   LD_PRELOAD loads it before torch's CUDA build, which then finds these functions instead of NVIDIA's. kernels.py computes what
   each operator of torch would have launched. Environment variables:
   PRETENDED_GPUS      number of devices (1)
   PRETENDED_GIB       memory of each (16); "16,0.35": of device 0, and of all others */
#include "pretended.h"
#include <sys/mman.h>

static __thread int current;
static __thread cudaError_t last;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static cudaError_t said(cudaError_t error) {
  if (error) last = error;
  return error;
}
cudaError_t cudaGetLastError(void) {
  cudaError_t error = last;
  last = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError(void) { return last; }

/* ---- waits of the host, reported to a listener */
typedef void (*listener)(const char *);
static listener heard;
void pretended_listen(listener function) { heard = function; }
static void waits(const char *what) {
  if (heard) heard(what);
}

/* ---- kernels that nothing computes
   kernels.py announces each operator whose results it computes. A kernel launched at any other time (by Triton, or by C++ that calls
   no operator) would leave its results unwritten: it fails as an unknown kernel, and its name is printed. */
unsigned long pretended_launches, pretended_unknown;
static __thread int computing;
void pretended_compute(int on) { computing += on ? 1 : -1; }

int pretended_computed(const char *kernel) {
  pretended_launches++;
  if (computing) return 1;
  void *cpp = dlopen("libstdc++.so.6", RTLD_LAZY | RTLD_NOLOAD); /* loaded by torch */
  char *(*demangle)(const char *, char *, size_t *, int *) = cpp ? dlsym(cpp, "__cxa_demangle") : NULL;
  int status = 1;
  char *name = demangle ? demangle(kernel, NULL, NULL, &status) : NULL;
  fprintf(stderr, "no kernel for %.200s, which no operator has launched\n", status ? kernel : name);
  free(name);
  pretended_unknown++;
  return 0;
}
int pretended_missing(const char *function) {
  fprintf(stderr, "no %s in the pretended runtime\n", function);
  pretended_unknown++;
  return said(cudaErrorNotSupported);
}

/* ---- work in the background
   What the program launches is done when the call returns. Only NCCL works in the background (nccl.c): a stream counts the work queued
   on it and the work done, and an event stores how much was queued. Where a stream would wait, for an event or for earlier work, the
   host waits, since it computes what comes next. This is no wait of the program, so it is not reported. */
struct CUstream_st { unsigned long queued, done; };
struct CUevent_st {
  struct CUstream_st *stream;
  unsigned long queued;
  struct timespec at;
};
static struct CUstream_st default_stream;
static pthread_mutex_t order = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t progress = PTHREAD_COND_INITIALIZER;

static struct CUstream_st *of(cudaStream_t stream) {
  int is_default = stream == NULL || stream == cudaStreamLegacy || stream == cudaStreamPerThread;
  return is_default ? &default_stream : stream;
}
unsigned long pretended_begin(cudaStream_t stream) {
  pthread_mutex_lock(&order);
  unsigned long number = ++of(stream)->queued;
  pthread_mutex_unlock(&order);
  return number;
}
static void wait_until(struct CUstream_st *stream, unsigned long done) {
  pthread_mutex_lock(&order);
  while (stream->done < done) pthread_cond_wait(&progress, &order);
  pthread_mutex_unlock(&order);
}
void pretended_turn(cudaStream_t stream, unsigned long number) { wait_until(of(stream), number - 1); }
void pretended_end(cudaStream_t stream, unsigned long number) {
  pthread_mutex_lock(&order);
  of(stream)->done = number;
  pthread_cond_broadcast(&progress);
  pthread_mutex_unlock(&order);
}
static cudaError_t is_done(struct CUstream_st *stream, unsigned long queued) {
  pthread_mutex_lock(&order);
  int done = stream->done >= queued;
  pthread_mutex_unlock(&order);
  return done ? cudaSuccess : cudaErrorNotReady;
}

static void wait_for(cudaStream_t stream) { wait_until(of(stream), of(stream)->queued); }
void pretended_settle(cudaStream_t stream) { wait_for(stream); }

/* ---- memory */
enum { PAGEABLE = -2, PINNED = -1 }; /* kinds of host memory; other values are devices */
typedef struct block {
  char *at;
  size_t size;
  int where;
  struct block *next;
} block;
static block *blocks;
static size_t used[64];

/* Read once, and by a fork again: getenv may fail in a thread while a program changes its environment. */
static int devices = 1;
static double first_gib = 16, other_gib = 16;
__attribute__((constructor)) void pretended_read_environment(void) {
  const char *count = getenv("PRETENDED_GPUS"), *gib = getenv("PRETENDED_GIB");
  if (count) devices = atoi(count);
  if (!gib) return;
  const char *others = strchr(gib, ',');
  first_gib = atof(gib);
  other_gib = others ? atof(others + 1) : first_gib;
}
static size_t capacity(int device) { return (size_t)((device ? other_gib : first_gib) * (1ull << 30)); }

/* Pages are provided as they are written. Unwritten device memory is NaN in all floating point types. */
static cudaError_t take(void **at, size_t size, int where) {
  *at = NULL;
  if (!size) return cudaSuccess;
  size = (size + 4095) & ~4095ul;
  pthread_mutex_lock(&lock);
  if (where < 0 || used[where] + size <= capacity(where)) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    *at = mmap(NULL, size, PROT_READ | PROT_WRITE, flags, -1, 0);
    block *taken = malloc(sizeof *taken);
    *taken = (block){*at, size, where, blocks};
    blocks = taken;
    if (where >= 0) used[where] += size;
  }
  pthread_mutex_unlock(&lock);
  if (*at && where >= 0) memset(*at, 0xff, size);
  return *at ? cudaSuccess : said(cudaErrorMemoryAllocation);
}
static cudaError_t give(void *at) {
  pthread_mutex_lock(&lock);
  for (block **each = &blocks; *each; each = &(*each)->next)
    if ((*each)->at == at) {
      block *gone = *each;
      *each = gone->next;
      munmap(at, gone->size);
      if (gone->where >= 0) used[gone->where] -= gone->size;
      free(gone);
      break;
    }
  pthread_mutex_unlock(&lock);
  return cudaSuccess;
}
static int where_is(const void *at) {
  int where = PAGEABLE;
  pthread_mutex_lock(&lock);
  for (block *each = blocks; each; each = each->next)
    if ((char *)at >= each->at && (char *)at < each->at + each->size) {
      where = each->where;
      break;
    }
  pthread_mutex_unlock(&lock);
  return where;
}
cudaError_t cudaMalloc(void **at, size_t size) { return take(at, size, current); }
cudaError_t cudaHostAlloc(void **at, size_t size, unsigned flags) { return take(at, size, PINNED); }
cudaError_t cudaFree(void *at) { return give(at); }
cudaError_t cudaFreeHost(void *at) { return give(at); }
cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
  *total = capacity(current);
  *free = *total - used[current];
  return 0;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *at) {
  int where = where_is(at);
  memset(found, 0, sizeof *found);
  found->type = where >= 0 ? cudaMemoryTypeDevice : where == PINNED ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  found->device = where >= 0 ? where : current;
  found->devicePointer = where == PAGEABLE ? NULL : (void *)at;
  found->hostPointer = where == PINNED ? (void *)at : NULL;
  return 0;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
  int source = where_is(from), target = where_is(to);
  int is_pageable = source == PAGEABLE || target == PAGEABLE;
  if (is_pageable && (source >= 0 || target >= 0)) waits("cudaMemcpyAsync");
  wait_for(stream);
  memmove(to, from, size);
  return 0;
}
cudaError_t cudaMemsetAsync(void *at, int value, size_t size, cudaStream_t stream) {
  wait_for(stream);
  memset(at, value, size);
  return 0;
}

/* ---- devices, with the properties of an A100 */
cudaError_t cudaGetDeviceCount(int *count) {
  *count = devices;
  return *count ? cudaSuccess : cudaErrorNoDevice;
}
cudaError_t cudaGetDevice(int *device) { *device = current; return 0; }
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= devices) return said(cudaErrorInvalidDevice);
  current = device;
  return 0;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return 0; }
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  switch ((int)attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = 8; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMultiProcessorCount: *value = 108; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 166912; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case 102: *value = 1; break; /* CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED */
    default: *value = 0;
  }
  return 0;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *is, int device) {
  memset(is, 0, sizeof *is);
  strcpy(is->name, "Pretended GPU");
  is->uuid.bytes[0] = is->pciBusID = device + 1;
  is->major = 8;
  is->totalGlobalMem = capacity(device);
  is->multiProcessorCount = 108;
  is->warpSize = 32;
  is->maxThreadsPerBlock = is->maxThreadsDim[0] = is->maxThreadsDim[1] = 1024;
  is->maxThreadsDim[2] = 64;
  is->maxThreadsPerMultiProcessor = 2048;
  is->maxGridSize[0] = 2147483647;
  is->maxGridSize[1] = is->maxGridSize[2] = 65535;
  is->regsPerMultiprocessor = 65536;
  is->sharedMemPerBlock = 49152;
  is->sharedMemPerMultiprocessor = is->sharedMemPerBlockOptin = 166912;
  is->l2CacheSize = 40 << 20;
  return 0;
}

/* ---- streams and events */
/* Streams are few and never freed, since events may refer to them. */
static struct CUstream_st *streams[4096];
static int stream_count;
static cudaError_t new_stream(cudaStream_t *stream) {
  *stream = calloc(1, sizeof **stream);
  pthread_mutex_lock(&order);
  if (stream_count < 4096) streams[stream_count++] = *stream;
  pthread_mutex_unlock(&order);
  return 0;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { return new_stream(stream); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) { return new_stream(stream); }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *is) { *is = cudaStreamCaptureStatusNone; return 0; }
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *is, unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *count) {
  *is = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  if (count) *count = 0;
  return 0;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  wait_until(event->stream, event->queued);
  return 0;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  waits("cudaStreamSynchronize");
  wait_for(stream);
  return 0;
}
cudaError_t cudaDeviceSynchronize(void) {
  waits("cudaDeviceSynchronize");
  wait_for(NULL);
  for (int i = 0; i < stream_count; i++) wait_for(streams[i]);
  return 0;
}
static cudaError_t new_event(cudaEvent_t *event) {
  *event = calloc(1, sizeof **event);
  (*event)->stream = &default_stream;
  return 0;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return new_event(event); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { return new_event(event); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { free(event); return 0; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  event->stream = of(stream);
  event->queued = event->stream->queued;
  clock_gettime(CLOCK_MONOTONIC, &event->at);
  return 0;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) { return cudaEventRecord(event, stream); }
cudaError_t cudaEventQuery(cudaEvent_t event) { return is_done(event->stream, event->queued); }
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  waits("cudaEventSynchronize");
  wait_until(event->stream, event->queued);
  return 0;
}
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
  *milliseconds = (to->at.tv_sec - from->at.tv_sec) * 1e3 + (to->at.tv_nsec - from->at.tv_nsec) / 1e6;
  return 0;
}

/* ---- kernels: functions that nvcc's code calls before main() and for a launch */
static struct { const void *function; const char *name; } *kernels;
static size_t kernel_count;
void *pretended_handle(void) { return calloc(1, 64); }
void **__cudaRegisterFatBinary(void *binary) { return pretended_handle(); }
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
void __cudaRegisterVar(void **handle, char *variable, char *address, const char *name, int is_extern, size_t size, int is_constant, int zero) {}
void __cudaRegisterFunction(void **handle, const char *function, char *device_function, const char *name, int limit, void *thread,
                            void *block, void *block_size, void *grid_size, int *warp) {
  int is_full = !(kernel_count & (kernel_count - 1)); /* doubles at each power of 2 */
  if (is_full) kernels = realloc(kernels, (kernel_count ? 2 * kernel_count : 1) * sizeof *kernels);
  kernels[kernel_count].function = function;
  kernels[kernel_count++].name = name;
}
static cudaError_t launch(const void *function, cudaStream_t stream) {
  const char *name = "a kernel without a name";
  if (!computing)
    for (size_t i = 0; i < kernel_count; i++)
      if (kernels[i].function == function) name = kernels[i].name;
  wait_for(stream);
  return pretended_computed(name) ? cudaSuccess : said(cudaErrorNotSupported);
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) { return 0; }
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  *grid = *block = (dim3){1, 1, 1};
  *shared = 0;
  *(void **)stream = NULL;
  return 0;
}
cudaError_t __cudaGetKernel(void **kernel, const void *function) { *kernel = (void *)function; return 0; }
cudaError_t __cudaLaunchKernel(void *function, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
  return launch(function, stream);
}
cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
  return launch(function, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *how, const void *function, void **arguments) {
  return launch(function, how->stream);
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *are, const void *function) {
  memset(are, 0, sizeof *are);
  are->maxThreadsPerBlock = 1024;
  are->numRegs = 32;
  are->ptxVersion = are->binaryVersion = 80;
  are->maxDynamicSharedSizeBytes = 49152;
  return 0;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int threads, size_t shared,
                                                                   unsigned flags) {
  *blocks = 2;
  return 0;
}

/* ---- the driver, as torch and the launch use it */
int cuInit(unsigned flags) { return 0; }
int cuLogsRegisterCallback(void *function, void *data, void **handle) { return 0; }
int cuLogsUnregisterCallback(void *handle) { return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { return cudaDeviceGetAttribute(value, attribute, device); }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }
int cuCtxGetCurrent(void **is) { *is = cuCtxGetCurrent; return 0; } /* any address but NULL */
int cuModuleLoadData(void **module, const void *image) { *module = pretended_handle(); return 0; }
int cuModuleGetFunction(char **function, void *module, const char *name) { *function = strdup(name); return 0; }
int cuLaunchKernel(const char *function) { return pretended_computed(function) ? 0 : cudaErrorNotSupported; }
int cuGetErrorString(int error, const char **text) { *text = "an error of the pretended driver"; return 0; }

/* torch looks up functions of the driver by name. A missing one is found, and is an error when it is called. */
static char lacking[4096] = "one of these driver functions:";
static int lacks() { return pretended_missing(lacking); }
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
  *function = dlsym(dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD), name);
  if (!*function) {
    pthread_mutex_lock(&lock);
    size_t length = strlen(lacking);
    snprintf(lacking + length, sizeof lacking - length, " %s", name);
    pthread_mutex_unlock(&lock);
    *function = lacks;
  }
  if (result) *result = cudaDriverEntryPointSuccess;
  return 0;
}
