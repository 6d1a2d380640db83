/* Functions of NVIDIA's libraries that must return more than success. Those that compute are in stubs.c, written by build.py:
   kernels.py computes the operator that calls them. */
#include "pretended.h"

/* ---- cuBLAS */
int cublasGetMathMode(void *handle, int *mode) { *mode = 0; return 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { *mode = 0; return 0; }
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference,
                                   int requested, char *results, int *found) {
  memset(results, 0, 96); /* one cublasLtMatmulHeuristicResult_t: an algorithm without a workspace */
  *found = 1;
  return 0;
}

/* ---- cuDNN: one algorithm, without a workspace */
typedef struct { /* cudnnConvolution...AlgoPerf_t */
  int algorithm, status;
  float time;
  size_t memory;
  int determinism, math, reserved[3];
} performance;

static int one_algorithm(int *count, performance *found) {
  *count = 1;
  memset(found, 0, sizeof *found);
  found->determinism = 1;
  return 0;
}
#define ALGORITHM(direction)                                                                                            \
  int cudnnGetConvolution##direction##Algorithm_v7(void *h, void *a, void *b, void *c, void *d, int wanted, int *count, \
                                                   performance *found) {                                                \
    return one_algorithm(count, found);                                                                                 \
  }                                                                                                                     \
  int cudnnFindConvolution##direction##AlgorithmEx(void *h, void *a, void *x, void *b, void *y, void *c, void *d,        \
                                                   void *z, int wanted, int *count, performance *found, void *workspace, \
                                                   size_t size) {                                                       \
    return one_algorithm(count, found);                                                                                 \
  }                                                                                                                     \
  int cudnnGetConvolution##direction##WorkspaceSize(void *h, void *a, void *b, void *c, void *d, int algorithm,         \
                                                    size_t *size) {                                                     \
    *size = 0;                                                                                                          \
    return 0;                                                                                                           \
  }
ALGORITHM(Forward)
ALGORITHM(BackwardData)
ALGORITHM(BackwardFilter)

int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *h, int mode, int operation, void *x, void *z, void *y,
                                                             void *b, void *activation, size_t *size) {
  *size = 0;
  return 0;
}
int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *h, int mode, int operation, void *x, void *y, void *dy, void *dz,
                                                      void *dx, void *b, void *activation, size_t *size) {
  *size = 0;
  return 0;
}
int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *h, int mode, int operation, void *activation, void *x,
                                                         size_t *size) {
  *size = 0;
  return 0;
}

/* ---- nvJPEG: only reads headers */
int nvjpegGetImageInfo(void *handle, const unsigned char *data, size_t size, int *components, int *subsampling, int *widths,
                       int *heights) {
  for (size_t at = 2; at + 9 < size && data[at] == 0xff;) {
    int marker = data[at + 1];
    int is_frame = marker >= 0xc0 && marker <= 0xcf && marker != 0xc4 && marker != 0xc8 && marker != 0xcc;
    if (is_frame) {
      memset(widths, 0, 4 * sizeof *widths);
      memset(heights, 0, 4 * sizeof *heights);
      heights[0] = data[at + 5] << 8 | data[at + 6];
      widths[0] = data[at + 7] << 8 | data[at + 8];
      *components = data[at + 9];
      *subsampling = 0;
      return 0;
    }
    at += 2 + (data[at + 2] << 8 | data[at + 3]);
  }
  return 3; /* a bad JPEG */
}
int nvjpegDecodeBatchedSupported(void *handle, void *stream, int *unsupported) { *unsupported = 0; return 0; }
int nvjpegCreateEx(int backend, void *device, void *pinned, unsigned flags, void **handle) {
  *handle = pretended_handle();
  return 0;
}
#define CREATE(function, ...) \
  int function(__VA_ARGS__, void **made) { *made = pretended_handle(); return 0; }
CREATE(nvjpegJpegStateCreate, void *handle)
CREATE(nvjpegDecoderCreate, void *handle, int backend)
CREATE(nvjpegDecoderStateCreate, void *handle, void *decoder)
CREATE(nvjpegBufferPinnedCreate, void *handle, void *allocator)
CREATE(nvjpegBufferDeviceCreate, void *handle, void *allocator)
CREATE(nvjpegJpegStreamCreate, void *handle)
CREATE(nvjpegDecodeParamsCreate, void *handle)
